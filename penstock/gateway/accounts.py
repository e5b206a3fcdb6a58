"""What a request may use and what it did use: reserved before it runs, settled exactly once when it ends.

Limits and the ledger are protocols with defaults that allow everything and write nothing, so that a gateway on a
laptop needs neither. Settling is synchronous and happens before the reader sees the end of an answer: whoever got an
answer is in the books.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.prompts import Usage


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a request can use, known once its prompts are tokenized."""

    request_id: str
    principal: Principal
    model: str
    endpoint: str
    tier: Tier
    input_tokens: int  # of all prompts, each counted once
    max_output_tokens: int  # of all answers
    user: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended and what it used."""

    usage: Usage
    status: Literal["completed", "cancelled", "failed"]
    error_code: str | None = None
    duration_s: float = 0.0
    first_token_s: float | None = None  # None when no token came


class LimitState(msgspec.Struct, frozen=True):
    """One limit as rate-limit headers show it, after this request's reservation."""

    limit: int
    remaining: int
    reset_s: float  # until it is whole again


class RateLimits(msgspec.Struct, frozen=True):
    """The tightest limits that apply to a caller; None where there is none."""

    requests: LimitState | None = None
    input_tokens: LimitState | None = None
    output_tokens: LimitState | None = None


class Lease(Protocol):
    """A reservation in all the limits that apply to a request."""

    @property
    def rate_limits(self) -> RateLimits: ...

    def settle(self, outcome: Outcome) -> None:
        """Give back what was not used. Called once; must not block or raise."""
        ...


class Limiter(Protocol):
    async def reserve(self, claim: Claim) -> Lease:
        """Raises RateLimited, with the seconds to wait, or QuotaExceeded; then nothing is reserved."""
        ...


class Ledger(Protocol):
    """The book of what everyone used."""

    def begin(self, claim: Claim) -> None:
        """Note that a request runs, so that a crash leaves a trace of it. Must not block."""
        ...

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        """Write a request's row, once, so that it survives a crash of this process from now on. Must not block."""
        ...


class Account:
    """One request's reservation and its page in the ledger."""

    __slots__ = ("_is_settled", "_lease", "_ledger", "claim")

    def __init__(self, claim: Claim, lease: Lease, ledger: Ledger) -> None:
        self.claim = claim
        self._lease = lease
        self._ledger = ledger
        self._is_settled = False

    @property
    def rate_limits(self) -> RateLimits:
        return self._lease.rate_limits

    def settle(self, outcome: Outcome) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._lease.settle(outcome)
        self._ledger.settle(self.claim, outcome)


class NoLimits:
    """Allows everything. Its own lease, because there is nothing to remember."""

    rate_limits = RateLimits()

    async def reserve(self, claim: Claim) -> Lease:
        return self

    def settle(self, outcome: Outcome) -> None:
        pass


class NoLedger:
    def begin(self, claim: Claim) -> None:
        pass

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        pass


class Accounts:
    """Opens an account for each request: its limits are reserved, then its page in the ledger is begun."""

    def __init__(self, limiter: Limiter | None = None, ledger: Ledger | None = None) -> None:
        self._limiter = limiter or NoLimits()
        self._ledger = ledger or NoLedger()

    async def open(self, claim: Claim) -> Account:
        lease = await self._limiter.reserve(claim)
        self._ledger.begin(claim)
        return Account(claim, lease, self._ledger)
