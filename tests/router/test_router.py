from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError, EngineUnavailable, ModelNotFound
from penstock.core.messages import EngineStats, KVStored
from penstock.core.objective import RoutingWeights
from penstock.router import POLICIES, Reason, ReplicaState, Router, RouterConfig, policy_named
from penstock.router.policies import PrefixAware
from tests.router.fleet import MODEL, Harness, chain, fleet


@pytest.mark.parametrize("policy", POLICIES)
def test_only_ready_replicas_of_the_model_and_revision_are_chosen(policy: str) -> None:
    ready = fleet(8)
    replicas = (
        *(msgspec.structs.replace(ready[number], state=state) for number, state in enumerate(ReplicaState)),
        msgspec.structs.replace(ready[6], models=frozenset({"other"})),
        msgspec.structs.replace(ready[7], revision="new"),
    )
    harness = Harness(Router(policy_named(policy)), replicas)
    only_ready = f"replica-{list(ReplicaState).index(ReplicaState.READY)}"
    assert {harness.ask(revision="").replica_id for _ in range(20)} == {only_ready}
    assert {harness.ask(revision="new").replica_id for _ in range(5)} == {"replica-7"}
    assert {harness.ask(model="other").replica_id for _ in range(5)} == {"replica-6"}


def test_a_revision_may_have_a_routing_policy_of_its_own() -> None:
    replicas = [
        msgspec.structs.replace(each, revision=["a", "b"][number % 2]) for number, each in enumerate(fleet(4))
    ]
    router = Router(policy_named("least-loaded"))
    router.policies = {"b": policy_named("least-loaded", RoutingWeights(policy="round-robin"))}
    harness = Harness(router, replicas)
    assert {harness.ask(revision="a").reason for _ in range(4)} == {Reason.LOAD}
    assert {harness.ask(revision="b").reason for _ in range(4)} == {Reason.TURN}
    assert harness.ask().reason is Reason.LOAD


def test_weights_that_are_left_out_are_the_policys_own() -> None:
    assert vars(policy_named("prefix-aware", RoutingWeights())) == vars(policy_named("prefix-aware"))
    heavier = policy_named("prefix-aware", RoutingWeights(recompute_weight=2.0))
    assert vars(heavier) == vars(PrefixAware(recompute_weight=2.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_to_serve_is_an_error_that_says_why(policy: str) -> None:
    harness = Harness(Router(policy_named(policy)), fleet(2, state=ReplicaState.DRAINING))
    with pytest.raises(EngineUnavailable, match="model"):
        harness.ask()
    with pytest.raises(ModelNotFound, match="unheard-of"):
        harness.ask(model="unheard-of")
    harness = Harness(Router(policy_named(policy)), fleet(2))
    with pytest.raises(EngineUnavailable):
        harness.ask(excluded=frozenset({"replica-0", "replica-1"}))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replica_that_failed_a_request_is_not_asked_again(policy: str) -> None:
    harness = Harness(Router(policy_named(policy)), fleet(3))
    hashes = chain(1, 20)
    first = harness.ask(hashes, affinity_key="session").replica_id
    again = harness.ask(hashes, affinity_key="session", excluded=frozenset({first}))
    assert again.replica_id != first


@pytest.mark.parametrize("policy", POLICIES)
def test_many_independent_requests_are_spread_over_all_replicas(policy: str) -> None:
    harness = Harness(Router(policy_named(policy)), fleet(8))
    taken = Counter(
        harness.ask(chain(number, 10), affinity_key=str(number)).replica_id for number in range(800)
    )
    assert len(taken) == 8
    assert max(taken.values()) <= 1.5 * 100


def test_an_unknown_policy_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        policy_named("fastest")
    assert "prefix-aware" in str(caught.value.hint)


def test_requests_go_where_their_prefix_is() -> None:
    harness = Harness(Router(), fleet(4))
    harness.router.receive("replica-2", [KVStored(0, chain(1, 50), b"root")])
    decision = harness.ask(chain(1, 50))
    assert decision.replica_id == "replica-2"
    assert decision.reason is Reason.PREFIX
    assert decision.matched_tokens == decision.best_matched_tokens == 50 * 16
    assert harness.ask(chain(2, 50)).replica_id != "replica-2"


def test_a_burst_of_siblings_does_not_scatter() -> None:
    """Before any replica could tell of the first one."""
    harness = Harness(Router(), fleet(16))
    assert len({harness.ask(chain(1, 60)).replica_id for _ in range(8)}) == 1
    taken = Counter(harness.ask(chain(2, 60) + chain(number, 2)).replica_id for number in range(10, 22))
    assert len(taken) <= 3  # what they do not share makes a queue, too


def test_an_expectation_that_nobody_confirms_is_given_up() -> None:
    harness = Harness(Router(config=RouterConfig(expectation_ttl_s=5.0)), fleet(4))
    harness.ask(chain(1, 50))
    harness.answer(1)
    harness.now = 4.0
    assert harness.ask(chain(1, 50)).matched_tokens == 800
    harness.answer(2)
    harness.now = 6.0
    assert harness.ask(chain(1, 50)).matched_tokens == 0


def test_a_popular_prefix_is_copied_when_its_queue_is_longer_than_computing_it() -> None:
    harness = Harness(Router(), fleet(4))
    harness.router.receive("replica-0", [KVStored(0, chain(1, 50), b"root")])
    decisions = [harness.ask(chain(1, 50) + chain(number + 10, 20)) for number in range(40)]
    first_copy = next(decision for decision in decisions if decision.reason is Reason.COPY)
    waited = decisions[decisions.index(first_copy) - 1]
    assert first_copy.replica_id != "replica-0"
    assert first_copy.best_matched_tokens == 800
    assert first_copy.predicted_ttft_s >= decisions[0].predicted_ttft_s
    # Had it stayed, it would have waited for longer: the one before did stay, with a shorter queue.
    assert first_copy.predicted_ttft_s <= waited.predicted_ttft_s + 0.1
    taken = Counter(decision.replica_id for decision in decisions)
    assert len(taken) == 4
    assert max(taken.values()) <= 1.5 * 10


def test_a_slow_replica_gets_fewer_requests() -> None:
    harness = Harness(Router(), fleet(4))
    harness.learn_speed("replica-3", factor=4.0)
    taken = Counter(harness.ask(chain(number, 20)).replica_id for number in range(200))
    assert taken["replica-3"] < 0.5 * 50


def test_the_queue_that_others_made_counts_too() -> None:
    harness = Harness(Router(), fleet(2))
    for _ in range(20):
        harness.router.heartbeat(
            "replica-0", EngineStats(num_running=5, num_waiting=20, num_waiting_tokens=20_000)
        )
    assert {harness.ask(chain(number, 2)).replica_id for number in range(5)} == {"replica-1"}


def test_a_full_cache_counts_as_a_wait() -> None:
    harness = Harness(Router(), fleet(2))
    harness.router.heartbeat("replica-0", EngineStats(num_kv_blocks_used=12_000))
    assert {harness.ask(chain(number, 200)).replica_id for number in range(3)} == {"replica-1"}


def test_what_is_new_to_everybody_goes_where_it_evicts_nothing() -> None:
    harness = Harness(Router(), fleet(3, num_kv_blocks=100))
    for number in range(2):  # one has room
        harness.router.receive(f"replica-{number}", [KVStored(0, chain(number, 90), b"root")])
    for number in range(3):
        assert harness.ask(chain(number + 10, 50), expected_output_tokens=16).replica_id == "replica-2"
        harness.answer(number + 1)
    # Not at any price: computing it again takes 0.1 s or so.
    busy = EngineStats(num_running=10, num_waiting=10, num_waiting_tokens=20_000)
    harness.router.heartbeat("replica-2", busy)
    assert harness.ask(chain(20, 50), expected_output_tokens=16).replica_id != "replica-2"


def test_where_everybody_is_full_evictions_decide_nothing() -> None:
    harness = Harness(Router(), fleet(4, num_kv_blocks=100))
    for number in range(4):
        harness.router.receive(f"replica-{number}", [KVStored(0, chain(number, 100), b"root")])
    taken = Counter(harness.ask(chain(number + 10, 50)).replica_id for number in range(40))
    assert min(taken.values()) >= 8


def test_one_that_could_serve_alone_is_not_chosen_but_taken() -> None:
    harness = Harness(Router(), fleet(2))
    harness.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    decision = harness.ask(chain(1, 50), excluded=frozenset({"replica-0"}))
    assert decision.reason is Reason.ONLY
    assert decision.replica_id == "replica-1"
    assert decision.matched_tokens == 800


def test_lost_events_cost_trust_until_the_new_start() -> None:
    harness = Harness(Router(), fleet(2))
    assert harness.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    assert not harness.router.receive("replica-1", [KVStored(2, chain(2, 50), b"root")])
    assert harness.router.resyncs_needed() == ("replica-1",)
    assert harness.ask(chain(1, 50)).best_matched_tokens == 0


def test_a_replica_that_leaves_is_forgotten_with_all_it_held() -> None:
    harness = Harness(Router(), fleet(2))
    harness.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    harness.replicas = harness.replicas[:1]
    assert harness.ask(chain(1, 50)).best_matched_tokens == 0
    assert harness.router.receive("replica-1", [KVStored(7, chain(3, 5), b"root")])
    assert harness.router.resyncs_needed() == ()


def test_what_was_sent_to_a_silent_replica_is_remembered_for_a_while() -> None:
    """An engine of other people tells nothing of its cache: the index is what was sent there."""
    harness = Harness(Router(config=RouterConfig(approximate_ttl_s=100.0)), fleet(4, sends_kv_events=False))
    home = harness.ask(chain(1, 50)).replica_id
    harness.answer(1)
    for number, at_s in enumerate((60.0, 120.0, 180.0), start=2):  # each use renews it
        harness.now = at_s
        decision = harness.ask(chain(1, 50))
        assert (decision.replica_id, decision.matched_tokens) == (home, 800)
        harness.answer(number)
    harness.now = 300.0
    assert harness.ask(chain(1, 50)).matched_tokens == 0


def test_new_prefixes_are_spread_evenly_over_silent_replicas_that_have_nothing_to_do() -> None:
    harness = Harness(Router(), fleet(4, sends_kv_events=False, num_kv_blocks=None))
    homes = Counter()
    for number in range(1, 41):
        homes[harness.ask(chain(number, 60)).replica_id] += 1
        harness.answer(number)
    assert set(homes.values()) == {10}


def test_a_busy_silent_replica_gets_no_prefix_for_its_room() -> None:
    harness = Harness(Router(), fleet(2, sends_kv_events=False, num_kv_blocks=None))
    first = harness.ask(chain(1, 60)).replica_id
    harness.answer(1)
    for number in range(2, 5):
        harness.ask(chain(number, 20), id=f"waits-{number}", excluded=frozenset({first}))
    assert harness.ask(chain(9, 20)).replica_id == first, "though more blocks were sent there"


def test_a_region_is_preferred_until_the_wait_there_is_too_long() -> None:
    here, there = fleet(2)[0], msgspec.structs.replace(fleet(2)[1], region="there")
    replicas = (msgspec.structs.replace(here, region="here"), there)
    harness = Harness(Router(config=RouterConfig(spill_over_s=1.0)), replicas)
    decisions = [harness.ask(chain(number, 100), region="here") for number in range(20)]
    spilled = [decision.is_spilled_over for decision in decisions]
    assert {decision.replica_id for decision in decisions if not decision.is_spilled_over} == {"replica-0"}
    assert not any(spilled[:5])  # 0.17 s of prefill each
    assert any(spilled)
    assert harness.ask(chain(99, 2), region="elsewhere").is_spilled_over


def test_a_request_that_may_not_leave_its_region_waits_there() -> None:
    replicas = tuple(
        msgspec.structs.replace(replica, region=region)
        for replica, region in zip(fleet(2), ("here", "there"), strict=True)
    )
    harness = Harness(Router(config=RouterConfig(spill_over_s=0.0)), replicas)
    pinned = {"region": "here", "spill_over_s": math.inf}
    decisions = [harness.ask(chain(number, 100), **pinned) for number in range(20)]
    assert {decision.replica_id for decision in decisions} == {"replica-0"}
    with pytest.raises(EngineUnavailable, match="Nothing in the region 'mars'"):
        harness.ask(chain(99, 2), region="mars", spill_over_s=math.inf)
    with pytest.raises(EngineUnavailable, match="in the region 'here' can take"):
        harness.ask(chain(99, 2), **pinned, excluded=frozenset({"replica-0"}))
    spilled = [harness.ask(chain(200 + number, 100), region="here", spill_over_s=0.5) for number in range(3)]
    assert all(decision.is_spilled_over for decision in spilled), "a wait of its own to leave at"


def test_a_session_stays_together_where_nothing_else_is_known() -> None:
    harness = Harness(Router(), fleet(8))
    homes = {harness.ask(affinity_key="session", num_prompt_tokens=3000).replica_id}
    harness.answer(1)
    homes.add(harness.ask(affinity_key="session", num_prompt_tokens=3000).replica_id)
    assert len(homes) == 1


def test_sessions_of_a_replica_that_leaves_move_and_others_stay() -> None:
    router = Router(policy_named("session-affinity"))
    harness = Harness(router, fleet(5))
    before = {}
    for number in range(100):
        before[number] = harness.ask(affinity_key=str(number)).replica_id
        harness.answer(number + 1)
    harness.replicas = harness.replicas[1:]
    for number in range(100):
        after = harness.ask(affinity_key=str(number)).replica_id
        harness.answer(number + 101)
        assert (after == before[number]) == (before[number] != "replica-0")


def test_tallies_return_to_nothing_when_all_requests_have_ended() -> None:
    harness = Harness(Router(), fleet(3))
    for number in range(50):
        harness.ask(chain(number, 30))
    for number in range(50):
        if number % 2:
            harness.router.first_token(f"request-{number + 1}", 1.0)
            harness.router.first_token(f"request-{number + 1}", 1.0)
        harness.router.ended(f"request-{number + 1}", 2.0)
        harness.router.ended(f"request-{number + 1}", 2.0)
    for replica in harness.replicas:
        load = harness.router.load(replica.id)
        assert load is not None
        assert load.num_requests == load.prefill_tokens == 0


def test_the_same_seed_makes_the_same_decisions() -> None:
    runs = [
        [
            Harness(Router(), fleet(6), seed=3).ask(chain(number % 7, 30), model=MODEL).replica_id
            for number in range(30)
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_second_attempt_takes_the_place_of_the_first() -> None:
    harness = Harness(Router(), fleet(2))
    first = harness.ask(chain(1, 10), id="again").replica_id
    harness.ask(chain(1, 10), id="again", excluded=frozenset({first}))
    load = harness.router.load(first)
    assert load is not None
    assert load.num_requests == 0


def test_the_speed_of_an_engine_that_tells_nothing_is_learned_from_its_answers() -> None:
    harness = Harness(Router(), ())
    harness.replicas = fleet(2, sends_kv_events=False, num_kv_blocks=None)
    for number in range(1, 200):
        slow = harness.ask(chain(number, 40)).replica_id == "replica-0"
        harness.now += 2.0 if slow else 0.1
        harness.answer(number)
    taken = Counter(harness.ask(chain(number, 40)).replica_id for number in range(1000, 1040))
    assert taken["replica-1"] > 2 * taken["replica-0"]


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "router.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(page), "exec"), {})


def test_a_very_popular_prefix_is_shared_out_even_while_there_is_no_queue() -> None:
    """Each request is answered before the next one comes: only what each replica got lately tells them apart."""
    harness = Harness(Router(), fleet(4))
    taken: Counter[str] = Counter()
    for number in range(1, 401):
        harness.now = number * 0.05
        taken[harness.ask(chain(1, 50)).replica_id] += 1
        harness.answer(number)
    assert max(taken.values()) <= 1.5 * 100


def test_shares_of_long_ago_do_not_matter() -> None:
    harness = Harness(Router(config=RouterConfig(share_window_s=1.0)), fleet(2))
    for number in range(1, 2001):  # far beyond what a float could count to without starting over
        harness.now = number * 10.0
        harness.ask(chain(1, 50))
        harness.answer(number)
    load = harness.router.load("replica-0")
    assert load is not None
    assert load.recent_requests < float("inf")
    counts = [load.columns.recent_requests[place] for place in range(2)]
    assert load.columns.recent_total == pytest.approx(sum(counts))
