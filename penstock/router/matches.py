"""The candidates that hold a part of a prompt. Knows loads and sets of replicas; no policy."""

from __future__ import annotations

from collections.abc import Generator, ItemsView, Iterator, Mapping, Sequence
from math import inf
from typing import TypeAlias

from penstock.router.load import ReplicaLoad

# Prompt tokens that a candidate holds, for candidates that hold any.
Matches: TypeAlias = Mapping[ReplicaLoad, int]


def longest(matches: Matches) -> int:
    """Return the most tokens that one candidate holds."""
    return matches.longest() if isinstance(matches, HolderSets) else max(matches.values(), default=0)


class HolderSets(Mapping[ReplicaLoad, int]):
    """Matches of many replicas. A thousand replicas that hold the same part of a prompt are one entry of `sets`: a
    number of blocks, and the bits of those replicas. The fewest blocks come first."""

    __slots__ = ("_by_number", "_limit", "_most", "block_size", "sets")

    def __init__(
        self,
        sets: Sequence[tuple[int, int]] = (),
        by_number: Mapping[int, ReplicaLoad] | None = None,
        most: int = 0,
        block_size: int | None = None,
        limit: float = inf,
    ) -> None:
        """`by_number`: loads by the number of their bit, from 1 on. `most`: tokens that count at most. `block_size`:
        of all replicas, if it is the same. `limit`: a replica that got more requests than this lately is left out."""
        self.sets = sets
        self._by_number = by_number or {}
        self._most = most
        self.block_size = block_size
        self._limit = limit

    def with_at_most(self, recent_requests: float) -> HolderSets:
        """Return the matches of replicas that got at most this many requests lately."""
        return HolderSets(self.sets, self._by_number, self._most, self.block_size, recent_requests)

    def tokens(self, num_blocks: int, block_size: int) -> int:
        return min(num_blocks * block_size, self._most)

    def longest(self) -> int:
        """Return the most tokens that one candidate holds."""
        if self.block_size is None:
            return max(self.values(), default=0)
        for num_blocks, bits in reversed(self.sets):
            if self._limit == inf or next(self._among(bits), None) is not None:
                return self.tokens(num_blocks, self.block_size)
        return 0

    def __bool__(self) -> bool:
        return bool(self.sets) and (self._limit == inf or next(iter(self), None) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[ReplicaLoad]:
        for _, bits in self.sets:
            yield from self._among(bits)

    def __getitem__(self, load: ReplicaLoad) -> int:
        num_tokens = self.of(load)
        if not num_tokens:
            raise KeyError(load)
        return num_tokens

    def of(self, load: ReplicaLoad) -> int:
        """Return the tokens that a candidate holds; 0 for none."""
        for num_blocks, bits in self.sets:
            if bits & load.bit and load.recent_requests <= self._limit:
                return self.tokens(num_blocks, load.replica.block_size)
        return 0

    def items(self) -> ItemsView[ReplicaLoad, int]:
        found = {}
        for num_blocks, bits in self.sets:
            for load in self._among(bits):
                found[load] = min(num_blocks * load.replica.block_size, self._most)
        return found.items()

    def cheapest(self, bits: int, num_tokens: float) -> ReplicaLoad | None:
        """Return the load of these bits with the least queue_s + num_tokens * token_s, if there is one. Of equal
        ones, the one with the lowest bit."""
        by_number, limit = self._by_number, self._limit
        best, least_s = None, inf
        digits = bin(bits)[:1:-1]  # searched at C speed, unlike the bits of a large number
        place = digits.find("1")
        while place >= 0:
            load = by_number[place + 1]
            cost_s = load.queue_s + num_tokens * load.token_s
            if cost_s < least_s and (limit == inf or load.recent_requests <= limit):
                best, least_s = load, cost_s
            place = digits.find("1", place + 1)
        return best

    def _among(self, bits: int) -> Generator[ReplicaLoad]:
        """Return the loads of these bits, from the lowest bit on."""
        by_number, limit = self._by_number, self._limit
        digits = bin(bits)[:1:-1]
        place = digits.find("1")
        while place >= 0:
            load = by_number[place + 1]
            if limit == inf or load.recent_requests <= limit:
                yield load
            place = digits.find("1", place + 1)
