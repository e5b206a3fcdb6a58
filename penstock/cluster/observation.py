"""What a fleet tells about the requests it relays, for releases and autoscaling. Knows no policy, keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.core.request import FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to have a request answered by one replica, after it ended. A request that was retried elsewhere has
    several."""

    request: Request
    replica_id: str
    revision: str
    ttft_s: float | None  # None: no token came
    itl_s: float | None  # mean time between tokens; None: there were fewer than two
    output_token_ids: tuple[int, ...]  # of this attempt
    finish_reason: FinishReason | None = None
    error: PenstockError | None = None


class FleetObserver(Protocol):
    """Called on the fleet's event loop; must not block or raise."""

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        """A request was routed for the first time, or is held until there is a replica."""
        ...

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None: ...

    def ended(self, attempt: Attempt) -> None:
        """Once for every attempt: also for one that failed and is made again elsewhere, and for one that the client
        called off (its finish_reason is then ABORT)."""
        ...
