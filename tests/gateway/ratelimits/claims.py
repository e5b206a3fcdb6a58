"""Claims and outcomes in few words, and a spending whose figures a test sets."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from penstock.core.errors import RateLimited
from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.accounts import Claim, Lease, Limiter, Outcome
from penstock.gateway.prompts import Usage
from penstock.gateway.ratelimits.settings import Subject
from penstock.gateway.ratelimits.spend import Spend


def claim(
    key: str = "key-1",
    workspace: str = "ws-1",
    model: str = "llama",
    *,
    input_tokens: int = 10,
    max_output_tokens: int = 20,
) -> Claim:
    return Claim(
        request_id="request",
        principal=Principal(key_id=key, workspace_id=workspace),
        model=model,
        endpoint="chat",
        tier=Tier.DEFAULT,
        input_tokens=input_tokens,
        max_output_tokens=max_output_tokens,
    )


async def reserve(limiter: Limiter, claim: Claim) -> Lease:
    """Both halves of a reservation, as a request takes them one after the other."""
    admitted = await limiter.admit(claim)
    try:
        return await admitted.reserve(claim)
    except RateLimited:
        admitted.settle(outcome(0, 0, status="failed", has_begun=False, duration_s=0.0))
        raise


def outcome(
    input_tokens: int = 10,
    output_tokens: int = 5,
    *,
    cached_tokens: int = 0,
    status: Literal["completed", "cancelled", "failed"] = "completed",
    error_code: str | None = None,
    has_begun: bool = True,
    duration_s: float = 1.0,
) -> Outcome:
    return Outcome(
        usage=Usage(input_tokens, output_tokens, cached_tokens),
        status=status,
        error_code=error_code,
        duration_s=duration_s,
        first_token_s=0.1 if has_begun else None,
    )


class SettableSpend:
    """A micro-dollar per token. Settling in a ledger is the test's business: it calls `spend`."""

    __test__ = False

    def __init__(self) -> None:
        self._spent: defaultdict[Subject, float] = defaultdict(float)

    def spend(self, subject: Subject, microdollars: float) -> None:
        self._spent[subject] += microdollars

    async def spent(self, subject: Subject) -> Spend:
        return Spend(self._spent[subject], self._spent[subject])

    def cost_microdollars(self, claim: Claim, usage: Usage) -> float:
        return usage.prompt_tokens + usage.completion_tokens
