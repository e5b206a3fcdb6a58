"""One request on its way through a fleet: where it is, what it was answered so far, where it failed. Data only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.cluster.link import Link
from penstock.cluster.observation import Attempt
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request


@dataclass(slots=True, eq=False)
class Journey:
    request: Request
    on_event: Callable[[TokenEvent], None]
    on_error: Callable[[PenstockError], None]
    deadline_s: float | None
    arrived_s: float
    emitted: list[int] = field(default_factory=list)  # tokens that the client got, from all attempts
    attempts: int = 0  # that were sent
    failed_on: frozenset[str] = frozenset()  # ids of replicas
    last_error: PenstockError | None = None
    revision: str | None = None  # of the replica that has begun the answer, if one has
    pause: asyncio.TimerHandle | None = None  # before the next attempt
    held_since_s: float | None = None  # when it first found nobody to serve it
    # Of the attempt that is under way:
    link: Link | None = None
    sent_s: float = 0.0
    first_token_s: float | None = None
    num_emitted_before: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether this attempt continues what another one began."""
        return bool(self.num_emitted_before)

    def remaining(self) -> Request:
        """What is to be sent: the request, and all that was answered already."""
        if not self.emitted:
            return self.request
        output = self.request.output_token_ids + tuple(self.emitted)
        return msgspec.structs.replace(self.request, output_token_ids=output)

    def time_left_s(self, now: float) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - now

    def begin_attempt(self, link: Link, now: float) -> None:
        self.link = link
        self.attempts += 1
        self.sent_s = now
        self.first_token_s = None
        self.num_emitted_before = len(self.emitted)

    def attempt(
        self, link: Link, now: float, finish_reason: FinishReason | None, error: PenstockError | None
    ) -> Attempt:
        """What is to be told about the attempt that ended now."""
        num_tokens = len(self.emitted) - self.num_emitted_before
        first_s = self.first_token_s
        return Attempt(
            request=self.request,
            replica_id=link.id,
            revision=link.member.replica.revision,
            ttft_s=None if first_s is None else first_s - self.sent_s,
            itl_s=(now - first_s) / (num_tokens - 1) if first_s is not None and num_tokens > 1 else None,
            output_token_ids=tuple(self.emitted[self.num_emitted_before :]),
            finish_reason=finish_reason,
            error=error,
        )
