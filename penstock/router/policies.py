"""Routing policies pick one of several candidates. Policies know loads and matches; no hash and no filter.

A policy gets randomness, the loads and the matched prefixes of all candidates. There is always a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import ClassVar, Protocol, TypeAlias

from penstock.core.errors import ConfigError
from penstock.core.objective import RoutingWeights
from penstock.router.candidates import Candidates, HolderSets, Matches, longest
from penstock.router.load import ReplicaLoad, number_of, score
from penstock.router.request import RandomSource, Reason, RoutingRequest

_MANY_HOLDERS = 96  # of the same part of a prompt: more are not compared one by one
Pick: TypeAlias = tuple[ReplicaLoad, Reason]


class Policy(Protocol):
    name: ClassVar[str]
    reads_prefixes: ClassVar[bool]  # whether the policy uses `matches`, which cost most of a decision

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        """Pick one of the candidates, and say what decided."""
        ...


class RoundRobin:
    """Picks each replica in turn, regardless of load."""

    name: ClassVar[str] = "round-robin"
    reads_prefixes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)], Reason.TURN


class LeastLoaded:
    """Picks the replica with the fewest unfinished requests, then the fewest waiting prompt tokens, then at
    random."""

    name: ClassVar[str] = "least-loaded"
    reads_prefixes: ClassVar[bool] = False

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        first = int(rng.random() * len(candidates))
        best = candidates[first]
        best_load = _load(best)
        for candidate in candidates:
            if candidate.num_requests <= best_load[0]:
                load = _load(candidate)
                if load < best_load:
                    best, best_load = candidate, load
        return best, Reason.LOAD


class PowerOfTwo:
    """Picks the less loaded of two random replicas: nearly as even as comparing all, and less sensitive to old
    reports."""

    name: ClassVar[str] = "power-of-two"
    reads_prefixes: ClassVar[bool] = False

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        count = len(candidates)
        first = int(rng.random() * count)
        if count == 1:
            return candidates[0], Reason.LOAD
        second = (first + 1 + int(rng.random() * (count - 1))) % count
        pair = candidates[first], candidates[second]
        return min(pair, key=_load), Reason.LOAD


class SessionAffinity:
    """Picks the replica that the session or prompt_cache_key leads to, unless that replica has more than its part of
    the load; then the next one that the key leads to. Requests without a key go to the least loaded replica."""

    name: ClassVar[str] = "session-affinity"
    reads_prefixes: ClassVar[bool] = False

    def __init__(self, max_share: float = 1.25) -> None:
        self._max_share = max_share  # of the mean number of requests
        self._without_key = LeastLoaded()

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        if request.affinity_key is None:
            return self._without_key.pick(request, candidates, matches, rng)
        total = sum(candidate.num_requests for candidate in candidates)
        most = self._max_share * (total + 1) / len(candidates)
        fitting = [candidate for candidate in candidates if candidate.num_requests < most]
        return led_to(request.affinity_key, fitting), Reason.AFFINITY


class PrefixAware:
    """Picks the shortest predicted time to the first token: the queue, and the prompt tokens that are not cached.

    A replica that holds the prefix wins until its queue is longer than another's by more than it takes to compute the
    prefix there. Then the other replica gets a copy, and two hold the prefix: no prefix makes a hot spot.

    A prompt that no replica holds makes a full replica evict blocks, which may have to be computed again. The evicted
    blocks therefore count as computation, against a replica that has room.

    `recompute_weight` above 1 accounts for the delay of later requests: without the weight, computing a prefix again
    would look as fast as waiting behind the first request of a burst. A key that several requests share is worth
    `affinity_share` of computing the prompt: the key decides where no prefix is known yet."""

    name: ClassVar[str] = "prefix-aware"
    reads_prefixes: ClassVar[bool] = True

    def __init__(self, recompute_weight: float = 1.15, affinity_share: float = 0.2) -> None:
        if recompute_weight < 1.0 or not 0.0 <= affinity_share <= 1.0:
            raise ConfigError(
                f"Recomputing weighs at least 1, not {recompute_weight}; affinity 0 to 1, not {affinity_share}."
            )
        self._recompute_weight = recompute_weight
        self._affinity_share = affinity_share

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        num_tokens = request.num_prompt_tokens
        num_blocks = (num_tokens + request.expected_output_tokens) // candidates.block_size + 1
        weighted = num_tokens * self._recompute_weight
        # First without prefixes, which most replicas do not have. A matched part of the prompt only lowers a cost.
        if candidates.have_free(num_blocks) and candidates.have_room(num_blocks):
            best, least_s = candidates.cheapest(weighted, rng.random())
        else:
            costs_s = self._costs_s(candidates, weighted, num_blocks)
            best, least_s = candidates.cheapest_of(costs_s, rng.random())
        if matches:
            best = self._cheaper_holder(best, least_s, request, candidates, matches, num_blocks)
            # Without the detour of `Mapping.get` over a KeyError, which most decisions would take.
            held = matches.of(best) if isinstance(matches, HolderSets) else matches.get(best, 0)
            is_longest = held == longest(matches)
            return best, Reason.PREFIX if is_longest else Reason.COPY
        if request.affinity_key is not None:
            favourite = led_to(request.affinity_key, candidates)
            bonus_s = self._affinity_share * num_tokens * favourite.token_s
            if self._cost_s(favourite, num_tokens, num_blocks) - bonus_s < least_s:
                return favourite, Reason.AFFINITY
        return best, Reason.LOAD

    def _costs_s(self, candidates: Candidates, weighted: float, num_blocks: int) -> list[float]:
        """Return the cost of each candidate when not all of them have the blocks for this prompt."""
        if candidates.have_free(num_blocks):
            costs_s = candidates.costs_s(weighted)
        else:
            costs_s = [candidate.predict_s(weighted, num_blocks) for candidate in candidates]
        rooms = [candidate.room_blocks for candidate in candidates]
        if min(rooms) < num_blocks and max(rooms) > 0:
            costs_s = _with_evictions(costs_s, candidates, num_blocks, max(rooms))
        return costs_s

    def _cheaper_holder(
        self,
        best: ReplicaLoad,
        least_s: float,
        request: RoutingRequest,
        candidates: Candidates,
        matches: Matches,
        num_blocks: int,
    ) -> ReplicaLoad:
        """Return the holder of a part of the prompt with the least cost; `best` if none costs less than `least_s`."""
        num_tokens, block_size = request.num_prompt_tokens, candidates.block_size
        for candidate, matched in self._worth_comparing(request, candidates, matches, num_blocks):
            cost_s = self._cost_s(candidate, num_tokens - matched, num_blocks - matched // block_size)
            if cost_s < least_s:
                best, least_s = candidate, cost_s
        return best

    def _worth_comparing(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, num_blocks: int
    ) -> Iterable[tuple[ReplicaLoad, int]]:
        """Return holders and the tokens that they hold: all of them, or of many candidates the cheapest of those that
        hold the same."""
        if (
            not isinstance(matches, HolderSets)
            or not candidates.are_many
            or not candidates.have_free(num_blocks)
        ):
            return matches.items()
        found: list[tuple[ReplicaLoad, int]] = []
        for depth, holders in matches.sets:
            matched = matches.tokens(depth, candidates.block_size)
            uncached = (request.num_prompt_tokens - matched) * self._recompute_weight
            if holders.bit_count() < _MANY_HOLDERS:
                cheapest = matches.cheapest(holders, uncached)
            else:
                cheapest = candidates.cheapest_holder(uncached, holders)
            if cheapest is not None:
                found.append((cheapest, matched))
        return found

    def _cost_s(self, candidate: ReplicaLoad, uncached_tokens: int, num_blocks: int) -> float:
        return candidate.predict_s(uncached_tokens * self._recompute_weight, num_blocks)


def _with_evictions(
    costs_s: Sequence[float], candidates: Sequence[ReplicaLoad], num_blocks: int, most_room: float
) -> list[float]:
    """Add the cost of blocks that a replica evicts and the replica with the most room would not."""
    fewest = min(num_blocks, most_room)
    return [
        cost_s
        + (fewest - min(candidate.room_blocks, fewest)) * candidate.replica.block_size * candidate.token_s
        for cost_s, candidate in zip(costs_s, candidates, strict=True)
    ]


def led_to(key: str, candidates: Sequence[ReplicaLoad]) -> ReplicaLoad:
    number = number_of(key)
    return max(candidates, key=lambda candidate: score(number, candidate.number))


def leading(number: int, candidates: Sequence[ReplicaLoad], count: int) -> list[ReplicaLoad]:
    """Return the candidates that a number leads to before all others; the same ones in every process."""
    return nlargest(count, candidates, key=lambda candidate: score(number, candidate.number))


def _load(candidate: ReplicaLoad) -> tuple[int, float]:
    return candidate.num_requests, candidate.prefill_tokens


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (RoundRobin, LeastLoaded, PowerOfTwo, SessionAffinity, PrefixAware)
}


def policy_named(name: str, weights: RoutingWeights | None = None) -> Policy:
    """Return a routing policy. `weights` may name another one."""
    weights = weights or RoutingWeights()
    name = weights.policy or name
    if name not in POLICIES:
        raise ConfigError(
            f"There is no routing policy {name!r}.", hint=f"Choose one of {', '.join(POLICIES)}."
        )
    if name != PrefixAware.name:
        return POLICIES[name]()
    given = {"recompute_weight": weights.recompute_weight, "affinity_share": weights.affinity_share}
    return PrefixAware(**{key: value for key, value in given.items() if value is not None})
