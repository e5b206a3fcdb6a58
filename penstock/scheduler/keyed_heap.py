"""A priority queue whose entries can be removed or moved. Knows nothing of requests."""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_SLACK_ENTRIES = 32


class KeyedHeap(Generic[T]):
    """Orders items by ascending key, then by ascending number. `number` identifies an item and is in the heap at most
    once.

    Removal only forgets the item. Its entry is dropped when it surfaces, or when such stale entries outnumber the
    live ones. All operations are O(log n), amortised.
    """

    __slots__ = ("_entries", "_keys", "_num_pushes")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, int, T]] = []  # key, number, push count (unique), item
        self._keys: dict[int, tuple[Any, int]] = {}  # of live items: key, push count
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, number: int) -> bool:
        return number in self._keys

    def push(self, number: int, key: Any, item: T) -> None:
        """Insert an item, or give it another key."""
        self._num_pushes += 1
        self._keys[number] = (key, self._num_pushes)
        if len(self._entries) > 2 * len(self._keys) + _SLACK_ENTRIES:
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (key, number, self._num_pushes, item))

    def discard(self, number: int) -> None:
        self._keys.pop(number, None)

    def first(self) -> T | None:
        """Return the item with the smallest key, which stays, or None."""
        entry = self.first_entry()
        return None if entry is None else entry[3]

    def first_key(self) -> Any:
        """Return the smallest key, or None."""
        entry = self.first_entry()
        return None if entry is None else entry[0]

    def items(self) -> list[T]:
        """Return all items, in no particular order."""
        return [entry[3] for entry in self._entries if self._is_live(entry)]

    def first_entry(self) -> tuple[Any, int, int, T] | None:
        """Return the smallest key, the number of its item, a count, and the item; or None."""
        entries, keys = self._entries, self._keys
        while entries:
            entry = entries[0]
            live = keys.get(entry[1])
            if live is not None and live[1] == entry[2]:
                return entry
            heapq.heappop(entries)
        return None

    def _is_live(self, entry: tuple[Any, int, int, T]) -> bool:
        live = self._keys.get(entry[1])
        return live is not None and live[1] == entry[2]
