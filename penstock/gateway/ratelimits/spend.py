"""This module works out what a request reserves and is charged for, and asks the ledger for what was spent and what a
request costs. Knows no buckets and no Redis.

The limiter adds what running requests are expected to cost, so that a budget is not overrun by requests that all
start before the first of them is in the ledger. Knows no prices and no database. Money is in micro-dollars; days and
months are UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from penstock.core.errors import DeadlineExceeded
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import CallerLimits, Figure, ResolvedLimits, Subject

MICRODOLLARS_PER_DOLLAR = 1_000_000


class Spend(msgspec.Struct, frozen=True):
    today_microdollars: float = 0.0
    month_microdollars: float = 0.0


NOTHING_SPENT = Spend()


class SpendTracker:
    """Knows what was spent. The one of a gateway without a ledger, this one, knows of nothing: budgets never bind."""

    async def spent(self, subject: Subject) -> Spend:
        """Return the cost of a subject's settled requests today and this month. Usually answers from memory, without
        suspending; the ledger settles a request in the same turn of the event loop in which the limiter does."""
        return NOTHING_SPENT

    def cost_microdollars(self, claim: Claim, usage: Usage) -> float:
        """Return the cost of `usage` of the claim's model and tier."""
        return 0.0


class Budget(NamedTuple):
    """One budget of a subject, with what was spent of it."""

    figure: Figure
    limit_dollars: float
    spent_microdollars: float
    reset_s: float  # until its day or month is over

    @property
    def limit_microdollars(self) -> float:
        return self.limit_dollars * MICRODOLLARS_PER_DOLLAR


def budgets_of(limits: ResolvedLimits, spend: Spend, wall_s: float) -> list[Budget]:
    budgets = []
    if limits.dollars_per_day is not None:
        reset_s = seconds_until_tomorrow(wall_s)
        budgets.append(Budget(Figure.DAY_BUDGET, limits.dollars_per_day, spend.today_microdollars, reset_s))
    if limits.dollars_per_month is not None:
        reset_s = seconds_until_next_month(wall_s)
        budgets.append(
            Budget(Figure.MONTH_BUDGET, limits.dollars_per_month, spend.month_microdollars, reset_s)
        )
    return budgets


def day_of(wall_s: float) -> int:
    """Return the UTC day as an increasing integer, such as 20260131."""
    moment = datetime.fromtimestamp(wall_s, UTC)
    return moment.year * 10_000 + moment.month * 100 + moment.day


def seconds_until_tomorrow(wall_s: float) -> float:
    return 86_400.0 - wall_s % 86_400.0


def seconds_until_next_month(wall_s: float) -> float:
    moment = datetime.fromtimestamp(wall_s, UTC)
    year, month = divmod(moment.year * 12 + moment.month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp() - wall_s


class Demand(NamedTuple):
    """Amounts to reserve, or amounts used. Every request also counts as one request, however it ends."""

    input_tokens: int
    output_tokens: int
    microdollars: float

    def without_input(self, num_tokens: int) -> tuple[int, Demand]:
        """Return how many of `num_tokens` are reserved here, and the remaining amount without them."""
        taken = min(num_tokens, self.input_tokens)
        return taken, self._replace(input_tokens=self.input_tokens - taken)


NOTHING = Demand(0, 0, 0.0)


def demand_of(claim: Claim, limits: CallerLimits, spending: SpendTracker) -> Demand:
    output_tokens = min(claim.max_output_tokens, limits.max_reserved_output_tokens)
    cost = 0.0
    if limits.has_budget:
        cost = spending.cost_microdollars(claim, Usage(claim.input_tokens, output_tokens, cached_tokens=0))
    return Demand(claim.input_tokens, output_tokens, cost)


def used_by(claim: Claim, outcome: Outcome, limits: CallerLimits, spending: SpendTracker) -> Demand:
    usage = outcome.usage
    output_tokens = 0 if outcome.is_cached else usage.completion_tokens
    cost = spending.cost_microdollars(claim, usage) if limits.has_budget and not outcome.is_cached else 0.0
    return Demand(_input_tokens_used(outcome), output_tokens, cost)


def _input_tokens_used(outcome: Outcome) -> int:
    """Return the input tokens that a request is charged for. A request that failed on our side before its first token
    is charged none. A request that its client cancelled or gave too little time is charged: its prompt may have been
    computed, and cancelling must not make prompts free."""
    ended_by_us = outcome.status == "failed" and outcome.error_code != DeadlineExceeded.code
    if outcome.is_cached or (ended_by_us and outcome.first_token_s is None):
        return 0
    return max(0, outcome.usage.prompt_tokens - outcome.usage.cached_tokens)
