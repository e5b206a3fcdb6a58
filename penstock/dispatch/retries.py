"""Whether a request that lost its replica is tried again. Pure: knows counts and times; sends nothing.

Retries are bounded by attempts per request, the request's own deadline, and a budget that all requests share. The
budget is a bucket: each first attempt puts in a fraction of a token, each retry takes one out. When everything fails,
retries add at most that fraction to the load, rather than multiply it.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec.structs import replace


class RetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_attempts: int = 3  # the first one included
    budget_ratio: float = 0.1  # retries per first attempt, in the long run
    budget_per_s: float = 0.5  # and so many more, so that a quiet service may retry too
    max_budget: float = 100.0
    first_pause_s: float = 0.0  # before the first retry: another replica is ready to take it
    next_pause_s: float = 0.1  # before the second, doubling from there
    max_pause_s: float = 2.0


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True):
    tokens: float
    updated_s: float


class Verdict(enum.StrEnum):
    RESTART = "restart"  # nothing reached the client: from the beginning
    CONTINUE = "continue"  # replay the prompt and what was emitted, and go on from there
    NO_ATTEMPTS_LEFT = "no_attempts_left"
    NO_TIME_LEFT = "no_time_left"
    NO_BUDGET_LEFT = "no_budget_left"
    NOT_RETRYABLE = "not_retryable"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one attempt."""

    attempts: int  # made so far
    num_emitted_tokens: int = 0
    is_retryable: bool = True  # False: another replica would answer just the same, as with an invalid request
    can_continue: bool = True  # False: what was emitted cannot be replayed elsewhere
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
        """A request was sent for the first time."""
        budget = self._refill(budget, now)
        return replace(budget, tokens=min(self.config.max_budget, budget.tokens + self.config.budget_ratio))

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

    def _refill(self, budget: RetryBudget, now: float) -> RetryBudget:
        elapsed_s = max(0.0, now - budget.updated_s)
        tokens = min(self.config.max_budget, budget.tokens + elapsed_s * self.config.budget_per_s)
        return RetryBudget(tokens=tokens, updated_s=max(now, budget.updated_s))
