"""What a request may use and what it did use: reserved before it runs, settled exactly once when it ends.

Limits and the ledger are protocols with defaults that allow everything and write nothing, so that a gateway on a
laptop needs neither. Settling is synchronous and happens before the reader sees the end of an answer: whoever got an
answer is in the books.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.identity import Principal
from penstock.core.limits import RateLimits as RateLimits
from penstock.core.request import FinishReason, Tier
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
    queue_s: float | None = None  # of the first answer, as the engine measured it
    finish_reasons: tuple[FinishReason, ...] = ()  # of the answers that came to their own end
    is_cached: bool = False  # a recorded answer was replayed: no engine worked for it


class Lease(Protocol):
    """A reservation in all the limits that apply to a request."""

    @property
    def rate_limits(self) -> RateLimits: ...

    def give_back_cached(self, num_tokens: int) -> None:
        """So many input tokens of a running request came from the cache. `settle` counts them again. Must not block
        or raise."""
        ...

    def settle(self, outcome: Outcome) -> None:
        """Give back what was not used. Called once; must not block or raise."""
        ...


class Limiter(Protocol):
    async def reserve(self, claim: Claim) -> Lease:
        """Raises RateLimited, with the seconds to wait, or QuotaExceeded; then nothing is reserved."""
        ...

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        """What is left now, of which nothing is used. Without a model, of the limits that hold for all models."""
        ...


class Ledger(Protocol):
    """The book of what everyone used."""

    def begin(self, claim: Claim) -> None:
        """Note that a request runs, so that a crash leaves a trace of it. Must not block. Raises PenstockError when
        it cannot, where the operator wants no request to run unrecorded."""
        ...

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        """Write a request's row, once, so that it survives a crash of this process from now on. Must not block."""
        ...


class Observer(Protocol):
    """Watches accounts for logs and traces."""

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        """An account was opened; what comes back is called once when it is settled. Neither may block or raise."""
        ...


class Account:
    """One request's reservation and its page in the ledger."""

    __slots__ = ("_is_settled", "_lease", "_ledger", "_on_settled", "claim")

    def __init__(
        self,
        claim: Claim,
        lease: Lease,
        ledger: Ledger,
        on_settled: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.claim = claim
        self._lease = lease
        self._ledger = ledger
        self._on_settled = on_settled
        self._is_settled = False

    @property
    def rate_limits(self) -> RateLimits:
        return self._lease.rate_limits

    def note_cached(self, num_tokens: int) -> None:
        """A prompt was found in the cache, so far. What it does not use of its limits is free for others at once."""
        if num_tokens and not self._is_settled:
            self._lease.give_back_cached(num_tokens)

    def settle(self, outcome: Outcome) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._lease.settle(outcome)
        self._ledger.settle(self.claim, outcome)
        if self._on_settled is not None:
            self._on_settled(outcome)


class NoLimits:
    """Allows everything. Its own lease, because there is nothing to remember."""

    rate_limits = RateLimits()

    async def reserve(self, claim: Claim) -> Lease:
        return self

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        return self.rate_limits

    def give_back_cached(self, num_tokens: int) -> None:
        pass

    def settle(self, outcome: Outcome) -> None:
        pass


class NoLedger:
    def begin(self, claim: Claim) -> None:
        pass

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        pass


class Accounts:
    """Opens an account for each request: its limits are reserved, then its page in the ledger is begun."""

    def __init__(
        self,
        limiter: Limiter | None = None,
        ledger: Ledger | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._limiter = limiter or NoLimits()
        self._ledger = ledger or NoLedger()
        self._observer = observer

    async def open(self, claim: Claim) -> Account:
        lease = await self._limiter.reserve(claim)
        try:
            self._ledger.begin(claim)
        except PenstockError as error:
            lease.settle(Outcome(usage=Usage(0, 0, 0), status="failed", error_code=error.code))
            raise
        on_settled = self._observer.begin(claim) if self._observer is not None else None
        return Account(claim, lease, self._ledger, on_settled)

    @asynccontextmanager
    async def errand(self, principal: Principal, model: str, endpoint: str) -> AsyncIterator[None]:
        """Work for which no engine is needed, such as counting tokens: a request like any other to the limits, but
        nothing that a ledger would have to know."""
        claim = Claim(
            request_id="",
            principal=principal,
            model=model,
            endpoint=endpoint,
            tier=principal.best_tier,
            input_tokens=0,
            max_output_tokens=0,
        )
        lease = await self._limiter.reserve(claim)
        try:
            yield
        finally:
            lease.settle(Outcome(usage=Usage(0, 0, 0), status="completed"))

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        """A caller's limits as they stand, for answers that opened no account."""
        return await self._limiter.peek(principal, model)
