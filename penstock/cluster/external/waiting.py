"""The queue before external servers that take only this many requests at a time: by tier, then by arrival, and
bounded.

Knows no server: a server with room grants it to the first request that waits for the model. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.errors import Overloaded
from penstock.core.request import Tier

MAX_WAITING = 1024
_RANKS = {Tier.PRIORITY: 0, Tier.DEFAULT: 1, Tier.BATCH: 2}


@dataclass(order=True, slots=True)
class _Waiter:
    rank: int
    number: int
    model: str = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class WaitingCalls:
    """Calls of models whose servers are all busy."""

    def __init__(self) -> None:
        self._heap: list[_Waiter] = []
        self._numbers = itertools.count()
        self._num_granted = 0  # woken, and not yet running

    def __len__(self) -> int:
        return sum(not waiter.granted.done() for waiter in self._heap)

    @property
    def is_empty(self) -> bool:
        """Say whether nobody waits. False also while calls that gave up are still on the list."""
        return not self._heap

    @property
    def num_granted(self) -> int:
        """Places that were granted to calls which have not begun yet: nobody else may take them."""
        return self._num_granted

    async def wait(self, model: str, tier: Tier) -> None:
        """Wait for a place. Call `taken` when the call runs. Raises Overloaded where too many wait. May be
        cancelled."""
        if len(self) >= MAX_WAITING:
            raise Overloaded("Too many requests wait for external servers.", retry_after_s=1.0)
        waiter = _Waiter(_RANKS[tier], next(self._numbers), model, asyncio.get_running_loop().create_future())
        heapq.heappush(self._heap, waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self._num_granted -= 1
            raise

    def taken(self) -> None:
        self._num_granted -= 1

    def grant(self, has_room: Callable[[str], bool]) -> None:
        """Wake those that come first, as long as there is room for their models."""
        kept = []
        while self._heap:
            waiter = heapq.heappop(self._heap)
            if waiter.granted.done():
                continue  # it gave up
            if has_room(waiter.model):
                self._num_granted += 1
                waiter.granted.set_result(None)
            else:
                kept.append(waiter)
        self._heap = kept  # in order, which is a heap
