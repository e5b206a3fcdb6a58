"""Limits kept in this process, or in a table that all processes of a server share. A decision is made without
awaiting anything, so within one process it needs no lock.

Each half of a reservation (first the request and its place, later its tokens and money) is granted by every limit
that applies, or by none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import RateLimited
from penstock.core.identity import Principal, RateLimits
from penstock.gateway.accounts import Claim, Lease, NoLimits, Outcome, open_by_halves
from penstock.gateway.ratelimits.meters import CallerMeters, Meters
from penstock.gateway.ratelimits.refusals import Figure, LimiterMetrics, Refusal, SlotTimes, error_for
from penstock.gateway.ratelimits.settings import CallerLimits, LimitSettings, Subject
from penstock.gateway.ratelimits.spend import (
    NOTHING,
    Demand,
    FreeOfCharge,
    Spend,
    SpendTracker,
    budgets_of,
    demand_of,
    used_by,
)
from penstock.gateway.ratelimits.table import MeterTable, SharedCallerMeters

_NO_LIMITS = NoLimits()


class LocalLease:
    __slots__ = ("_claim", "_limiter", "_meters", "_rate_limits", "_reserved")

    def __init__(self, limiter: LocalLimiter, claim: Claim, meters: CallerMeters) -> None:
        self._limiter = limiter
        self._claim = claim
        self._meters = meters
        self._reserved = NOTHING
        self._rate_limits: RateLimits | None = None

    @property
    def rate_limits(self) -> RateLimits:
        """As of the reservation; before it, as of now."""
        return self._rate_limits or self._meters.rate_limits()

    async def reserve(self, claim: Claim) -> Lease:
        self._claim = claim
        self.hold(await self._limiter.reserve(claim, self._meters))
        return self

    def hold(self, reserved: Demand) -> None:
        """Note what was reserved just now."""
        self._reserved = reserved
        self._rate_limits = self._meters.rate_limits()

    def give_back_cached(self, num_tokens: int) -> None:
        given, self._reserved = self._reserved.without_input(num_tokens)
        with self._meters:
            self._meters.give_back_input(given, self._limiter.now())

    def settle(self, outcome: Outcome) -> None:
        limiter = self._limiter
        used = used_by(self._claim, outcome, self._meters.limits, limiter.spending)
        with self._meters:
            self._meters.settle(self._reserved, used, limiter.now())
        limiter.slot_times.observe(outcome.duration_s)

    def undo(self) -> None:
        with self._meters:
            self._meters.settle(NOTHING, NOTHING, self._limiter.now())
            self._meters.give_back_request(self._limiter.now())


class LocalLimiter:
    """A limiter of one process, or of one of several that share a `table`. The spend tracker knows what all processes
    spent."""

    def __init__(
        self,
        settings: LimitSettings,
        clock: Clock | None = None,
        *,
        spending: SpendTracker | None = None,
        table: MeterTable | None = None,
        wall_clock: Callable[[], float] = time.time,
        metrics: LimiterMetrics | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.now = clock.now
        self.spending: SpendTracker = spending or FreeOfCharge()
        self.metrics = metrics or LimiterMetrics()
        self.slot_times = SlotTimes()
        self._wall_clock = wall_clock
        self._meters = (
            Meters(settings)
            if table is None
            else Meters(settings, partial(SharedCallerMeters, table=table, clock=clock))
        )
        self.metrics.subjects = self._meters

    async def start(self) -> None:
        """Does nothing. It exists, like `close`, so that both limiters have the same methods."""

    async def close(self) -> None:
        pass

    def apply(self, settings: LimitSettings) -> None:
        """Take over new limits. What callers have used, run and owe stays."""
        self._meters.apply(settings, self.now())

    async def admit(self, claim: Claim) -> Lease:
        now = self.now()
        meters = self._meters.of_caller(claim.principal, claim.model, now)
        if not meters.meters:
            self.metrics.admitted += 1
            return _NO_LIMITS
        over_budget: list[Refusal] = []
        spends: dict[Subject, Spend] = {}
        if meters.limits.has_budget:
            spends = await self._spends(meters.limits)
            # Time has passed: the meters may have been swept, and the limits changed.
            now = self.now()
            meters = self._meters.of_caller(claim.principal, claim.model, now)
        with meters:
            if spends:
                over_budget = self._over_budget(meters, spends, NOTHING)
            if over_budget or not meters.admits(now):
                raise self._refuse(
                    over_budget + meters.refusals(1, NOTHING, now) + self._full(meters), meters
                )
            meters.admit()
        self.metrics.admitted += 1
        return LocalLease(self, claim, meters)

    async def open(self, claim: Claim) -> Lease:
        now = self.now()
        meters = self._meters.of_caller(claim.principal, claim.model, now)
        if not meters.meters:
            self.metrics.admitted += 1
            return _NO_LIMITS
        if not meters.limits.has_budget:
            demand = demand_of(claim, meters.limits, self.spending)
            with meters:
                has_room = meters.admits(now, demand)
                if has_room:
                    meters.admit()
                    meters.take(demand)
            if has_room:
                self.metrics.admitted += 1
                lease = LocalLease(self, claim, meters)
                lease.hold(demand)
                return lease
        return await open_by_halves(self, claim)

    async def reserve(self, claim: Claim, meters: CallerMeters) -> Demand:
        """Take the second half of a lease. `meters` hold the first half, so that they are not swept meanwhile."""
        demand = demand_of(claim, meters.limits, self.spending)
        over_budget: list[Refusal] = []
        spends = await self._spends(meters.limits) if meters.limits.has_budget else {}
        now = self.now()
        with meters:
            if spends:
                over_budget = self._over_budget(meters, spends, demand)
            if over_budget or not meters.fits(demand, now):
                raise self._refuse(over_budget + meters.refusals(0, demand, now), meters)
            meters.take(demand)
        return demand

    async def peek(self, principal: Principal, model: str | None) -> RateLimits:
        now = self.now()
        meters = self._meters.of_caller(principal, model, now)
        with meters:
            meters.refill(now)
            return meters.rate_limits()

    async def _spends(self, limits: CallerLimits) -> dict[Subject, Spend]:
        budgeted = [subject for subject, resolved in limits.applying if resolved.has_budget]
        return {subject: await self.spending.spent(subject) for subject in budgeted}

    def _over_budget(
        self, meters: CallerMeters, spends: dict[Subject, Spend], demand: Demand
    ) -> list[Refusal]:
        wall_s = self._wall_clock()
        found = []
        for meter in meters.meters:
            spend = spends.get(meter.subject)
            if spend is None:
                continue
            running = meter.reserved_microdollars + meter.reserved_elsewhere + demand.microdollars
            for budget in budgets_of(meter.limits, spend, wall_s):
                if budget.spent_microdollars + running > budget.limit_microdollars:
                    found.append(
                        Refusal(budget.reset_s, budget.figure, meter.subject, budget.limit_dollars, 0.0)
                    )
        return found

    def _full(self, meters: CallerMeters) -> list[Refusal]:
        return [
            Refusal(
                self.slot_times.wait_s(meter.num_running + meter.running_elsewhere),
                Figure.CONCURRENCY,
                meter.subject,
                meter.max_running,
                1,
            )
            for meter in meters.meters
            if meter.is_full and meter.max_running is not None
        ]

    def _refuse(self, found: list[Refusal], meters: CallerMeters) -> RateLimited:
        refusal = max(found)
        self.metrics.count_refusal(refusal)
        return error_for(refusal, meters.rate_limits())
