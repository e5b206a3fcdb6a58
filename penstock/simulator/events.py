"""The event heap of virtual time, in an order that never depends on chance. Knows no meaning of its events."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import TypeAlias

from penstock.core.clock import VirtualClock

Action: TypeAlias = Callable[[float], None]


class Rank(enum.IntEnum):
    """The order of events at the same instant. Planning is last, so that a plan knows of
    everything that happened up to now, as it does in the engine, which empties its inbox before it plans."""

    COMMIT = 0
    FAULT = 1
    DEPART = 2
    REPORT = 3
    ARRIVE = 4
    CONTROL = 5
    PLAN = 6


class EventHeap:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, Rank, int, Action]] = []
        self._next_sequence = 0

    def at(self, time_s: float, rank: Rank, action: Action) -> None:
        """Call `action(time_s)` when that time has come."""
        heapq.heappush(self._heap, (time_s, rank, self._next_sequence, action))
        self._next_sequence += 1

    def run(self) -> None:
        """Run until no event is left."""
        while self._heap:
            time_s, _, _, action = heapq.heappop(self._heap)
            self._clock.advance_to(time_s)
            action(time_s)
