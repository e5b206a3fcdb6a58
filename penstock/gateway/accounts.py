"""The reserved and the actual usage of a request: taken from its limits in two halves, settled exactly once at its
end.

`Accounts.admit` takes one request and one place among the running ones, before anything costly happens;
`Admission.open` reserves tokens and money once the prompts are tokenized. The limiter and the ledger here
allow everything and write nothing, so that a gateway on a laptop needs no others. Settling is synchronous
and happens before the reader sees the end of an answer, so that every answer given is in the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.identity import Principal
from penstock.core.identity import RateLimits as RateLimits
from penstock.core.plan import Prefill
from penstock.core.request import FinishReason, Tier
from penstock.gateway.prompts import Usage


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a request, its model, and the most tokens that the request can use. The number of tokens is known
    once the prompts are tokenized."""

    request_id: str
    principal: Principal
    model: str
    endpoint: str
    tier: Tier
    input_tokens: int = 0  # of all prompts, each counted once
    max_output_tokens: int = 0  # of all answers
    user: str | None = None


NOTHING_USED = Usage(0, 0, 0)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request and its usage."""

    usage: Usage
    status: Literal["completed", "cancelled", "failed"]
    error_code: str | None = None
    duration_s: float = 0.0
    first_token_s: float | None = None  # None when no token came
    queue_s: float | None = None  # of the first answer, as the engine measured it
    prefill: Prefill | None = None  # of the first answer, as the engine reports
    finish_reasons: tuple[FinishReason, ...] = ()  # of the answers that ended normally
    draft_tokens: int = 0  # that engines verified
    accepted_draft_tokens: int = 0
    is_cached: bool = False  # a recorded answer was replayed: no engine worked for it


def failed_by(error: BaseException) -> Outcome:
    """Return the outcome of a request that failed before anything was done for it."""
    code = error.code if isinstance(error, PenstockError) else None
    return Outcome(usage=NOTHING_USED, status="failed", error_code=code)


class Lease:
    """One request's share of all the limits that apply to the request, taken in two halves. This one allows
    everything, and there is nothing to remember."""

    __slots__ = ()

    rate_limits = RateLimits()

    async def reserve(self, claim: Claim) -> Lease:
        """Take the second half: tokens and money. The returned lease replaces this one. Raises
        RateLimited or QuotaExceeded; then this lease still holds the first half, and the caller settles it."""
        return self

    def give_back_cached(self, num_tokens: int) -> None:
        """Give back the input tokens of a running request that came from the cache. `settle` counts them again. Must
        not block or raise."""

    def settle(self, outcome: Outcome) -> None:
        """Give back what was not used. Called once; must not block or raise."""

    def undo(self) -> None:
        """Settle a lease that has only its first half, and do not count its request: another lease takes over."""


UNLIMITED = Lease()


class Limiter:
    """Decides which requests may run. This one admits all."""

    async def admit(self, claim: Claim) -> Lease:
        """Take the first half of a request's limits: one request and one place among the running ones. The tokens of
        the claim do not count yet. Raises RateLimited, with the seconds to wait, or QuotaExceeded; then nothing is
        taken."""
        return UNLIMITED

    def open_now(self, claim: Claim) -> Lease | None:
        """Take both halves at once, for a request that nothing has to be waited for. None, with nothing taken, where
        only `open` can tell."""
        return None

    async def open(self, claim: Claim) -> Lease:
        """Take both halves at once, for a request whose tokens are known from the start. A request that fails at the
        second half counts as one that began. Raises as `admit` and `reserve`."""
        lease = await self.admit(claim)
        try:
            return await lease.reserve(claim)
        except BaseException as error:
            lease.settle(failed_by(error))
            raise

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        """Return the remaining limits, and take nothing. Without a model, only the limits that apply to all
        models count."""
        return UNLIMITED.rate_limits


class Ledger:
    """The record of every request's usage. This one keeps none."""

    def begin(self, claim: Claim) -> None:
        """Note that a request runs, so that a crash leaves a trace of it. Must not block. Raises PenstockError if the
        record fails and the operator forbids unrecorded requests."""

    def settle(self, claim: Claim, outcome: Outcome) -> None:
        """Write a request's row, once, so that it survives a crash of this process from now on. Must not block."""


class Observer(Protocol):
    """Watches accounts for logs and traces."""

    def begin(self, claim: Claim) -> Callable[[Outcome], None]:
        """Note that an account was opened. The returned function is called once, when the account is settled.
        Neither may block or raise."""
        ...


class Account:
    """One request's reservation and its row in the ledger."""

    __slots__ = ("_is_settled", "_lease", "_ledger", "_on_settled", "claim", "on_end")

    def __init__(
        self, claim: Claim, lease: Lease, ledger: Ledger, on_settled: Sequence[Callable[[Outcome], None]] = ()
    ) -> None:
        self.claim = claim
        self._lease = lease
        self._ledger = ledger
        self._on_settled = on_settled
        self._is_settled = False
        self.on_end: Sequence[Callable[[], None]] = ()

    @property
    def rate_limits(self) -> RateLimits:
        return self._lease.rate_limits

    def note_cached(self, num_tokens: int) -> None:
        """Note that a part of the prompt came from the cache. The input tokens of that part are free for others at
        once."""
        if num_tokens and not self._is_settled:
            self._lease.give_back_cached(num_tokens)

    def settle(self, outcome: Outcome) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        self._lease.settle(outcome)
        self._ledger.settle(self.claim, outcome)
        for on_settled in self._on_settled:
            on_settled(outcome)
        for on_end in self.on_end:
            on_end()


class Admission:
    """A request that its request-rate and concurrency limits let in. `open` or `release` ends the admission."""

    __slots__ = ("_accounts", "_lease", "claim", "on_end")

    def __init__(self, accounts: Accounts, claim: Claim, lease: Lease) -> None:
        # Called at the end of the request, with an account or without.
        self.on_end: list[Callable[[], None]] = []
        self._accounts = accounts
        self.claim = claim
        self._lease: Lease | None = lease

    async def open(self, claim: Claim) -> Account:
        """Reserve the tokens of `claim`, and begin the request's row in the ledger. A refusal leaves the admission
        to be released."""
        lease = self._lease
        assert lease is not None, "an admission is opened once"
        lease = self._lease = await lease.reserve(claim)
        account = self._accounts.begin(claim, lease)
        account.on_end = self.on_end
        self._lease = None  # the account settles the lease from now on
        return account

    async def move_to(self, claim: Claim) -> None:
        """Move the request to another model, whose limits count instead of the first model's."""
        lease, self._lease = self._lease, None
        assert lease is not None
        lease.undo()
        self._lease = await self._accounts.admit_lease(claim)
        self.claim = claim

    def release(self, error_code: str | None = None) -> None:
        """End a request that has no account. Does nothing once an account was opened."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.settle(Outcome(usage=NOTHING_USED, status="failed", error_code=error_code))
            for on_end in self.on_end:
                on_end()


class Accounts:
    """Admits requests to their limits, and opens an account for each one that is to run."""

    def __init__(
        self,
        limiter: Limiter | None = None,
        ledger: Ledger | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._limiter = limiter or Limiter()
        self._ledger = ledger or Ledger()
        self._observers = observers

    async def admit(self, claim: Claim, *, is_limited: bool = True) -> Admission:
        """Admit a request to its limits. Work for an admitted request, such as a judge's, is recorded but not limited
        again."""
        lease = await self._limiter.admit(claim) if is_limited else UNLIMITED
        return Admission(self, claim, lease)

    async def admit_lease(self, claim: Claim) -> Lease:
        return await self._limiter.admit(claim)

    async def open(self, claim: Claim) -> Account:
        """Take both halves at once, for a request whose tokens are known from the start."""
        lease = self._limiter.open_now(claim) or await self._limiter.open(claim)
        try:
            return self.begin(claim, lease)
        except BaseException as error:
            lease.settle(failed_by(error))
            raise

    def begin(self, claim: Claim, lease: Lease) -> Account:
        """Make the account of a request whose reservations are complete. Raises the errors of the ledger."""
        self._ledger.begin(claim)
        on_settled = [observer.begin(claim) for observer in self._observers]
        return Account(claim, lease, self._ledger, on_settled)

    @asynccontextmanager
    async def errand(
        self, principal: Principal, model: str, endpoint: str, *, is_counted: bool = True
    ) -> AsyncIterator[None]:
        """Open an account for work without an engine, such as counting tokens. The limits count the work as a
        request, unless it belongs to a request that is admitted later; the ledger does not record it."""
        claim = Claim(
            request_id="", principal=principal, model=model, endpoint=endpoint, tier=principal.best_tier
        )
        lease = await self._limiter.admit(claim)
        try:
            yield
        finally:
            if is_counted:
                lease.settle(Outcome(usage=NOTHING_USED, status="completed"))
            else:
                lease.undo()

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        """Return a caller's current limits, for answers that opened no account."""
        return await self._limiter.peek(principal, model)
