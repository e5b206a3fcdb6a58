"""Drafts the tokens that a request's grammar forces: keys and punctuation of a JSON schema, say.

The mask threads find forced tokens. Nothing here waits for them for longer than half a millisecond: what they do not
know by then is drafted a step later, or not at all. The model still samples at every position, because most forced
text can be cut into tokens in several ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.core.plan import Draft
from penstock.core.request import Request

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import GrammarMasks

NAME = "grammar"


class GrammarDrafter:
    """`masks` follows the requests itself."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        masks.finds_forced = True

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        forced = self._masks.forced(wanted)
        return {
            request_id: Draft(token_ids[: wanted[request_id]], NAME)
            for request_id, token_ids in forced.items()
        }
