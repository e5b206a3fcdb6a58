"""The requests that a dispatcher holds: their records, the waiting room for requests whose replica is still starting,
and the decision whether a request that lost its replica is retried. Sends nothing.

Retries are bounded by attempts per request, the request's own deadline, and a budget that all requests share. The
budget is a bucket: each first attempt puts in a fraction of a token, each retry takes one out. When everything fails,
retries add at most that fraction to the load, rather than multiply it.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.figures import Count, CountOrZero, NotNegative
from penstock.core.request import FinishReason, Request
from penstock.core.shares import Shares
from penstock.dispatch.actions import Attempt


class RequestPhase(enum.Enum):
    SENT = enum.auto()  # a replica has the request
    PAUSED = enum.auto()  # before the next attempt
    WAITING = enum.auto()  # in the waiting room


class RequestRecord(msgspec.Struct, eq=False):
    request: Request
    deadline_s: float | None
    block_hashes: Sequence[bytes] | None  # of the prompt, if the driver has computed them
    phase: RequestPhase = RequestPhase.WAITING
    arrived_s: float = 0.0
    wake_s: float | None = None  # when a pause or a wait is over
    emitted: list[int] = []  # tokens that the client got, from all attempts
    attempts: int = 0  # attempts that were sent
    failed_on: frozenset[str] = frozenset()  # ids of replicas
    last_error: PenstockError | None = None
    revision: str | None = None  # of the replica that began the answer
    waiting_since_s: float | None = None  # when the request first found no replica
    num_losses: int = 0  # replicas that were lost in succession while they had the request
    lost_s: float = 0.0  # the last of these losses
    # The replica that was lost last, and when the request was sent there.
    last_lost: tuple[str, float] | None = None
    held_since_s: float | None = None  # when the request first waited for the end of a test
    is_watched: bool = False  # the present attempt is a test; see `suspects`
    # The present attempt:
    replica_id: str | None = None
    sent_s: float = 0.0
    first_token_s: float | None = None
    num_emitted_before: int = 0  # tokens that earlier attempts emitted
    is_streaming: bool = False  # the first token has come, and no earlier attempt emitted any

    def remaining(self) -> Request:
        """Return the request for the next replica, with all tokens that the client already has."""
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
        self.held_since_s = None
        self.num_emitted_before = len(self.emitted)

    def attempt(
        self, revision: str, now: float, finish_reason: FinishReason | None, error: PenstockError | None
    ) -> Attempt:
        """Return the attempt that ended now."""
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


def tenants_at(replica_id: str, since_s: float, records: Iterable[RequestRecord]) -> set[str]:
    """Return the tenants whose requests were sent to a replica since then. The replica may be lost."""
    return {
        record.request.tenant
        for record in records
        if (record.replica_id == replica_id and record.sent_s >= since_s)
        or (
            record.last_lost is not None
            and record.last_lost[0] == replica_id
            and record.last_lost[1] >= since_s
        )
    }


def last_sent_by_others(tenant: str, records: Iterable[RequestRecord]) -> dict[str, float]:
    """Return when each replica got the latest of the requests that tenants other than `tenant` have there."""
    sent_s: dict[str, float] = {}
    for record in records:
        if record.replica_id is not None and record.request.tenant != tenant:
            sent_s[record.replica_id] = max(record.sent_s, sent_s.get(record.replica_id, record.sent_s))
    return sent_s


class WaitingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_requests: CountOrZero = 256
    max_tokens: CountOrZero = 500_000  # of prompts
    max_wait_s: NotNegative = 120.0  # longer than starting a replica takes


class WaitingRoom:
    """Holds waiting requests in the order of their arrival."""

    def __init__(self, config: WaitingConfig) -> None:
        self.config = config
        self._requests: dict[str, Request] = {}
        self._shares = Shares(config.max_requests)
        self._tokens = Shares(config.max_tokens)

    def enter(self, request: Request) -> None:
        """Add a request. Raises Overloaded when there is no room for one more request of this size, or when its
        tenant has its share of the room."""
        config, tenant = self.config, request.tenant
        num_tokens = len(request.prompt_token_ids)
        is_full = (
            self._shares.used >= config.max_requests or self._tokens.used + num_tokens > config.max_tokens
        )
        if is_full or self._shares.is_full_for(tenant) or self._tokens.is_full_for(tenant):
            raise Overloaded(
                "No replica is running yet, and too many requests"
                f"{'' if is_full else ' of this workspace'} already wait for one.",
                retry_after_s=min(10.0, config.max_wait_s),
            )
        self._requests[request.id] = request
        self._count(request, +1)

    def leave(self, request_id: str) -> bool:
        """Remove a request. Returns whether the request was waiting."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._count(request, -1)
        return request is not None

    def leave_all(self) -> list[str]:
        """Empty the room. Returns the ids of the requests, in the order of their arrival."""
        request_ids = list(self._requests)
        for request_id in request_ids:
            self.leave(request_id)
        return request_ids

    def _count(self, request: Request, sign: int) -> None:
        self._shares.add(request.tenant, sign)
        self._tokens.add(request.tenant, sign * len(request.prompt_token_ids))

    def num_requests(self, model: str | None = None) -> int:
        return sum(_is_for(request, model) for request in self._requests.values())

    def num_tokens(self, model: str | None = None) -> int:
        """Return the number of tokens in the waiting prompts."""
        return sum(
            len(request.prompt_token_ids) for request in self._requests.values() if _is_for(request, model)
        )

    def give_up_s(self, since_s: float, deadline_s: float | None) -> float:
        """Return the time until which a request that has waited since `since_s` may wait."""
        latest_s = since_s + self.config.max_wait_s
        return latest_s if deadline_s is None else min(latest_s, deadline_s)

    def too_late(self) -> EngineUnavailable:
        """Return the error of a request that waited too long."""
        max_wait_s = self.config.max_wait_s
        return EngineUnavailable(
            f"No replica became ready within {max_wait_s:.0f} s.", retry_after_s=max_wait_s / 4.0
        )


def _is_for(request: Request, model: str | None) -> bool:
    """Return whether a request waits for a model. A request that names no model waits for any model."""
    return model is None or request.model in (model, "")


class Timers:
    """Keeps the times at which requests must be looked at again. A request has at most one timer, at its `wake_s`."""

    def __init__(self, records: Mapping[str, RequestRecord]) -> None:
        """`records` are the requests that have not ended, by id."""
        self._records = records
        self._heap: list[tuple[float, int, str]] = []  # time, sequence number, request id
        self._num_set = 0

    def set(self, record: RequestRecord, wake_s: float) -> None:
        if record.wake_s == wake_s:
            return  # set before, when the request began to wait
        record.wake_s = wake_s
        self._num_set += 1
        heapq.heappush(self._heap, (wake_s, self._num_set, record.request.id))

    def next_s(self) -> float | None:
        """Return the time of the first timer, if there is one."""
        while self._heap:
            wake_s, _, request_id = self._heap[0]
            record = self._records.get(request_id)
            if record is not None and record.wake_s == wake_s:
                return wake_s
            heapq.heappop(self._heap)  # of a request that has ended or was sent
        return None

    def due(self, now: float) -> Iterator[RequestRecord]:
        """Take the timers that are due, one by one."""
        while (wake_s := self.next_s()) is not None and wake_s <= now:
            record = self._records[heapq.heappop(self._heap)[2]]
            record.wake_s = None
            yield record


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_attempts: Count = 3  # the first one included
    budget_ratio: NotNegative = 0.1  # retries per first attempt, in the long run
    budget_per_s: NotNegative = 0.5  # additional retries, so that a quiet service may retry too
    max_budget: NotNegative = 100.0
    first_pause_s: NotNegative = 0.0  # before the first retry: another replica is ready to take it
    next_pause_s: NotNegative = 0.1  # before the second, doubling from there
    max_pause_s: NotNegative = 2.0


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True):
    tokens: float
    updated_s: float


class Verdict(enum.StrEnum):
    RESTART = "restart"  # start again: nothing reached the client
    CONTINUE = "continue"  # replay the prompt and the emitted tokens, and continue from there
    NO_ATTEMPTS_LEFT = "no_attempts_left"
    NO_TIME_LEFT = "no_time_left"
    NO_BUDGET_LEFT = "no_budget_left"
    NOT_RETRYABLE = "not_retryable"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one failed attempt."""

    attempts: int  # made so far
    num_emitted_tokens: int = 0
    is_retryable: bool = True  # False: every replica would answer the same, as with an invalid request
    can_continue: bool = True  # False: the emitted tokens cannot be replayed elsewhere
    deadline_s: float | None = None
    predicted_ttft_s: float = 0.0  # of the next attempt


class RetryDecision(msgspec.Struct, frozen=True):
    verdict: Verdict
    pause_s: float = 0.0

    @property
    def is_retry(self) -> bool:
        return self.verdict in (Verdict.RESTART, Verdict.CONTINUE)


class RetryPolicy:
    def __init__(self, config: RetryConfig) -> None:
        self.config = config

    def first_budget(self, now: float) -> RetryBudget:
        return RetryBudget(tokens=self.config.max_budget, updated_s=now)

    def attempted(self, budget: RetryBudget, now: float) -> RetryBudget:
        """Count a request that is sent for the first time."""
        return self._refill(budget, now, self.config.budget_ratio)

    def decide(self, failure: Failure, budget: RetryBudget, now: float) -> tuple[RetryDecision, RetryBudget]:
        config = self.config
        budget = self._refill(budget, now)
        if not failure.is_retryable or (failure.num_emitted_tokens and not failure.can_continue):
            return RetryDecision(Verdict.NOT_RETRYABLE), budget
        if failure.attempts >= config.max_attempts:
            return RetryDecision(Verdict.NO_ATTEMPTS_LEFT), budget
        pause_s = self._pause_s(failure.attempts)
        if failure.deadline_s is not None and now + pause_s + failure.predicted_ttft_s >= failure.deadline_s:
            return RetryDecision(Verdict.NO_TIME_LEFT), budget
        if budget.tokens < 1.0:
            return RetryDecision(Verdict.NO_BUDGET_LEFT), budget
        verdict = Verdict.CONTINUE if failure.num_emitted_tokens else Verdict.RESTART
        return RetryDecision(verdict, pause_s), replace(budget, tokens=budget.tokens - 1.0)

    def _pause_s(self, attempts: int) -> float:
        if attempts <= 1:
            return self.config.first_pause_s
        return min(self.config.max_pause_s, self.config.next_pause_s * 2.0 ** min(attempts - 2, 32))

    def _refill(self, budget: RetryBudget, now: float, more: float = 0.0) -> RetryBudget:
        config = self.config
        elapsed_s = now - budget.updated_s
        if elapsed_s <= 0.0:
            elapsed_s, now = 0.0, budget.updated_s
        tokens = budget.tokens + elapsed_s * config.budget_per_s + more
        return RetryBudget(tokens=tokens if tokens < config.max_budget else config.max_budget, updated_s=now)
