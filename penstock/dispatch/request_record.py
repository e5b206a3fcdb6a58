"""The record of one request: where it is, what its client got so far, and which replicas failed it. Data only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.request import FinishReason, Request
from penstock.dispatch.actions import Attempt


class RequestPhase(enum.Enum):
    SENT = enum.auto()  # a replica has the request
    PAUSED = enum.auto()  # before the next attempt
    WAITING = enum.auto()  # in the waiting room


@dataclass(slots=True, eq=False)
class RequestRecord:
    request: Request
    deadline_s: float | None
    block_hashes: Sequence[bytes] | None  # of the prompt, where the driver has computed them already
    phase: RequestPhase = RequestPhase.WAITING
    wake_s: float | None = None  # when a pause or a wait is over
    emitted: list[int] = field(default_factory=list)  # tokens that the client got, from all attempts
    attempts: int = 0  # that were sent
    failed_on: frozenset[str] = frozenset()  # ids of replicas
    last_error: PenstockError | None = None
    revision: str | None = None  # of the replica that began the answer, if one has
    waiting_since_s: float | None = None  # when the request first found no replica
    # Of the attempt that is under way:
    replica_id: str | None = None
    sent_s: float = 0.0
    first_token_s: float | None = None
    num_emitted_before: int = 0  # tokens that earlier attempts emitted
    is_streaming: bool = False  # the first token has come, and no earlier attempt emitted any

    def remaining(self) -> Request:
        """The request as the next replica gets it: with all tokens that the client already has."""
        if not self.emitted:
            return self.request
        output = self.request.output_token_ids + tuple(self.emitted)
        return msgspec.structs.replace(self.request, output_token_ids=output)

    def time_left_s(self, now: float) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - now

    def begin_attempt(self, replica_id: str, now: float) -> None:
        self.phase = RequestPhase.SENT
        self.wake_s = None
        self.replica_id = replica_id
        self.attempts += 1
        self.sent_s = now
        self.first_token_s = None
        self.is_streaming = False
        self.num_emitted_before = len(self.emitted)

    def attempt(
        self, revision: str, now: float, finish_reason: FinishReason | None, error: PenstockError | None
    ) -> Attempt:
        """The attempt that ended now."""
        assert self.replica_id is not None
        num_tokens = len(self.emitted) - self.num_emitted_before
        first_s = self.first_token_s
        return Attempt(
            request=self.request,
            replica_id=self.replica_id,
            revision=revision,
            ttft_s=None if first_s is None else first_s - self.sent_s,
            itl_s=(now - first_s) / (num_tokens - 1) if first_s is not None and num_tokens > 1 else None,
            output_token_ids=tuple(self.emitted[self.num_emitted_before :]),
            finish_reason=finish_reason,
            error=error,
        )
