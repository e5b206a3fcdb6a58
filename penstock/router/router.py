"""The router chooses the replica that serves a request. Knows no socket, clock or source of randomness.

First the candidates are found: by model, revision, health and region. Then a policy picks one. The router learns from
reports: `heartbeat` and `receive` from replicas, `first_token` and `ended` from the dispatcher. It returns data: a
`Decision`, and `resyncs_needed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp

from penstock.core.errors import EngineUnavailable, ModelNotFound
from penstock.core.messages import EngineStats, KVEvent
from penstock.router.candidates import Candidates, HolderSets, Matches, longest
from penstock.router.index import Expectations, KVFeed, PrefixIndex
from penstock.router.load import SEVERAL_GATEWAYS, LoadColumns, ReplicaLoad, Ticket
from penstock.router.policies import Policy, PrefixAware, leading, led_to
from penstock.router.request import Decision, RandomSource, Reason, Replica, ReplicaState, RoutingRequest

_SPREAD_SHARE = 0.5  # of the time to compute a prompt: a prompt may wait this much longer at an emptier cache
_FREE_REQUESTS = 8.0  # that a replica may have beyond its share: a few requests are no load
_LARGEST_EXPONENT = 500.0
_MIN_COMPARED = 2
_QUEUE_SHARE = 0.5  # of the time to compute what a replica holds: a holder with a longer queue is not drawn
_COMPARED_SHARE = 0.5  # of a gateway's part of the replicas
# For a new beginning of prompts, all gateways draw from this many times the compared replicas.
_AGREED_REPLICAS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    max_index_entries: int = 500_000
    max_expected_blocks: int = 200_000
    expectation_ttl_s: float = 15.0  # for a replica to confirm what was sent to it
    # For a replica that confirms nothing, since the last request with that prefix.
    approximate_ttl_s: float = 300.0
    max_share: float = 1.3  # of the mean number of requests lately, that one replica may get for its prefixes
    share_window_s: float = 30.0
    spill_over_s: float = 2.0  # a predicted wait that makes a request leave its region


@dataclass(slots=True)
class _Known:
    """The router's record of one replica."""

    replica: Replica
    load: ReplicaLoad
    feed: KVFeed
    lookups: tuple[int, int] = (0, 0)  # prefix tokens looked up and found, by the last heartbeat


@dataclass(frozen=True, slots=True)
class _Pool:
    """The replicas that may serve one kind of request, until the fleet changes."""

    local: Candidates  # in the preferred region; all replicas when there is no preference
    everywhere: Candidates


class Router:
    def __init__(self, policy: Policy | None = None, config: RouterConfig | None = None) -> None:
        self.policy: Policy = policy or PrefixAware()
        self.policies: dict[str, Policy] = {}  # by revision, for requests that must go to that revision
        self.config = config or RouterConfig()
        self.index = PrefixIndex(self.config.max_index_entries)
        self.expectations = Expectations(self.index, self.config.max_expected_blocks)
        self._shares = RecentShares(self.config.max_share, self.config.share_window_s)
        self._fleet: Sequence[Replica] | None = None
        self._known: dict[str, _Known] = {}
        self._columns = LoadColumns(0)
        self._by_number: dict[int, ReplicaLoad] = {}  # by the number of the bit in the index, from 1 on
        self._pools: dict[tuple[str, str | None, str | None], _Pool] = {}
        self._tickets: dict[str, Ticket] = {}

    def choose(
        self, request: RoutingRequest, replicas: Sequence[Replica], now: float, rng: RandomSource
    ) -> Decision:
        """Choose a replica. Raises ModelNotFound or EngineUnavailable when no replica may serve. Pass the same
        `replicas` object until something about them changes: it is compared by identity."""
        if replicas is not self._fleet:
            self.update(replicas)
        self.expectations.expire(now)
        self.ended(request.id, now)  # another attempt: the previous one no longer counts
        candidates = self._candidates(request)
        policy = self._policy_for(request)
        matches = HolderSets()
        if policy.reads_prefixes and request.block_hashes:
            matches = self._match(request, candidates)
        if len(candidates) == 1:
            picked, reason = candidates[0], Reason.ONLY
        else:
            picked, reason = self._pick(request, candidates, matches, now, rng)
        matched = matches.of(picked)
        block_size = picked.replica.block_size
        uncached = request.num_prompt_tokens - matched
        num_blocks = (uncached + request.expected_output_tokens) // block_size + 1
        predicted_s = picked.predict_s(uncached, num_blocks)
        self._tickets[request.id] = picked.enter(uncached, num_blocks, now)
        if policy.reads_prefixes and request.block_hashes:
            self._expect(request, picked, matched // block_size, now)
        return Decision(
            picked.replica.id,
            reason,
            matched_tokens=matched,
            best_matched_tokens=longest(matches),
            predicted_ttft_s=predicted_s,
            is_spilled_over=request.region not in (None, picked.replica.region),
        )

    def update(self, replicas: Sequence[Replica]) -> None:
        """Take over a changed fleet. Replicas that are no longer in it, or are gone, are forgotten."""
        self._fleet = replicas
        self._pools.clear()
        present = {replica.id for replica in replicas if replica.state is not ReplicaState.GONE}
        for replica_id in [replica_id for replica_id in self._known if replica_id not in present]:
            feed = self._known.pop(replica_id).feed
            del self._by_number[feed.bit.bit_length()]
            feed.close()
        for replica in replicas:
            known = self._known.get(replica.id)
            if known is not None:
                known.replica = replica
                known.load.describe(replica)
            elif replica.id in present:
                feed = KVFeed(self.index, self.expectations)
                load = self._by_number[feed.bit.bit_length()] = ReplicaLoad(replica, feed.bit)
                self._known[replica.id] = _Known(replica, load, feed)
        self._columns = LoadColumns(len(self._known))
        for place, known in enumerate(self._known.values()):
            known.load.join(self._columns, place)

    def receive(self, replica_id: str, events: Iterable[KVEvent]) -> bool:
        """Take over KV events of a replica, in order. Returns False when events were lost and the replica must send
        all of them again. Events of an unknown replica are ignored."""
        known = self._known.get(replica_id)
        if known is None:
            return True
        known.feed.receive(events)
        if known.feed.bit != known.load.bit:
            del self._by_number[known.load.bit.bit_length()]
            known.load.bit = known.feed.bit
            self._by_number[known.feed.bit.bit_length()] = known.load
        known.load.holds(known.feed.num_blocks)
        return not known.feed.needs_resync

    def matches(self, request: RoutingRequest) -> dict[str, int]:
        """Return how many prompt tokens each ready replica of the model and revision is thought to hold."""
        if not request.block_hashes:
            return {}
        found = self._match(request, self._make_pool(request).everywhere)
        return {load.replica.id: num_tokens for load, num_tokens in found.items()}

    def resyncs_needed(self) -> tuple[str, ...]:
        """Return the replicas that must send their KV events from the start, by `KVCache.restart_events`. Until they
        do, only what is sent from now on is assumed to be cached there."""
        return tuple(replica_id for replica_id, known in self._known.items() if known.feed.needs_resync)

    def heartbeat(self, replica_id: str, stats: EngineStats) -> None:
        known = self._known.get(replica_id)
        if known is None:
            return
        queries, hits = known.lookups
        known.lookups = stats.prefix_cache_queries, stats.prefix_cache_hits
        new_queries = stats.prefix_cache_queries - queries
        known.load.heartbeat(
            stats, (stats.prefix_cache_hits - hits) / new_queries if new_queries > 0 else None
        )

    def first_token(self, request_id: str, now: float) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            ticket.load.first_token(ticket, now)

    def ended(self, request_id: str, now: float) -> None:
        """Stop counting a request that ended, or left its replica to be sent to another. Unknown ids are ignored."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            ticket.load.leave(ticket, now)

    def sent_elsewhere(self, replica_id: str, hashes: Sequence[bytes], now: float) -> None:
        """Note that another router sent a prompt with these blocks to a replica that sends no KV events. Unknown
        replicas are ignored."""
        known = self._known.get(replica_id)
        if known is not None and not known.replica.sends_kv_events:
            self._shares.count(known.load, now)
            self.expectations.expect(known.load.bit, hashes, now, self.config.approximate_ttl_s)

    def load(self, replica_id: str) -> ReplicaLoad | None:
        """Return the load of a replica as this router knows it; None for an unknown replica."""
        known = self._known.get(replica_id)
        return None if known is None else known.load

    def _policy_for(self, request: RoutingRequest) -> Policy:
        if request.revision is None or not self.policies:
            return self.policy
        return self.policies.get(request.revision, self.policy)

    def _pick(
        self,
        request: RoutingRequest,
        candidates: Candidates,
        matches: HolderSets,
        now: float,
        rng: RandomSource,
    ) -> tuple[ReplicaLoad, Reason]:
        """Pick by the policy, unless that replica got more than its share of requests lately."""
        policy = self._policy_for(request)
        picked, reason = policy.pick(request, *self._compared(request, candidates, matches, rng), rng)
        if policy.reads_prefixes:
            limit = self._shares.limit(candidates, now, self._columns.num_gateways)
            if picked.recent_requests > limit:
                within, allowed = candidates.with_at_most(limit), matches.with_at_most(limit)
                other, why = policy.pick(request, *self._compared(request, within, allowed, rng), rng)
                # A replica that got fewer requests of this gateway may still have more in all.
                if other.num_requests <= picked.num_requests:
                    picked, reason, candidates = other, why, within
            if reason is Reason.LOAD and request.block_hashes and not picked.replica.sends_kv_events:
                picked = self._least_filled(request, picked, candidates)
            self._shares.count(picked, now)
        return picked, reason

    def _least_filled(
        self, request: RoutingRequest, picked: ReplicaLoad, candidates: Candidates
    ) -> ReplicaLoad:
        """Return the server for a prompt that no cache holds, among servers that do not report their caches. The
        result is the server that got the fewest blocks, unless its queue is longer by more than a part of the
        prompt's computation. Queues of fast servers are nearly always empty, and chance would fill one cache twice as
        much as another."""
        longest_s = picked.queue_s + _SPREAD_SHARE * request.num_prompt_tokens * picked.token_s
        fitting = [candidate for candidate in candidates if candidate.queue_s <= longest_s]
        return min(fitting, key=lambda load: (self.expectations.num_of(load.bit), load is not picked))

    def _compared(
        self,
        request: RoutingRequest,
        candidates: Candidates,
        matches: HolderSets,
        rng: RandomSource,
    ) -> tuple[Candidates, Matches]:
        """Return the candidates to compare: a random part, half as large as this gateway's part of the traffic. A
        single gateway compares all candidates. Gateways learn of each other's requests late: gateways that compared
        the same replicas would all choose the same replica until then. Among replicas that hold the same part of a
        prompt and have short queues, one is usually drawn at random: a burst of prompts with one prefix spreads over
        its holders. If no replica holds any part of a prompt, its first block selects the replicas to draw from, the
        same in every gateway. Requests with the same new beginning then meet at a few replicas, and each of these
        computes the beginning once."""
        num_gateways = self._columns.num_gateways
        if num_gateways < SEVERAL_GATEWAYS or len(candidates) <= _MIN_COMPARED:
            return candidates, matches
        if not self._policy_for(request).reads_prefixes:
            return candidates, matches
        count = max(_MIN_COMPARED, math.ceil(_COMPARED_SHARE * len(candidates) / num_gateways))
        pool: Sequence[ReplicaLoad] = candidates
        if request.block_hashes and not matches:
            number = int.from_bytes(request.block_hashes[0][:8], "little")
            pool = leading(number, candidates, _AGREED_REPLICAS * count)
        seen = _some(pool, count, rng)
        if request.affinity_key is not None and not matches:
            seen.append(led_to(request.affinity_key, candidates))  # the same one for every gateway
        holders: dict[int, list[ReplicaLoad]] = {}
        for load, matched in matches.items():
            holders.setdefault(matched, []).append(load)
        known = {}
        for matched, loads in holders.items():
            fitting = _with_short_queues(loads, matched)
            # If every gateway compared the same two holders, all would choose the emptier one.
            fewest = 1 + (rng.random() * (num_gateways - 1) < 1)
            count = max(fewest, math.ceil(len(fitting) / num_gateways))
            known.update(dict.fromkeys(_some(fitting, count, rng), matched))
        return candidates.part(seen), known

    def _candidates(self, request: RoutingRequest) -> Candidates:
        """Return the replicas in the preferred region; all replicas when the shortest wait there is too long."""
        key = request.model, request.revision, request.region
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._make_pool(request)
        local = _without(pool.local, request.excluded)
        limit_s = self.config.spill_over_s if request.spill_over_s is None else request.spill_over_s
        if local and (request.region is None or min(candidate.queue_s for candidate in local) <= limit_s):
            return local
        if request.region is not None and limit_s == math.inf:
            raise self._bound_to_region(request)
        everywhere = _without(pool.everywhere, request.excluded)
        if not everywhere:
            raise EngineUnavailable(
                f"No replica of {request.model!r} can take a request now.", retry_after_s=1.0
            )
        return everywhere

    def _bound_to_region(self, request: RoutingRequest) -> EngineUnavailable:
        """Return the error for a request that no replica of its region can take now, and no other may."""
        regions = {
            known.replica.region for known in self._known.values() if request.model in known.replica.models
        }
        if request.region not in regions:
            return EngineUnavailable(
                f"Nothing in the region {request.region!r} serves {request.model!r}, and its requests may not go "
                "elsewhere.",
                hint=f"It is served in: {', '.join(sorted(filter(None, regions))) or 'no named region'}.",
            )
        return EngineUnavailable(
            f"No replica of {request.model!r} in the region {request.region!r} can take a request now.",
            retry_after_s=1.0,
        )

    def _make_pool(self, request: RoutingRequest) -> _Pool:
        serving = [known for known in self._known.values() if request.model in known.replica.models]
        if not serving:
            raise ModelNotFound(f"The model {request.model!r} is not served here.", param="model")
        everywhere = [
            known.load
            for known in serving
            if known.replica.state is ReplicaState.READY
            and request.revision in (None, known.replica.revision)
        ]
        local = [candidate for candidate in everywhere if request.region in (None, candidate.replica.region)]
        return _Pool(Candidates(local, self._columns), Candidates(everywhere, self._columns))

    def _match(self, request: RoutingRequest, candidates: Sequence[ReplicaLoad]) -> HolderSets:
        """Return the prompt tokens that candidates hold; never the whole prompt."""
        bits = self.index.live_bits
        if len(candidates) < len(self._by_number):  # otherwise the candidates are all replicas
            bits = 0
            for candidate in candidates:
                bits |= candidate.bit
        sets = self.index.match(request.block_hashes, bits)
        return HolderSets(sets, self._by_number, request.num_prompt_tokens - 1, self._columns.block_size)

    def _expect(self, request: RoutingRequest, picked: ReplicaLoad, num_matched: int, now: float) -> None:
        hashes = request.block_hashes
        if picked.replica.sends_kv_events:
            self.expectations.expect(picked.bit, hashes[num_matched:], now, self.config.expectation_ttl_s)
        else:
            self.expectations.expect(picked.bit, hashes, now, self.config.approximate_ttl_s)


class RecentShares:
    """Counts the requests that each replica got lately, so that no replica gets much more than the others.

    Old requests fade. Instead of fading every count all the time, a new request counts for more the later it comes:
    only the proportions matter."""

    def __init__(self, max_share: float, window_s: float) -> None:
        self._max_share = max_share  # times the mean
        self._window_s = window_s
        self._origin_s: float | None = None

    def count(self, picked: ReplicaLoad, now: float) -> None:
        """Count a request. All counts are scaled down together before the numbers get too large."""
        if self._exponent(now) > _LARGEST_EXPONENT:
            factor = exp(-min(self._exponent(now), _LARGEST_EXPONENT + 200.0))
            picked.columns.scale_recent(factor)
            self._origin_s = now
        picked.recent_requests += exp(self._exponent(now))

    def limit(self, candidates: Candidates, now: float, num_gateways: float) -> float:
        """Return the count of recent requests beyond which a replica has more than its share."""
        total = candidates.recent_requests()
        one = exp(min(self._exponent(now), _LARGEST_EXPONENT + 200.0))
        # A gateway of many has a few requests of each replica: they differ by chance, by about their root.
        free = _FREE_REQUESTS if num_gateways < SEVERAL_GATEWAYS else _FREE_REQUESTS / math.sqrt(num_gateways)
        return self._max_share * total / len(candidates) + free * one

    def _exponent(self, now: float) -> float:
        if self._origin_s is None:
            self._origin_s = now
        return (now - self._origin_s) / self._window_s


def _with_short_queues(loads: Sequence[ReplicaLoad], num_tokens: int) -> list[ReplicaLoad]:
    """Return the loads whose queue is not longer than the shortest by more than half the time of `num_tokens`."""
    least_s = min(load.queue_s for load in loads)
    return [load for load in loads if load.queue_s <= least_s + _QUEUE_SHARE * num_tokens * load.token_s]


def _some(loads: Sequence[ReplicaLoad], count: int, rng: RandomSource) -> list[ReplicaLoad]:
    """Return neighbours, from a random one on."""
    start = int(rng.random() * len(loads))
    return [*loads[start : start + count], *loads[: max(0, start + count - len(loads))]][:count]


def _without(candidates: Candidates, excluded: frozenset[str]) -> Candidates:
    if not excluded:
        return candidates
    return candidates.part([load for load in candidates if load.replica.id not in excluded])
