"""Clocks tell the time. Rooms that decide take `now` as an argument; only drivers hold a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the seconds of a monotonic clock. Only differences between two calls have a meaning."""
        ...


class SystemClock:
    now = staticmethod(time.monotonic)  # without a Python frame: some callers ask once per token


class VirtualClock:
    """A clock that moves only when told to, for the simulator and for tests."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance_to(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"time would run backwards, from {self._now} to {now}")
        self._now = now

    def advance(self, seconds: float) -> None:
        self.advance_to(self._now + seconds)
