"""The replicas that may serve a request and their figures side by side, and those that hold a part of its prompt.
Knows no policy and no prefix index."""

from __future__ import annotations

from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from math import inf
from operator import add, attrgetter, itemgetter, mul
from typing import Any, TypeAlias, overload

from penstock.router.load import LoadColumns, ReplicaLoad

_MANY = 64
_TRIES = 8
_bit = attrgetter("bit")


class Candidates(Sequence[ReplicaLoad]):
    """The replicas that may serve a request: all of the router's loads, in order, or some."""

    __slots__ = ("_columns", "_loads", "_most_recent", "_some", "_source")

    def __init__(self, loads: Iterable[ReplicaLoad], columns: LoadColumns) -> None:
        self._loads: list[ReplicaLoad] | None = list(loads)
        self._columns = columns
        self._source: Candidates | None = None  # of these, those that got at most so many requests lately
        self._most_recent = inf
        self._some: Callable[[Sequence[float]], Any] | None = None
        if len(self._loads) == 1:
            place = self._loads[0].place
            self._some = itemgetter(slice(place, place + 1))
        elif 0 < len(self._loads) < len(columns.queue_s):
            self._some = itemgetter(*[load.place for load in self._loads])

    def part(self, loads: Iterable[ReplicaLoad]) -> Candidates:
        """Return some of these replicas."""
        return Candidates(loads, self._columns)

    def with_at_most(self, recent_requests: float) -> Candidates:
        """Return the replicas that got at most this many requests lately. They are listed when they are needed."""
        part = self.part(())
        part._loads = None
        part._source, part._most_recent = self, recent_requests
        return part

    def _listed(self) -> list[ReplicaLoad]:
        if self._loads is None:
            assert self._source is not None
            source, some = self._source, self._source._some
            recent = source._of_these(self._columns.recent_requests)
            keeps = [each <= self._most_recent for each in recent]
            self._loads = list(compress(source, keeps))
            self._some = lambda column: tuple(compress(column if some is None else some(column), keeps))
        return self._loads

    def __len__(self) -> int:
        return len(self._listed())

    def __iter__(self) -> Iterator[ReplicaLoad]:
        return iter(self._listed())

    @overload
    def __getitem__(self, index: int) -> ReplicaLoad: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReplicaLoad]: ...
    def __getitem__(self, index: int | slice) -> ReplicaLoad | list[ReplicaLoad]:
        return self._listed()[index]

    @property
    def block_size(self) -> int:
        """Return the block size of the first one."""
        return self._columns.block_size or self[0].replica.block_size

    def cheapest(self, num_tokens: float, turn: float) -> tuple[ReplicaLoad, float]:
        """Return the replica with the least queue_s + num_tokens * token_s, and that cost. Among equal candidates,
        the first one from the share `turn` of all replicas on wins."""
        found = self._find(num_tokens)
        if not found:
            return self.cheapest_of(self.costs_s(num_tokens), turn)
        columns = self._columns
        place = found[0] if len(found) == 1 else self._turned(found, turn)
        return columns.loads[place], columns.queue_s[place] + num_tokens * columns.token_s[place]

    def cheapest_of(self, costs_s: list[float], turn: float) -> tuple[ReplicaLoad, float]:
        """Return the replica with the least of these costs, as `cheapest` does."""
        least_s = min(costs_s)
        if costs_s.count(least_s) == 1:
            return self[costs_s.index(least_s)], least_s
        equal = [load.place for load, cost_s in zip(self, costs_s, strict=True) if cost_s == least_s]
        return self._columns.loads[self._turned(equal, turn)], least_s

    def _turned(self, places: list[int], turn: float) -> int:
        start, count = int(turn * len(self._columns.loads)), len(self._columns.loads)
        return min(places, key=lambda place: (place - start) % count)

    def _find(self, num_tokens: float, holders: int | None = None) -> list[int] | None:
        """Search the loads in order of cost, if these are many: all loads, or those that got few requests lately."""
        everyone = self if self._source is None else self._source
        if not everyone._are_all or not self.are_many:
            return None
        return self._columns.order.cheapest(num_tokens, self._most_recent, holders)

    def costs_s(self, num_tokens: float) -> list[float]:
        """Return queue_s + num_tokens * token_s of each."""
        columns = self._columns
        if 2 * len(self) > len(columns.queue_s):  # most costs are needed, or were needed before
            return list(self._of_these(columns.costs_s(num_tokens)))
        queue_s, token_s = self._of_these(columns.queue_s), self._of_these(columns.token_s)
        return list(map(add, queue_s, map(mul, repeat(num_tokens), token_s)))

    @property
    def are_many(self) -> bool:
        """Return whether a loop in Python over all of them takes long. Many have one block size."""
        everyone = self if self._source is None else self._source
        return len(everyone) >= _MANY and self._columns.block_size is not None

    def cheapest_holder(self, num_tokens: float, holders: int) -> ReplicaLoad | None:
        """Return the cheapest of the replicas whose bit is set in `holders`, if there is one. Of equal ones, the one
        with the lowest bit. The cheapest of all are tried first: where most are holders, one of them will do."""
        found = self._find(num_tokens, holders)
        if found:
            return min([self._columns.loads[place] for place in found], key=_bit)
        costs_s = self.costs_s(num_tokens)
        for _ in range(_TRIES):
            least_s = min(costs_s)
            count = costs_s.count(least_s)
            if count > _TRIES or least_s == inf:
                break
            fitting = []
            for _ in range(count):
                place = costs_s.index(least_s)
                costs_s[place] = inf
                if holders & self[place].bit:
                    fitting.append(self[place])
            if fitting:
                return min(fitting, key=_bit)
        costs_s = self.costs_s(num_tokens)
        fitting = [load for load in self if holders & load.bit]
        if not fitting:
            return None
        cost_of = {load.bit: cost_s for load, cost_s in zip(self, costs_s, strict=True)}
        return min(fitting, key=lambda load: (cost_of[load.bit], load.bit))

    def recent_requests(self) -> float:
        """Return the requests that these replicas got lately, together."""
        columns = self._columns
        return columns.recent_total if self._are_all else sum(self._of_these(columns.recent_requests))

    def have_free(self, num_blocks: float) -> bool:
        """Return whether each of these replicas has this many blocks free. False may mean that it is not known."""
        if self._columns.least_free < num_blocks and self._are_all:
            self._columns.least_free = min(
                [load.blocks_free for load in self]
            )  # had fallen, and may have risen
        return self._columns.least_free >= num_blocks

    def have_room(self, num_blocks: float) -> bool:
        """Return whether each of these replicas has room for this many blocks. False may mean that it is not
        known."""
        if self._columns.least_room < num_blocks and self._are_all:
            self._columns.least_room = min([load.room_blocks for load in self])
        return self._columns.least_room >= num_blocks

    @property
    def _are_all(self) -> bool:
        return self._some is None and self._source is None

    def _of_these(self, column: Sequence[float]) -> Sequence[float]:
        if self._loads is None:
            self._listed()
        return column if self._some is None else self._some(column)


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
