"""A bounded memory of what the database said, so that knowing a caller costs microseconds. Knows no table.

An answer is kept for a while, found or not, until the owner says that it changed. Names that exist and names that do
not have separate room: a flood of invented keys cannot push real ones out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.core.clock import Clock
from penstock.core.errors import Overloaded, StoreUnavailable

T = TypeVar("T")

MAX_REMEMBERED = 10_000  # of those found, and again of those not found
MAX_LOADING = 256


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What the database said about a name, and the number of the last change that it had seen by then."""

    value: T | None
    revision: int


@dataclass(frozen=True, slots=True)
class _Memory(Generic[T]):
    value: T | None
    stale_at_s: float


class Recall(Generic[T]):
    def __init__(
        self,
        load: Callable[[str], Awaitable[Loaded[T]]],
        clock: Clock,
        *,
        keep_s: float,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self._load = load
        self._clock = clock
        self._keep_s = keep_s
        self._max_remembered = max_remembered
        self._found: OrderedDict[str, _Memory[T]] = OrderedDict()
        self._absent: OrderedDict[str, _Memory[T]] = OrderedDict()
        self._loading: dict[str, asyncio.Task[T | None]] = {}
        self._revision = 0

    def __len__(self) -> int:
        return len(self._found) + len(self._absent)

    def peek(self, name: str) -> T | None:
        """What is known to have this name, without asking anyone."""
        memory = self._found.get(name)
        if memory is None or self._clock.now() >= memory.stale_at_s:
            return None
        self._found.move_to_end(name)
        return memory.value

    async def get(self, name: str) -> T | None:
        """What has this name, or None. Raises StoreUnavailable when it is not known and cannot be looked up."""
        known = self.peek(name)
        if known is not None:
            return known
        memory = self._found.get(name) or self._absent.get(name)
        if memory is not None and self._clock.now() < memory.stale_at_s:
            return memory.value
        try:
            return await self._load_once(name)
        except StoreUnavailable:
            # The owner decides how long an outage may last; until then what was known is better than nothing.
            if memory is None or memory.value is None:
                raise
            return memory.value

    def forget(self, names: Iterable[str] | None, revision: int) -> None:
        """These changed, or with None perhaps everything; and whatever was absent may be there now."""
        if names is None:
            self._found.clear()
        else:
            for name in names:
                self._found.pop(name, None)
        self._absent.clear()
        self._revision = revision

    async def _load_once(self, name: str) -> T | None:
        """Callers who ask for the same name meanwhile share one look-up."""
        task = self._loading.get(name)
        if task is None:
            if len(self._loading) >= MAX_LOADING:
                raise Overloaded("Too many unknown callers are being looked up.", retry_after_s=1.0)
            task = self._loading[name] = asyncio.create_task(self._load_and_keep(name))
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(task)

    async def _load_and_keep(self, name: str) -> T | None:
        loaded = await self._load(name)
        # An answer from before a change that we already know of is true no longer than this call.
        if loaded.revision >= self._revision:
            memories, others = (
                (self._found, self._absent) if loaded.value is not None else (self._absent, self._found)
            )
            others.pop(name, None)
            memories[name] = _Memory(loaded.value, self._clock.now() + self._keep_s)
            memories.move_to_end(name)
            if len(memories) > self._max_remembered:
                memories.popitem(last=False)
        return loaded.value
