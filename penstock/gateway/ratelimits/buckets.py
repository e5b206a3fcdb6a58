"""Token buckets: a limit per minute as a level that refills steadily. Pure arithmetic; time comes as an argument.

A bucket holds one minute's worth. A reservation takes from it at once; settling gives back what was not used, or
takes what was used beyond the reservation, which may leave a debt that the refill pays off before anything else is
admitted. Over any stretch of time, what is taken for good is therefore at most one bucketful, plus the refill of that
time, plus what the requests still running use beyond their reservations.
"""

from __future__ import annotations

import math

SECONDS_PER_LIMIT = 60.0
# Forgives rounding: a caller that waited exactly as long as told is admitted.
TOLERANCE = 1e-6


class TokenBucket:
    """`share` is the part of the limit that this process grants, when several processes grant parts of it.

    A request larger than the share but not than the limit passes when the bucket is full, and leaves a debt."""

    __slots__ = ("_refill_per_s", "_share", "_updated_s", "capacity", "level", "limit")

    def __init__(self, limit: int, now: float, share: float = 1.0) -> None:
        self._share = share
        self._updated_s = now
        self._set_limit(limit)
        self.level = self.capacity  # as of the last `refill`; below zero it is owed

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self.capacity = max(1.0, limit * self._share)
        self._refill_per_s = limit * self._share / SECONDS_PER_LIMIT

    def refill(self, now: float) -> None:
        """Bring the level up to date. A clock that steps back refills nothing."""
        elapsed_s = now - self._updated_s
        if elapsed_s > 0.0:
            self._updated_s = now
            level = self.level + elapsed_s * self._refill_per_s
            self.level = level if level < self.capacity else self.capacity

    def fits(self, amount: int, now: float) -> bool:
        self.refill(now)
        if amount <= self.level + TOLERANCE:
            return True
        return amount <= self.limit and self.level + TOLERANCE >= self.capacity

    def wait_s(self, amount: int, now: float) -> float:
        """Until `amount` fits: 0 is now, infinity is never."""
        if self.fits(amount, now):
            return 0.0
        if amount > self.limit:
            return math.inf
        return (min(amount, self.capacity) - self.level) / self._refill_per_s

    def take(self, amount: float, now: float) -> None:
        """Whether or not there is enough. A negative amount gives back, at most until the bucket is full."""
        self.refill(now)
        level = self.level - amount
        self.level = level if level < self.capacity else self.capacity

    @property
    def remaining(self) -> int:
        """Of the whole limit, as far as this process sees, at the last `refill`."""
        return max(0, int((self.level + TOLERANCE) * self.limit / self.capacity))

    @property
    def reset_s(self) -> float:
        """From the last `refill` until it is full again."""
        return (self.capacity - self.level) / self._refill_per_s

    @property
    def is_full(self) -> bool:
        return self.level >= self.capacity

    def resize(self, limit: int, now: float) -> None:
        """Another limit from now on; half full stays half full."""
        self.refill(now)
        fullness = self.level / self.capacity
        self._set_limit(limit)
        self.level = self.capacity * fullness
