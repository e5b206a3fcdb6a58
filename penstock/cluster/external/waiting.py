"""The queue before external servers that take only this many requests at a time: by tier, then tenants in turns, and
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
from penstock.core.shares import Shares

MAX_WAITING = 1024
_RANKS = {Tier.PRIORITY: 0, Tier.DEFAULT: 1, Tier.BATCH: 2}


@dataclass(order=True, slots=True)
class _Waiter:
    rank: int
    turn: int  # in which the tenant has no earlier call
    number: int
    model: str = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class WaitingCalls:
    """Calls of models whose servers are all busy."""

    def __init__(self) -> None:
        self._heap: list[_Waiter] = []
        self._numbers = itertools.count()
        self._shares = Shares(MAX_WAITING)
        self._turns = dict.fromkeys(_RANKS.values(), 0)  # of the calls that were granted last, by rank
        self._last_turns: dict[tuple[str, int], int] = {}  # of the calls that wait, by tenant and rank
        self._num_granted = 0  # woken, and not yet running

    def __len__(self) -> int:
        return self._shares.used

    @property
    def is_empty(self) -> bool:
        """Return whether no call waits. False also while calls that gave up are still on the list."""
        return not self._heap

    @property
    def num_granted(self) -> int:
        """Places that were granted to calls which have not begun yet, and that no other call may take."""
        return self._num_granted

    async def wait(self, model: str, tier: Tier, tenant: str = "") -> None:
        """Wait for a place. Call `taken` when the call runs. Raises Overloaded where too many wait, in all or of the
        tenant. May be cancelled."""
        is_full = len(self) >= MAX_WAITING
        if is_full or self._shares.is_full_for(tenant):
            whose = "" if is_full else " of this workspace"
            raise Overloaded(f"Too many requests{whose} wait for external servers.", retry_after_s=1.0)
        granted = asyncio.get_running_loop().create_future()
        rank = _RANKS[tier]
        waiter = _Waiter(rank, self._next_turn(tenant, rank), next(self._numbers), model, granted)
        heapq.heappush(self._heap, waiter)
        self._shares.add(tenant)
        granted.add_done_callback(lambda _: self._left(tenant))
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self._num_granted -= 1
            raise

    def _next_turn(self, tenant: str, rank: int) -> int:
        last = self._last_turns.get((tenant, rank), 0)
        turn = self._last_turns[tenant, rank] = max(self._turns[rank], last) + 1
        return turn

    def _left(self, tenant: str) -> None:
        self._shares.add(tenant, -1)
        if not self._shares.of(tenant):
            for rank in _RANKS.values():
                self._last_turns.pop((tenant, rank), None)

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
                self._turns[waiter.rank] = max(self._turns[waiter.rank], waiter.turn)
                waiter.granted.set_result(None)
            else:
                kept.append(waiter)
        self._heap = kept  # in order, which is a heap
