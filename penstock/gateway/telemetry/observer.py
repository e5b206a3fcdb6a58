"""Follows every account from its opening to its settlement: into the request's record, and into a trace."""

from __future__ import annotations

from collections.abc import Callable
from time import time_ns
from typing import Protocol

from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.telemetry.record import RequestRecord, current_record


class Tracing(Protocol):
    """Where spans go. Nothing here may block: exporting is another thread's business."""

    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        """Open the span of a whole request, below the caller's own where it sent one."""
        ...

    def end(self, record: RequestRecord, status: int | None) -> None: ...

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        """Write the span of one generation, which has just ended."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class NoTracing:
    def begin(self, record: RequestRecord, name: str, attributes: dict[str, str]) -> None:
        pass

    def end(self, record: RequestRecord, status: int | None) -> None:
        pass

    def generated(
        self, record: RequestRecord | None, claim: Claim, outcome: Outcome, started_ns: int
    ) -> None:
        pass

    def close(self) -> None:
        pass


class RequestObserver:
    """An `accounts.Observer`."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing: Tracing = tracing or NoTracing()

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        record = current_record.get()
        started_ns = time_ns()

        def settled(outcome: Outcome) -> None:
            if record is not None:
                record.accounts.append((claim, outcome))
            self.tracing.generated(record, claim, outcome, started_ns)

        return settled
