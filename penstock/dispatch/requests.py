"""The requests that a dispatcher holds: the record of each one, and the waiting room for requests whose replica is
still starting. Sends nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
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


class WaitingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_requests: int = 256
    max_tokens: int = 500_000  # of prompts
    max_wait_s: float = 120.0  # longer than starting a replica takes


class WaitingRoom:
    """Waiting requests in the order in which they came."""

    def __init__(self, config: WaitingConfig) -> None:
        self.config = config
        self._requests: dict[str, Request] = {}

    def enter(self, request: Request) -> None:
        """Raises Overloaded when there is no room for one more request of this size."""
        config = self.config
        num_tokens = self.num_tokens() + len(request.prompt_token_ids)
        if len(self._requests) >= config.max_requests or num_tokens > config.max_tokens:
            raise Overloaded(
                "No replica is running yet, and too many requests already wait for one.",
                retry_after_s=min(10.0, config.max_wait_s),
            )
        self._requests[request.id] = request

    def leave(self, request_id: str) -> bool:
        """Returns whether the request was waiting."""
        return self._requests.pop(request_id, None) is not None

    def leave_all(self) -> list[str]:
        """Empty the room. Returns the ids of the requests, in the order in which they came."""
        requests, self._requests = self._requests, {}
        return list(requests)

    def num_requests(self, model: str | None = None) -> int:
        return sum(_is_for(request, model) for request in self._requests.values())

    def num_tokens(self, model: str | None = None) -> int:
        """Tokens of the prompts that wait."""
        return sum(
            len(request.prompt_token_ids) for request in self._requests.values() if _is_for(request, model)
        )

    def give_up_s(self, since_s: float, deadline_s: float | None) -> float:
        """How long a request may wait that has waited since `since_s`."""
        latest_s = since_s + self.config.max_wait_s
        return latest_s if deadline_s is None else min(latest_s, deadline_s)

    def too_late(self) -> EngineUnavailable:
        """The error of a request that waited too long."""
        max_wait_s = self.config.max_wait_s
        return EngineUnavailable(
            f"No replica became ready within {max_wait_s:.0f} s.", retry_after_s=max_wait_s / 4.0
        )


def _is_for(request: Request, model: str | None) -> bool:
    """A request that names no model waits for any model."""
    return model is None or request.model in (model, "")
