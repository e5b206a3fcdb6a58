"""Predicts the load of one replica in seconds, from what this gateway knows, and computes the number that ties a
session key to a replica. Knows no other replica and no prefix index.

The speed is a line, seconds = base + tokens × rate, fitted by least squares in which old pairs fade. Two imaginary
pairs, which do not fade, hold the line in place while little is known and when all pairs are alike.

Session keys lead to replicas by the highest random weight: each pair of key and replica has a score, and the highest
wins. When a replica comes or goes, only the keys that lead to it move.

The load combines three sources. The unanswered requests of this router are known exactly and at once. Requests of
other gateways are the difference to the heartbeat. The speed of the replica is fitted from heartbeats.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from math import inf
from operator import add, mul

from penstock.core.messages import EngineStats
from penstock.router.request import Replica

_PAIR_FADING = 0.97  # weight left of each pair after the next: 33 pairs count, about 3 s of heartbeats
_PRIOR_WEIGHT = 0.05
_MIN_RATE_S = 1e-9


class LinearFit:
    def __init__(self, base_s: float, token_s: float, typical_tokens: int) -> None:
        """Start from a guess, and from the number of tokens that larger pairs will have."""
        low, high = 0.0, float(typical_tokens)
        self._prior = (
            2.0 * _PRIOR_WEIGHT,
            _PRIOR_WEIGHT * (low + high),
            _PRIOR_WEIGHT * (low * low + high * high),
            _PRIOR_WEIGHT * (2.0 * base_s + token_s * (low + high)),
            _PRIOR_WEIGHT * (base_s * (low + high) + token_s * (low * low + high * high)),
        )
        self._sums = [0.0] * 5  # of weights: 1, x, xx, y, xy
        self.base_s = base_s
        self.token_s = token_s
        self.num_observed = 0

    def observe(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [_PAIR_FADING * total + value for total, value in zip(self._sums, new, strict=True)]
        self.num_observed += 1
        count, x, xx, y, xy = (total + prior for total, prior in zip(self._sums, self._prior, strict=True))
        slope = (count * xy - x * y) / (count * xx - x * x)
        base = (y - slope * x) / count
        if base < 0.0:  # the best line through the origin
            base, slope = 0.0, xy / xx
        elif slope < _MIN_RATE_S:
            base, slope = y / count, _MIN_RATE_S
        self.base_s, self.token_s = base, slope


_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplying by it loses nothing, and spreads low bits upwards


@lru_cache(maxsize=65_536)
def number_of(key: str) -> int:
    """Return 64 bits that look random. Python's own hash would differ between processes."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def score(key_number: int, replica_number: int) -> int:
    mixed = ((key_number ^ replica_number) * _MULTIPLIER) & _MASK
    return ((mixed ^ (mixed >> 29)) * _MULTIPLIER) & _MASK


_FULL_SHARE = 0.97  # of KV blocks; beyond, requests wait for others to end
_FADING = 0.95
_GUESSED_BASE_S = 0.010
_GUESSED_TOKEN_S = 50e-6
_GUESSED_HOLD_S = 5.0
_FEW_REQUESTS = 8  # too few to tell gateways by
SEVERAL_GATEWAYS = 1.5  # below, requests that ended since a heartbeat are mistaken for those of others


class Ticket:
    """The load that a request adds to its replica until the request ends."""

    __slots__ = ("has_output", "load", "num_blocks", "prefill_tokens", "routed_s", "work_tokens")

    def __init__(
        self, load: ReplicaLoad, routed_s: float, prefill_tokens: int, num_blocks: int, work_tokens: float
    ) -> None:
        self.load = load
        self.routed_s = routed_s
        self.prefill_tokens = prefill_tokens  # thought not to be cached
        self.num_blocks = num_blocks  # of KV, at its expected end
        # To be computed before the first token, with the tokens of earlier requests.
        self.work_tokens = work_tokens
        self.has_output = False


_MOST_EQUAL = 16  # holders of one cost, such as idle ones; with more, comparing all columns is quicker
_ROUNDING = 1.0 + 1e-9  # more than the rounding errors of a cost
_STALE_SHARE = 0.125  # of all loads; with more changes, sorting again is quicker
_USUAL_FADING = 0.99


class CostOrder:
    """The loads of columns, ordered by the cost of a prompt of the usual length. The cost of another prompt differs
    by the tokens of the difference, each of which takes at least as long as on the fastest replica. So the search for
    the cheapest load of a thousand visits a few: it ends where no further load can cost less."""

    __slots__ = ("_columns", "_fastest_s", "_keys", "_ordered", "_reference", "_slowest_s", "_usual", "stale")

    def __init__(self, columns: LoadColumns) -> None:
        self._columns = columns
        # The cost of `_reference` tokens, and the place of the load: no two are equal, so loads are not compared.
        self._ordered: list[tuple[float, int, ReplicaLoad]] = []
        self._keys: list[float] = []  # these costs, by place
        self._reference = 0.0
        self._usual = 0.0  # tokens of a prompt
        self._fastest_s = self._slowest_s = 0.0  # bounds of `token_s` of all loads
        self.stale: set[int] = set()  # places of loads that have changed since

    def cheapest(
        self, num_tokens: float, most_recent: float = inf, holders: int | None = None
    ) -> list[int] | None:
        """Return the places of the loads with the least queue_s + num_tokens * token_s: among those that got at most
        `most_recent` requests lately and have a bit in `holders`. None if too many holders cost the same."""
        self._update(num_tokens)
        recent = self._columns.recent_requests
        more = num_tokens - self._reference
        more_s = more * (self._fastest_s if more > 0.0 else self._slowest_s)
        least_s, limit_s = inf, inf
        found: list[int] = []
        for key_s, place, load in self._ordered:
            if key_s + more_s > limit_s:
                break
            cost_s = load.queue_s + num_tokens * load.token_s
            if cost_s > least_s or recent[place] > most_recent:
                continue
            if holders is not None and not holders & load.bit:
                continue
            if cost_s < least_s:
                least_s, limit_s = cost_s, cost_s * _ROUNDING
                found = [place]
            else:
                found.append(place)
                if holders is not None and len(found) > _MOST_EQUAL:
                    return None
        return found

    def _update(self, num_tokens: float) -> None:
        self._usual += (1.0 - _USUAL_FADING) * (num_tokens - self._usual) if self._usual else num_tokens
        stale, ordered, keys = self.stale, self._ordered, self._keys
        if not stale:
            return
        if len(stale) > _STALE_SHARE * len(ordered):
            self._sort()
            return
        loads = self._columns.loads
        for place in stale:
            load = loads[place]
            del ordered[bisect_left(ordered, (keys[place], place))]
            each_s = load.token_s
            keys[place] = key_s = load.queue_s + self._reference * each_s
            insort(ordered, (key_s, place, load))
            if each_s < self._fastest_s:
                self._fastest_s = each_s
            elif each_s > self._slowest_s:
                self._slowest_s = each_s
        stale.clear()

    def _sort(self) -> None:
        columns = self._columns
        self._reference = self._usual
        self._fastest_s, self._slowest_s = min(columns.token_s), max(columns.token_s)
        self._keys = list(map(add, columns.queue_s, map(mul, repeat(self._reference), columns.token_s)))
        self._ordered = sorted(zip(self._keys, range(len(self._keys)), columns.loads, strict=True))
        self.stale.clear()


class LoadColumns:
    """Figures of several loads side by side, so that a thousand replicas are compared without a loop in Python."""

    # fmt: off
    __slots__ = (
        "_costs_s", "block_size", "least_free", "least_room", "loads", "order", "others_requests",
        "own_requests", "queue_s", "recent_requests", "recent_total", "token_s",
    )
    # fmt: on

    def __init__(self, num_loads: int) -> None:
        self.block_size: int | None = None  # of all loads; None if they differ
        self._costs_s: dict[float, list[float]] = {}  # by number of tokens, until a figure changes
        self.loads: list[ReplicaLoad] = []
        self.order = CostOrder(self)
        self.queue_s = [0.0] * num_loads
        self.token_s = [0.0] * num_loads
        self.recent_requests = [0.0] * num_loads  # kept by RecentShares, in units of its own
        self.recent_total = 0.0  # of all loads
        self.own_requests = 0  # unfinished, of all loads: this gateway's,
        self.others_requests = 0  # and those of other gateways, by the last heartbeats
        self.least_free: float = inf  # blocks that each load has free, at least; and
        self.least_room: float = inf  # blocks that each has room for, at least

    @property
    def num_gateways(self) -> float:
        """Estimate how many gateways send about as many requests as this one."""
        return 1.0 + self.others_requests / (_FEW_REQUESTS + self.own_requests)

    def changed(self, load: ReplicaLoad) -> None:
        """Take over the figures of a load."""
        self.queue_s[load.place] = load.queue_s
        self.token_s[load.place] = load.token_s
        self.order.stale.add(load.place)
        if self._costs_s:
            self._costs_s = {}
        if load.blocks_free < self.least_free:
            self.least_free = load.blocks_free

    def scale_recent(self, factor: float) -> None:
        """Scale all counts of recent requests. Their sum is formed anew, without the rounding errors so far."""
        self.recent_requests = [count * factor for count in self.recent_requests]
        self.recent_total = sum(self.recent_requests)

    def costs_s(self, num_tokens: float) -> list[float]:
        """Return queue_s + num_tokens * token_s of each load."""
        costs_s = self._costs_s.get(num_tokens)
        if costs_s is None:
            costs_s = list(map(add, self.queue_s, map(mul, repeat(num_tokens), self.token_s)))
            self._costs_s[num_tokens] = costs_s
        return costs_s


class ReplicaLoad:
    # fmt: off
    __slots__ = (
        "_fit", "_has_told_steps", "_hold_s", "_kv_used", "_num_steps", "_others_requests",
        "_others_tokens", "_own_tokens", "_uncached_share", "bit", "blocks_free", "columns",
        "num_requests", "number", "own_requests", "place", "queue_s", "replica", "room_blocks", "token_s",
        "wait_per_block_s",
    )
    # fmt: on

    def __init__(self, replica: Replica, bit: int) -> None:
        self.replica = replica
        self.number = number_of(replica.id)
        self.bit = bit  # in the prefix index
        self._fit = LinearFit(_GUESSED_BASE_S, _GUESSED_TOKEN_S, replica.max_step_tokens)
        self._own_tokens = 0
        self.own_requests = 0
        self._others_tokens = 0.0
        self._others_requests = 0
        self._kv_used = 0  # blocks, by the last heartbeat and what was sent since
        self._hold_s = _GUESSED_HOLD_S  # how long a request keeps its blocks
        self._uncached_share = 1.0
        self._has_told_steps = False
        self._num_steps = 0  # by the last heartbeat that reported one
        self.columns, self.place = LoadColumns(1), 0
        # The following fields are derived, and are all that a policy reads.
        self.num_requests = 0  # unfinished, of all gateways
        self.queue_s = 0.0  # until a request without a prompt would get its first token
        self.token_s = 0.0  # for each token of its prompt that is not cached
        self.blocks_free = 0.0  # below 0 when requests already wait for blocks
        self.wait_per_block_s = 0.0  # for each block that a request needs beyond those
        self.room_blocks = inf  # that can be filled before anything cached is evicted; inf: unknown
        self._derive()

    def join(self, columns: LoadColumns, place: int) -> None:
        """Keep the figures of this load there from now on."""
        columns.recent_requests[place] = recent = self.recent_requests
        columns.recent_total += recent
        columns.own_requests += self.own_requests
        columns.others_requests += self._others_requests
        self.columns, self.place = columns, place
        columns.loads.append(self)
        block_size = self.replica.block_size
        columns.block_size = block_size if not place or columns.block_size == block_size else None
        columns.least_room = min(columns.least_room, self.room_blocks)
        self._derive()

    @property
    def recent_requests(self) -> float:
        return self.columns.recent_requests[self.place]

    @recent_requests.setter
    def recent_requests(self, value: float) -> None:
        columns = self.columns
        columns.recent_total += value - columns.recent_requests[self.place]
        columns.recent_requests[self.place] = value

    @property
    def prefill_tokens(self) -> float:
        """Return the number of prompt tokens that wait to be computed."""
        return self._own_tokens + self._others_tokens

    def holds(self, num_blocks: int) -> None:
        """Note how many blocks are cached here, in use or not."""
        if self.replica.num_kv_blocks is not None:
            self.room_blocks = float(max(0, self.replica.num_kv_blocks - num_blocks))
            self.columns.least_room = min(self.columns.least_room, self.room_blocks)

    def describe(self, replica: Replica) -> None:
        self.replica = replica
        self._derive()

    def predict_s(self, uncached_tokens: float, num_blocks: int) -> float:
        """Predict the seconds until the first token of a request with this many tokens to compute and this many
        blocks to fill."""
        predicted_s = self.queue_s + uncached_tokens * self.token_s
        if num_blocks > self.blocks_free:
            predicted_s += (num_blocks - self.blocks_free) * self.wait_per_block_s
        return predicted_s

    def enter(self, prefill_tokens: int, num_blocks: int, now: float) -> Ticket:
        self._own_tokens += prefill_tokens
        self.own_requests += 1
        self.columns.own_requests += 1
        self._kv_used += num_blocks
        self._derive()
        return Ticket(self, now, prefill_tokens, num_blocks, self.prefill_tokens)

    def first_token(self, ticket: Ticket, now: float) -> None:
        if ticket.has_output:
            return
        ticket.has_output = True
        self._own_tokens -= ticket.prefill_tokens
        if not self._has_told_steps:  # external engines report no steps: the wait itself is the measurement
            self._fit.observe(ticket.work_tokens, now - ticket.routed_s)
        self._derive()

    def leave(self, ticket: Ticket, now: float) -> None:
        if not ticket.has_output:
            self._own_tokens -= ticket.prefill_tokens
        self.own_requests -= 1
        self.columns.own_requests -= 1
        self._kv_used = max(0, self._kv_used - ticket.num_blocks)
        if ticket.has_output:
            self._hold_s += (1.0 - _FADING) * (now - ticket.routed_s - self._hold_s)
        self._derive()

    def heartbeat(self, stats: EngineStats, hit_share: float | None) -> None:
        """`hit_share`: the cached share of the prompt tokens looked up since the last heartbeat; None if there were
        none."""
        if stats.step_s > 0.0 and stats.step_tokens and stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._has_told_steps = True
            self._fit.observe(stats.step_tokens, stats.step_s)
        if hit_share is not None:
            self._uncached_share += (1.0 - _FADING) * (1.0 - hit_share - self._uncached_share)
        self._kv_used = stats.num_kv_blocks_used
        others = max(0, stats.num_running + stats.num_waiting - self.own_requests)
        self.columns.others_requests += others - self._others_requests
        self._others_requests = others
        tokens = stats.num_waiting_tokens * self._uncached_share
        if self.columns.num_gateways >= SEVERAL_GATEWAYS:
            tokens += stats.num_prefill_tokens
        self._others_tokens = max(0.0, tokens - self._own_tokens) if self._others_requests else 0.0
        self._derive()

    def _derive(self) -> None:
        replica, fit = self.replica, self._fit
        self.num_requests = self.own_requests + self._others_requests
        # Every request that runs adds a token to each step, and this many tokens fit in a step.
        step_s = fit.base_s + self.num_requests * fit.token_s
        self.token_s = fit.token_s + step_s / replica.max_step_tokens
        self.queue_s = step_s + (self._own_tokens + self._others_tokens) * self.token_s
        if replica.num_kv_blocks is not None:
            self.blocks_free = _FULL_SHARE * replica.num_kv_blocks - self._kv_used
            self.wait_per_block_s = self._hold_s / max(1, self._kv_used)
        else:
            self.blocks_free = inf
        self.columns.changed(self)
