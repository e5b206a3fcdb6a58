"""What a request reserves before it runs, and what it is charged for in the end. Knows no buckets and no Redis."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.errors import DeadlineExceeded
from penstock.gateway.accounts import Claim, Outcome
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import CallerLimits
from penstock.gateway.ratelimits.spend import SpendTracker


class Demand(NamedTuple):
    """Amounts to reserve, or amounts used. Every request also counts as one request, however it ends."""

    input_tokens: int
    output_tokens: int
    microdollars: float

    def without_input(self, num_tokens: int) -> tuple[int, Demand]:
        """How many of `num_tokens` are reserved here, and what is left without them."""
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
    """A request that we failed to serve before its first token used none. A request that its client cancelled or
    gave too little time is charged: its prompt may have been computed, and cancelling must not make prompts free."""
    ended_by_us = outcome.status == "failed" and outcome.error_code != DeadlineExceeded.code
    if outcome.is_cached or (ended_by_us and outcome.first_token_s is None):
        return 0
    return max(0, outcome.usage.prompt_tokens - outcome.usage.cached_tokens)
