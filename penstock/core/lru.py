"""A cache that is bounded in what all entries weigh together: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """`weigh` says how much of `capacity` an entry takes; by default an entry takes 1."""

    def __init__(self, capacity: int, weigh: Callable[[Key, Value], int] = lambda key, value: 1) -> None:
        self.capacity = capacity
        self.used = 0
        self._weigh = weigh
        self._entries: OrderedDict[Key, Value] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def peek(self, key: Key) -> Value | None:
        """Return a value without using it."""
        return self._entries.get(key)

    def get(self, key: Key) -> Value | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value in place of an older one, unless it alone is too large."""
        self.pop(key)
        weight = self._weigh(key, value)
        if weight <= self.capacity:
            self._entries[key] = value
            self.used += weight
            self.shrink_to(self.capacity)

    def pop(self, key: Key) -> Value | None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.used -= self._weigh(key, value)
        return value

    def clear(self) -> None:
        self._entries.clear()
        self.used = 0

    def shrink_to(self, capacity: int) -> None:
        self.capacity = capacity
        while self.used > capacity:
            self.pop(next(iter(self._entries)))
