"""The protocol of drafters. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.core.plan import Draft
from penstock.core.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time and never changes an answer."""

    def add(self, request: Request) -> None:
        """Follow a request, which the scheduler has accepted."""
        ...

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        """Take committed tokens of a request. The step that brought them verified the first `num_verified` tokens of
        the draft that was proposed last."""
        ...

    def remove(self, request_id: str) -> None:
        """Forget a request, which has ended. Unknown ids are ignored."""
        ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        """Return a draft for each request with a good guess. `wanted` has the most tokens for each request. All
        tokens of these requests are committed: none is in flight."""
        ...
