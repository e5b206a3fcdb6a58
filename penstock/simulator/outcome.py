"""What became of one request, gathered while the simulation runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.request import FinishReason
from penstock.simulator.workload import Arrival


@dataclass(slots=True)
class Outcome:
    """What became of one request. Exactly one of `finish_reason` and `rejection` is set in the end."""

    arrival: Arrival
    replica: int
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    finish_reason: FinishReason | None = None
    rejection: str | None = None  # the code of the error that the client got instead
    num_cached_tokens: int = 0
    queue_s: float | None = None  # from arrival to the first planned chunk; None if nothing was ever planned
