"""Drafts with Medusa heads: each guesses one of the next tokens from the served model's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.core.plan import Draft
from penstock.core.request import Request
from penstock.engine.batch import BatchRows
from penstock.engine.drafters.model import HiddenStates
from penstock.models.drafters.heads import MedusaHeads


class MedusaDrafter:
    def __init__(self, heads: MedusaHeads, states: HiddenStates, rows: BatchRows) -> None:
        self._heads = heads
        self.states = states
        self._rows = rows

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None: ...

    def remove(self, request_id: str) -> None:
        self.states.forget(request_id)

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        found = {}
        for request_id in wanted:
            if request_id in self._rows:
                end = self._rows.num_tokens(request_id) - 1  # the last token has no state yet
                _, state = self.states.take(request_id, end - 1, end)
                if state is not None:
                    found[request_id] = state
        if not found:
            return {}
        with torch.inference_mode():
            drafted = self._heads.draft(torch.cat(list(found.values()))).tolist()
        return {
            request_id: Draft(tuple(token_ids[: wanted[request_id]]), "heads")
            for request_id, token_ids in zip(found, drafted, strict=True)
        }
