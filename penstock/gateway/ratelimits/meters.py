"""Token buckets and running requests of every subject, kept in this process. Knows no errors, settings files or
Redis.

A `TokenBucket` is a limit per minute as a level that refills steadily, and holds one minute's worth. Time is an
argument. A reservation takes from the bucket at once. Settlement gives back the unused part, or takes the use beyond
the reservation. The result may be a debt, which the refill pays off before another request is admitted. In any
period, the total use is therefore at most one full bucket, plus the refill of the period, plus the use of running
requests beyond their reservations.

Memory is bounded by the subjects that were active within the last minute or are in debt. A subject with full buckets
and no running request is forgotten, which changes no decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from penstock.core.identity import LimitState, Principal, RateLimits
from penstock.gateway.ratelimits.settings import (
    CallerLimits,
    Figure,
    LimitResolver,
    LimitSettings,
    Refusal,
    ResolvedLimits,
    Subject,
)
from penstock.gateway.ratelimits.spend import NOTHING, Demand

SECONDS_PER_LIMIT = 60.0
# Allows for rounding, so that a caller that waited exactly as long as told is admitted.
TOLERANCE = 1e-6


class TokenBucket:
    """One limit per minute."""

    __slots__ = ("_refill_per_s", "level", "limit", "updated_s")

    def __init__(self, limit: int, now: float) -> None:
        self.updated_s = now
        self._set_limit(limit)
        self.level = float(limit)  # as of the last `refill`; below zero it is owed

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self._refill_per_s = limit / SECONDS_PER_LIMIT

    def refill(self, now: float) -> float:
        """Bring the level up to date, and return it. A clock that steps back refills nothing."""
        elapsed_s = now - self.updated_s
        if elapsed_s > 0.0:
            self.updated_s = now
            level = self.level + elapsed_s * self._refill_per_s
            self.level = level if level < self.limit else self.limit
        return self.level

    def fits(self, amount: int, now: float) -> bool:
        return amount <= self.refill(now) + TOLERANCE

    def wait_s(self, amount: int, now: float) -> float:
        """Return the seconds until `amount` fits: 0 for now, infinity for never."""
        if self.fits(amount, now):
            return 0.0
        if amount > self.limit:
            return math.inf
        return (amount - self.level) / self._refill_per_s

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, even if the bucket holds less. A negative amount gives back, at most until the bucket is
        full."""
        # No refill is needed before amounts are given back: the next refill ends at the limit as well.
        level = (self.refill(now) if amount > 0 else self.level) - amount
        self.level = level if level < self.limit else self.limit

    @property
    def state(self) -> LimitState:
        """Return the limit, what was left of it at the last `refill`, and the seconds until it is full again."""
        limit, level = self.limit, self.level
        return LimitState(limit, max(0, int(level + TOLERANCE)), (limit - level) / self._refill_per_s)

    @property
    def is_full(self) -> bool:
        return self.level >= self.limit

    def resize(self, limit: int, now: float) -> None:
        """Use another limit from now on. A bucket that is half full stays half full."""
        self.refill(now)
        fullness = self.level / self.limit
        self._set_limit(limit)
        self.level = limit * fullness


_MIN_SWEEP_SIZE = 1024
_MAX_CACHED_CALLERS = 65_536


class Meter:
    """One subject: its buckets (None where it has no such limit) and what it runs."""

    # fmt: off
    __slots__ = (
        "input_tokens", "key", "limits", "max_running", "num_running", "output_tokens", "requests",
        "reserved_elsewhere", "reserved_microdollars", "running_elsewhere", "slot", "subject",
        "unlocked_stores",
    )
    # fmt: on

    def __init__(self, subject: Subject, limits: ResolvedLimits, now: float) -> None:
        self.subject = subject
        self.num_running = 0  # in this process
        self.reserved_microdollars = 0.0
        self.running_elsewhere = 0  # in other processes, as far as a table tells
        self.reserved_elsewhere = 0.0
        self.key = (0, 0)  # of the subject in the table
        self.slot: int | None = None
        self.unlocked_stores = 0.0  # in the table, as of the last look there
        self.requests: TokenBucket | None = None
        self.input_tokens: TokenBucket | None = None
        self.output_tokens: TokenBucket | None = None
        self.limit_to(limits, now)

    def limit_to(self, limits: ResolvedLimits, now: float) -> None:
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.input_tokens = _resized(self.input_tokens, limits.input_tokens_per_minute, now)
        self.output_tokens = _resized(self.output_tokens, limits.output_tokens_per_minute, now)
        self.max_running = limits.concurrent_requests

    @property
    def is_full(self) -> bool:
        """Return whether as many requests run as may."""
        most = self.max_running
        return most is not None and self.num_running + self.running_elsewhere >= most

    def is_whole(self, now: float) -> bool:
        """Return whether a new meter would decide in the same way, so that this meter can be forgotten."""
        if self.num_running:
            return False
        buckets = _present((self.requests, self.input_tokens, self.output_tokens))
        for bucket in buckets:
            bucket.refill(now)
        return all(bucket.is_full for bucket in buckets)


class CallerMeters:
    """The meters of one caller of one model, with their buckets sorted by kind so that a decision is a few loops.
    Used within a `with` statement, which other processes may not interrupt where meters are shared."""

    __slots__ = ("_inputs", "_outputs", "_requests", "limits", "meters")

    def __init__(self, limits: CallerLimits, meters: tuple[Meter, ...]) -> None:
        self.limits = limits
        self.meters = meters
        self._requests = _present(meter.requests for meter in meters)
        self._inputs = _present(meter.input_tokens for meter in meters)
        self._outputs = _present(meter.output_tokens for meter in meters)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def admits(self, now: float, demand: Demand = NOTHING) -> bool:
        """Return whether one more request may begin, and take as much. A caller in debt for tokens must wait."""
        for bucket in self._requests:
            if bucket.refill(now) + TOLERANCE < 1:  # as `fits`, which would be one more call
                return False
        for meter in self.meters:
            most = meter.max_running
            if most is not None and meter.num_running + meter.running_elsewhere >= most:
                return False
        return self.fits(demand, now)

    def fits(self, demand: Demand, now: float) -> bool:
        """Return whether every token bucket allows the demand."""
        input_tokens, output_tokens, _ = demand
        for bucket in self._inputs:
            if bucket.refill(now) + TOLERANCE < input_tokens:
                return False
        for bucket in self._outputs:  # noqa: SIM110 (a generator costs more than the loop)
            if bucket.refill(now) + TOLERANCE < output_tokens:
                return False
        return True

    def admit(self) -> None:
        """Only right after `admits`, which has refilled the buckets."""
        for bucket in self._requests:
            bucket.level -= 1
        for meter in self.meters:
            meter.num_running += 1

    def take(self, demand: Demand) -> None:
        """Only right after `fits`, which has refilled the buckets."""
        input_tokens, output_tokens, _ = demand
        for bucket in self._inputs:
            bucket.level -= input_tokens
        for bucket in self._outputs:
            bucket.level -= output_tokens
        if demand.microdollars:
            for meter in self.meters:
                meter.reserved_microdollars += demand.microdollars

    def begin(self, num_requests: int, demand: Demand, now: float) -> RateLimits | None:
        """Take tokens, and with `num_requests` of 1 also a request and its place. Returns what is left; None, with
        nothing taken, where a limit refuses."""
        with self:
            has_room = self.admits(now, demand) if num_requests else self.fits(demand, now)
            if not has_room:
                return None
            if num_requests:
                self.admit()
            self.take(demand)
            return self.rate_limits()

    def end(self, reserved: Demand, used: Demand, now: float) -> None:
        """End a request: what was used counts, instead of what was reserved."""
        with self:
            self.settle(reserved, used, now)

    def give_back_request(self, now: float) -> None:
        for bucket in self._requests:
            bucket.take(-1, now)

    def give_back_input(self, num_tokens: int, now: float) -> None:
        """Have tokens of a running request's prompt count no longer."""
        with self:
            for bucket in self._inputs:
                bucket.take(-num_tokens, now)

    def settle(self, reserved: Demand, used: Demand, now: float) -> None:
        input_tokens = used.input_tokens - reserved.input_tokens
        output_tokens = used.output_tokens - reserved.output_tokens
        for bucket in self._inputs:
            bucket.take(input_tokens, now)
        for bucket in self._outputs:
            bucket.take(output_tokens, now)
        for meter in self.meters:
            meter.num_running -= 1
            # Rounding must not leave a small reserved amount without a reservation.
            left = meter.reserved_microdollars - reserved.microdollars if meter.num_running else 0.0
            meter.reserved_microdollars = left

    def refusals(self, num_requests: int, demand: Demand, now: float) -> list[Refusal]:
        """Return the reasons why buckets refuse the demand."""
        found = []
        for meter in self.meters:
            for figure, bucket, amount in (
                (Figure.REQUESTS, meter.requests, num_requests),
                (Figure.INPUT_TOKENS, meter.input_tokens, demand.input_tokens),
                (Figure.OUTPUT_TOKENS, meter.output_tokens, demand.output_tokens),
            ):
                if bucket is not None and not bucket.fits(amount, now):
                    found.append(
                        Refusal(bucket.wait_s(amount, now), figure, meter.subject, bucket.limit, amount)
                    )
        return found

    def refill(self, now: float) -> None:
        for bucket in (*self._requests, *self._inputs, *self._outputs):
            bucket.refill(now)

    def rate_limits(self) -> RateLimits:
        """Return the limits and their remaining amounts, as of the last decision or `refill`."""
        return RateLimits(_tightest(self._requests), _tightest(self._inputs), _tightest(self._outputs))


class Meters:
    """All meters of this process."""

    def __init__(
        self,
        settings: LimitSettings,
        make_caller: Callable[[CallerLimits, tuple[Meter, ...]], CallerMeters] = CallerMeters,
    ) -> None:
        self._make_caller = make_caller
        self._resolver = LimitResolver(settings)
        self._meters: dict[Subject, Meter] = {}
        self._callers: dict[tuple[str, str, str | None], CallerMeters] = {}
        self._sweep_size = _MIN_SWEEP_SIZE

    def __len__(self) -> int:
        return len(self._meters)

    def apply(self, settings: LimitSettings, now: float) -> None:
        """Take over new limits. Counts of what callers have used, run and owe stay."""
        self._resolver = LimitResolver(settings)
        self._callers.clear()
        for meter in self._meters.values():
            meter.limit_to(self._resolver.limits_of(meter.subject), now)

    def of_caller(self, principal: Principal, model: str | None, now: float) -> CallerMeters:
        caller = (principal.key_id, principal.workspace_id, model)
        found = self._callers.get(caller)
        if found is None:
            if len(self._meters) >= self._sweep_size or len(self._callers) >= _MAX_CACHED_CALLERS:
                self._sweep(now)
            limits = self._resolver.limits_of_caller(principal, model)
            meters = tuple(self._meter(subject, resolved, now) for subject, resolved in limits.applying)
            found = self._callers[caller] = self._make_caller(limits, meters)
        return found

    def _meter(self, subject: Subject, limits: ResolvedLimits, now: float) -> Meter:
        meter = self._meters.get(subject)
        if meter is None:
            meter = self._meters[subject] = Meter(subject, limits, now)
        return meter

    def _sweep(self, now: float) -> None:
        """Forget subjects whose buckets are full. The doubled threshold keeps this rare."""
        kept = {subject: meter for subject, meter in self._meters.items() if not meter.is_whole(now)}
        self._meters = kept
        self._callers.clear()
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(kept))


def _present(buckets: Iterable[TokenBucket | None]) -> tuple[TokenBucket, ...]:
    return tuple(bucket for bucket in buckets if bucket is not None)


def _resized(bucket: TokenBucket | None, limit: int | None, now: float) -> TokenBucket | None:
    """Return the same bucket under another limit; a new one is full."""
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket(limit, now)
    if bucket.limit != limit:
        bucket.resize(limit, now)
    return bucket


def _tightest(buckets: tuple[TokenBucket, ...]) -> LimitState | None:
    if not buckets:
        return None
    tightest = buckets[0]
    for bucket in buckets[1:]:
        if bucket.level < tightest.level:
            tightest = bucket
    return tightest.state
