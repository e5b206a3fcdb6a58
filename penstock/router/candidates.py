"""The replicas that may serve a request, and their figures side by side. Knows no policy and no prefix index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from math import inf
from operator import add, attrgetter, itemgetter, mul
from typing import Any

from penstock.router.load import LoadColumns, ReplicaLoad

_MANY = 64
_TRIES = 8


class Candidates(list[ReplicaLoad]):
    """The replicas that may serve a request: all of the router's loads, in order, or some."""

    __slots__ = ("_columns", "_some")

    def __init__(self, loads: Iterable[ReplicaLoad], columns: LoadColumns) -> None:
        super().__init__(loads)
        self._columns = columns
        self._some: Callable[[Sequence[float]], Any] | None = None
        if len(self) == 1:
            place = self[0].place
            self._some = itemgetter(slice(place, place + 1))
        elif 0 < len(self) < len(columns.queue_s):
            self._some = itemgetter(*[load.place for load in self])

    def part(self, loads: Iterable[ReplicaLoad]) -> Candidates:
        """Return some of these replicas."""
        return Candidates(loads, self._columns)

    def with_at_most(self, recent_requests: float) -> Candidates:
        """Return the replicas that got at most this many requests lately."""
        keeps = [recent <= recent_requests for recent in self._of_these(self._columns.recent_requests)]
        part = self.part(())
        part.extend(compress(self, keeps))
        some = self._some
        part._some = lambda column: tuple(compress(column if some is None else some(column), keeps))
        return part

    def costs_s(self, num_tokens: float) -> list[float]:
        """Return queue_s + num_tokens * token_s of each."""
        columns = self._columns
        if 2 * len(self) > len(columns.queue_s):  # most costs are needed, or were needed before
            return list(self._of_these(columns.costs_s(num_tokens)))
        queue_s, token_s = self._of_these(columns.queue_s), self._of_these(columns.token_s)
        return list(map(add, queue_s, map(mul, repeat(num_tokens), token_s)))

    @property
    def are_many(self) -> bool:
        """Say whether a loop in Python over all of them takes long. Many have one block size."""
        return len(self) >= _MANY and self._columns.block_size is not None

    def cheapest_holder(self, num_tokens: float, holders: int) -> ReplicaLoad | None:
        """Return the cheapest of the replicas whose bit is set in `holders`, if there is one. Of equal ones, the one
        with the lowest bit. The cheapest of all are tried first: where most are holders, one of them will do."""
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
                return min(fitting, key=attrgetter("bit"))
        costs_s = self.costs_s(num_tokens)
        fitting = [load for load in self if holders & load.bit]
        if not fitting:
            return None
        cost_of = {load.bit: cost_s for load, cost_s in zip(self, costs_s, strict=True)}
        return min(fitting, key=lambda load: (cost_of[load.bit], load.bit))

    def recent_requests(self) -> float:
        """Return the requests that these replicas got lately, together."""
        return sum(self._of_these(self._columns.recent_requests))

    def have_free(self, num_blocks: float) -> bool:
        """Say whether each of these replicas has this many blocks free. False may mean that it is not known."""
        if self._columns.least_free < num_blocks and self._some is None:
            self._columns.least_free = min(
                [load.blocks_free for load in self]
            )  # had fallen, and may have risen
        return self._columns.least_free >= num_blocks

    def have_room(self, num_blocks: float) -> bool:
        """Say whether each of these replicas has room for this many blocks. False may mean that it is not known."""
        if self._columns.least_room < num_blocks and self._some is None:
            self._columns.least_room = min([load.room_blocks for load in self])
        return self._columns.least_room >= num_blocks

    def _of_these(self, column: Sequence[float]) -> Sequence[float]:
        return column if self._some is None else self._some(column)
