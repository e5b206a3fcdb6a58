"""Drafts with Medusa's heads, each of which guesses one token from the served model's last hidden state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from penstock.core.plan import Chunk, Draft
from penstock.core.request import Request
from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.drafters.following import OnTheWay, followed_chunks, send, verified
from penstock.engine.drafters.hidden_states import NOTHING, HiddenStates
from penstock.engine.staging import Staging
from penstock.models.drafters.heads import MedusaHeads


class MedusaDrafter:
    in_use = None  # the host knows all drafts before they are verified

    def __init__(
        self,
        heads: MedusaHeads,
        states: HiddenStates,
        rows: BatchRows,
        device: torch.device,
        *,
        follows_steps: bool,
    ) -> None:
        self._heads, self._rows, self.states = heads, rows, states
        self._staging = Staging(device, 1 << 18)
        self.follows_steps = follows_steps
        self._is_wanted = False  # drafts after the next step
        self._on_the_way: OnTheWay | None = None
        self._error: Exception | None = None

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None: ...

    def remove(self, request_id: str) -> None:
        self.states.forget(request_id)

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        if self._error is not None:
            raise self._error
        self._is_wanted = self.follows_steps
        drafted = self._take_followed(wanted)
        found = {}
        for request_id in wanted:
            if request_id in self._rows and request_id not in drafted:
                end = self._rows.num_tokens(request_id) - 1  # the last token has no state yet
                _, state = self.states.take(request_id, end - 1, end)
                if state is not None:
                    found[request_id] = state
        if found:
            with torch.inference_mode():
                made = self._heads.draft(torch.cat(list(found.values()))).tolist()
            drafted.update(zip(found, made, strict=True))
        return {
            request_id: Draft(tuple(token_ids[: wanted[request_id]]), "heads")
            for request_id, token_ids in drafted.items()
        }

    def follow(
        self,
        chunks: Sequence[Chunk],
        step: HostStep,
        sampled: Tensor,
        states: Tensor | None,
        blind: Collection[str],
    ) -> Mapping[str, int]:
        """Draft after a step, without waiting for it. Returns how many states of a request need not be kept."""
        is_wanted, self._is_wanted = self._is_wanted, False
        if not is_wanted or states is None or self._error is not None:
            return NOTHING
        try:
            ready = followed_chunks(chunks)
            self._staging.next_step()
            found = verified(ready, step, sampled, self._rows.draft_tokens, self._staging)
            if found is None:
                return NOTHING
            at = found.at.gather(1, found.num_accepted[:, None]).squeeze(1)
            self._on_the_way = send(found, self._heads.draft(states[at]))
        except Exception as error:  # the next call of `propose` reports the error
            self._error = error
            return NOTHING
        return {request_id: chunk.num_tokens for request_id, chunk in ready.items()}

    def take_recording_s(self) -> float:
        return 0.0  # heads run without graphs

    def _take_followed(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        sent, self._on_the_way = self._on_the_way, None
        if sent is None:
            return {}
        made = zip(sent.request_ids, sent.starts, sent.read(), strict=True)
        return {
            request_id: drafted
            for request_id, start, (num_accepted, *drafted) in made
            if request_id in wanted
            and request_id in self._rows
            and self._rows.num_tokens(request_id) == start + num_accepted + 2
        }
