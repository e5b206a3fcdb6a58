"""A bounded cache of look-ups in the database, so that recognising a caller costs microseconds. Knows no table.

A result, found or not, is cached for a while, or until the owner of the cache says that it changed. Names that exist
and names that do not exist have separate room: a flood of invented keys cannot push real keys out.
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

MAX_ENTRIES = 10_000  # of those found, and again of those not found
MAX_LOADING = 256


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What the database holds under a name, and the number of the last change that the look-up saw."""

    value: T | None
    revision: int


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T | None
    stale_at_s: float


class LookupCache(Generic[T]):
    def __init__(
        self,
        load: Callable[[str], Awaitable[Loaded[T]]],
        clock: Clock,
        *,
        keep_s: float,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._load = load
        self._clock = clock
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._found: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._absent: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._loading: dict[str, asyncio.Task[T | None]] = {}
        self._revision = 0

    def __len__(self) -> int:
        return len(self._found) + len(self._absent)

    def peek(self, name: str) -> T | None:
        """The cached value of a name; None if it is unknown or absent. Asks no database."""
        entry = self._found.get(name)
        if entry is None or self._clock.now() >= entry.stale_at_s:
            return None
        self._found.move_to_end(name)
        return entry.value

    async def get(self, name: str) -> T | None:
        """The value of a name, or None. Raises StoreUnavailable when it is not cached and cannot be looked up."""
        known = self.peek(name)
        if known is not None:
            return known
        entry = self._found.get(name) or self._absent.get(name)
        if entry is not None and self._clock.now() < entry.stale_at_s:
            return entry.value
        try:
            return await self._load_once(name)
        except StoreUnavailable:
            # The owner decides how long an outage may last; until then what was known is better than nothing.
            if entry is None or entry.value is None:
                raise
            return entry.value

    def forget(self, names: Iterable[str] | None, revision: int) -> None:
        """Forget names that changed, or with None all names. Absent names are always forgotten."""
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
            entries, others = (
                (self._found, self._absent) if loaded.value is not None else (self._absent, self._found)
            )
            others.pop(name, None)
            entries[name] = _Entry(loaded.value, self._clock.now() + self._keep_s)
            entries.move_to_end(name)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)
        return loaded.value
