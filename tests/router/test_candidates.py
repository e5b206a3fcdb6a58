"""Comparing replicas by columns gives what comparing them one by one gives, to the last bit."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from penstock.core.messages import EngineStats, KVStored
from penstock.router import Router, RoutingRequest
from penstock.router.candidates import Candidates, Matches
from penstock.router.load import SEVERAL_GATEWAYS, ReplicaLoad
from penstock.router.policies import Pick, PrefixAware
from penstock.router.request import RandomSource, Reason
from penstock.router.router import RecentShares

from .fleet import MODEL, Harness, chain, fleet


class OneByOne(PrefixAware):
    """The policy as its description says it: the cost of each replica by itself."""

    def pick(
        self, request: RoutingRequest, candidates: Candidates, matches: Matches, rng: RandomSource
    ) -> Pick:
        block_size = candidates[0].replica.block_size
        num_tokens = request.num_prompt_tokens
        num_blocks = (num_tokens + request.expected_output_tokens) // block_size + 1
        most_room = max(load.room_blocks for load in candidates)
        fewest = min(num_blocks, most_room)
        costs_s = []
        for load in candidates:
            cost_s = load.predict_s(num_tokens * self._recompute_weight, num_blocks)
            if most_room > 0 and min(each.room_blocks for each in candidates) < num_blocks:
                cost_s += (fewest - min(load.room_blocks, fewest)) * block_size * load.token_s
            costs_s.append(cost_s)
        least_s, count = min(costs_s), len(candidates[0].columns.loads)
        start = int(rng.random() * count)
        equal = [load for load, cost_s in zip(candidates, costs_s, strict=True) if cost_s == least_s]
        best = min(equal, key=lambda load: (load.place - start) % count)
        for load, matched in matches.items():
            uncached = (num_tokens - matched) * self._recompute_weight
            cost_s = load.predict_s(uncached, num_blocks - matched // block_size)
            if cost_s < least_s:
                best, least_s = load, cost_s
        if matches:
            longest = max(matches.values())
            return best, Reason.PREFIX if matches.get(best, 0) == longest else Reason.COPY
        return best, Reason.LOAD


def decisions(policy: PrefixAware, seed: int, sizes: tuple[int, ...] = (2, 3, 17)) -> list[object]:
    """Let a router decide about random traffic while replicas report, come and go. With many replicas, the gateway is
    alone, and some replicas had more than their share of requests."""
    rng, choices = Random(seed), Random(seed + 1)
    router = Router(policy)
    replicas = fleet(rng.choice(sizes), num_kv_blocks=rng.choice((None, 60, 10_000)))
    replicas = tuple(msgspec.structs.replace(each, region=rng.choice(("a", "b"))) for each in replicas)
    made: list[object] = []
    are_many = len(replicas) >= 100
    router.update(replicas)
    for replica in replicas if are_many else ():
        load = router.load(replica.id)
        assert load is not None
        load.recent_requests = rng.choice((0.0, 0.0, 10.0, 20.0))
    sequences = dict.fromkeys((replica.id for replica in replicas), 0)
    for number in range(120):
        now = number * rng.choice((0.001, 0.1))
        request = RoutingRequest(
            id=f"r{number}",
            model=MODEL,
            num_prompt_tokens=rng.choice((5, 100, 1000)),
            block_hashes=chain(rng.randrange(3), rng.randrange(5)),
            region=rng.choice((None, None, "a")),
            excluded=frozenset({replicas[0].id} if rng.random() < 0.1 else ()),
        )
        made.append(router.choose(request, replicas, now, choices))
        for replica in rng.sample(replicas, 20 if are_many else 2):
            stats = EngineStats(
                num_steps=number + 1, step_tokens=rng.randrange(1, 500), step_s=rng.choice((0.01, 0.02)),
                num_kv_blocks_used=rng.randrange(60), num_running=0 if are_many else rng.randrange(9),
                num_waiting_tokens=rng.randrange(900),
            )  # fmt: skip
            router.heartbeat(replica.id, stats)
            event = KVStored(sequences[replica.id], chain(rng.randrange(3), 4), b"")
            sequences[replica.id] += 1
            router.receive(replica.id, (event,))
        router.first_token(f"r{number - 3}", now)
        router.ended(f"r{number - rng.choice((5, 20))}", now)
        if rng.random() < 0.05 and len(replicas) > 2:
            replicas = replicas[1:] if rng.random() < 0.5 else tuple(reversed(replicas))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_columns_decide_as_single_loads_do(seed: int) -> None:
    assert decisions(PrefixAware(), seed) == decisions(OneByOne(), seed)


@pytest.mark.parametrize("seed", range(8))  # of these, each size meets each number of blocks
def test_groups_of_many_replicas_decide_as_single_loads_do(seed: int) -> None:
    assert decisions(PrefixAware(), seed, (130, 200)) == decisions(OneByOne(), seed, (130, 200))


def test_columns_follow_their_loads() -> None:
    router = Router()
    replicas = fleet(3)
    router.update(replicas)
    loads = [load for replica in replicas if (load := router.load(replica.id)) is not None]
    loads[1].recent_requests = 5.0
    router.update(replicas[1:])  # the places of the others change
    ticket = loads[1].enter(400, 30, 0.0)
    left = Candidates(loads[1:], loads[1].columns)
    assert left.costs_s(7.0) == [load.queue_s + 7.0 * load.token_s for load in loads[1:]]
    assert left.recent_requests() == 5.0
    loads[1].leave(ticket, 1.0)
    assert left.part(loads[2:]).costs_s(7.0) == left.costs_s(7.0)[1:]


@pytest.mark.parametrize("num_blocks", [None, 100])
def test_bounds_of_free_blocks_are_found_again_when_blocks_come_free(num_blocks: int | None) -> None:
    loads = [ReplicaLoad(replica, 1) for replica in fleet(2, num_kv_blocks=num_blocks)]
    columns = loads[0].columns = type(loads[0].columns)(2)
    for place, load in enumerate(loads):
        load.join(columns, place)
    everyone = Candidates(loads, columns)
    ticket = loads[0].enter(10, 90, 0.0)
    assert everyone.have_free(50) is (num_blocks is None)
    loads[0].leave(ticket, 1.0)
    assert everyone.have_free(50)
    loads[1].holds(95)
    assert everyone.have_room(50) is (num_blocks is None)
    loads[1].holds(0)
    assert everyone.have_room(50)


def test_shares_are_those_of_the_candidates_alone() -> None:
    loads = [ReplicaLoad(replica, 1) for replica in fleet(3)]
    columns = type(loads[0].columns)(3)
    for place, load in enumerate(loads):
        load.join(columns, place)
    loads[0].recent_requests = 100.0
    shares = RecentShares(1.3, 30.0)
    everyone, one = Candidates(loads, columns), Candidates(loads[:1], columns)
    left = everyone.with_at_most(shares.limit(everyone, 0.0, 1.0))
    assert list(left) == loads[1:]
    assert left.costs_s(7.0) == everyone.costs_s(7.0)[1:]
    assert left.with_at_most(0.0).costs_s(7.0) == left.costs_s(7.0)
    assert list(one.with_at_most(shares.limit(one, 0.0, 1.0))) == loads[:1]


def gateways_of_a_fleet(count: int, replicas: int = 32) -> list[Harness]:
    """Return gateways that heard the same: each replica runs the requests of all of them, and one has least to do."""
    made = [Harness(Router(), fleet(replicas), seed=number) for number in range(count)]
    for harness in made:
        tell_of_others(harness, count)
    return made


def tell_of_others(harness: Harness, num_gateways: int) -> None:
    for number, replica in enumerate(harness.replicas):
        for _ in range(2):  # requests of this gateway
            harness.router.load(replica.id).enter(0, 0, 0.0)  # type: ignore[union-attr]
        running = 2 * num_gateways + (number != 7)
        harness.router.heartbeat(replica.id, EngineStats(num_running=running))


def test_gateways_that_know_the_same_choose_different_replicas() -> None:
    gateways = gateways_of_a_fleet(16)
    assert gateways[0].router._columns.num_gateways == pytest.approx(14.8, rel=0.01)
    chosen = [harness.ask().replica_id for harness in gateways]
    assert len(set(chosen)) > 4
    assert {harness.ask().replica_id for harness in gateways_of_a_fleet(1)} == {"replica-7"}


def test_a_prompt_of_another_gateway_that_is_being_computed_counts() -> None:
    for count, is_slower in ((16, True), (1, False)):
        [router, *_] = [harness.router for harness in gateways_of_a_fleet(count)]
        load = router.load("replica-3")
        assert load is not None
        before_s = load.queue_s
        router.heartbeat("replica-3", EngineStats(num_running=2 * count + 1, num_prefill_tokens=2_000))
        assert (load.queue_s > before_s + 0.1) is is_slower


def test_a_session_leads_to_the_same_replica_from_every_gateway() -> None:
    decisions = [harness.ask(affinity_key="session-1") for harness in gateways_of_a_fleet(16)]
    assert len({decision.replica_id for decision in decisions}) == 1
    assert {decision.reason for decision in decisions} <= {Reason.AFFINITY, Reason.LOAD}


def test_the_only_holder_of_a_prefix_is_always_seen() -> None:
    hashes = chain(5, 200)
    for harness in gateways_of_a_fleet(16):
        harness.router.receive("replica-9", (KVStored(0, hashes, b""),))
        assert harness.ask(hashes).replica_id == "replica-9"


def test_a_burst_spreads_over_the_holders_of_its_prefix_without_those_whose_queues_are_long() -> None:
    hashes = chain(5, 200)
    for queued, chosen in ((0, {"replica-7", "replica-9"}), (20_000, {"replica-7"})):
        decisions = []
        for harness in gateways_of_a_fleet(16):  # replica-7 has a little less to do
            for replica_id in ("replica-7", "replica-9"):
                harness.router.receive(replica_id, (KVStored(0, hashes, b""),))
            harness.router.heartbeat("replica-9", EngineStats(num_running=33, num_waiting_tokens=queued))
            decisions.append(harness.ask(hashes))
        assert {decision.replica_id for decision in decisions} == chosen


def test_prompts_with_one_new_beginning_meet_at_few_replicas_from_all_gateways() -> None:
    """Their first block leads there, in whichever order a gateway has learned of the replicas."""
    gateways = gateways_of_a_fleet(16)
    for harness in gateways[::2]:
        harness.replicas = harness.replicas[::-1]
        harness.router.update(())
        harness.router.update(harness.replicas)
        tell_of_others(harness, 16)
    places = []
    for beginning in range(8):
        prompts = [(*chain(beginning, 50), b"%16d" % number) for number in range(16)]
        asked = zip(gateways, prompts, strict=True)
        places.append({harness.ask(prompt).replica_id for harness, prompt in asked})
    # Each gateway compares 2 replicas, of 8 that the beginning leads to.
    assert all(1 < len(each) <= 8 for each in places)
    assert len(set.union(*places)) > 16  # other beginnings lead elsewhere


def test_few_requests_say_nothing_of_other_gateways() -> None:
    """A heartbeat still counts a request that has just ended, as if it were another gateway's."""
    (alone,) = gateways_of_a_fleet(1, replicas=1)
    load = alone.router.load("replica-0")
    assert load is not None
    load.leave(load.enter(0, 0, 0.0), 1.0)
    alone.router.heartbeat("replica-0", EngineStats(num_running=5))
    assert alone.router._columns.num_gateways < SEVERAL_GATEWAYS


def test_an_ordered_search_finds_what_comparing_all_loads_finds() -> None:
    rng = Random(1)
    loads = [ReplicaLoad(replica, 1 << number) for number, replica in enumerate(fleet(100))]
    columns = type(loads[0].columns)(100)
    for place, load in enumerate(loads):
        load.join(columns, place)
    for _ in range(300):
        for load in rng.sample(loads, rng.choice((1, 3, 100))):
            load.enter(rng.choice((0, 10, 200)), 1, 0.0)
            load.recent_requests = rng.choice((1.0, 2.0))
        tokens, most, holders = rng.choice((10.0, 150.0, 160.0)), rng.choice((1.0, 9.0)), rng.getrandbits(100)
        fitting = [load for load in loads if load.recent_requests <= most and holders & load.bit]
        least_s = min((load.queue_s + tokens * load.token_s for load in fitting), default=0.0)
        cheapest = {load.place for load in fitting if load.queue_s + tokens * load.token_s == least_s}
        found = columns.order.cheapest(tokens, most, holders)
        assert (len(cheapest) > 16) if found is None else set(found) == cheapest
