from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError, EngineUnavailable, ModelNotFound
from penstock.core.kv_events import KVStored
from penstock.core.messages import EngineStats
from penstock.router import POLICIES, Reason, ReplicaState, Router, RouterConfig, policy_named
from tests.router.fleet import MODEL, Desk, chain, fleet


@pytest.mark.parametrize("policy", POLICIES)
def test_only_ready_replicas_of_the_model_and_revision_are_chosen(policy: str) -> None:
    ready = fleet(8)
    replicas = (
        *(msgspec.structs.replace(ready[number], state=state) for number, state in enumerate(ReplicaState)),
        msgspec.structs.replace(ready[6], models=frozenset({"other"})),
        msgspec.structs.replace(ready[7], revision="new"),
    )
    desk = Desk(Router(policy_named(policy)), replicas)
    only_ready = f"replica-{list(ReplicaState).index(ReplicaState.READY)}"
    assert {desk.ask(revision="").replica_id for _ in range(20)} == {only_ready}
    assert {desk.ask(revision="new").replica_id for _ in range(5)} == {"replica-7"}
    assert {desk.ask(model="other").replica_id for _ in range(5)} == {"replica-6"}


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_to_serve_is_an_error_that_says_why(policy: str) -> None:
    desk = Desk(Router(policy_named(policy)), fleet(2, state=ReplicaState.DRAINING))
    with pytest.raises(EngineUnavailable, match="model"):
        desk.ask()
    with pytest.raises(ModelNotFound, match="unheard-of"):
        desk.ask(model="unheard-of")
    desk = Desk(Router(policy_named(policy)), fleet(2))
    with pytest.raises(EngineUnavailable):
        desk.ask(excluded=frozenset({"replica-0", "replica-1"}))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replica_that_failed_a_request_is_not_asked_again(policy: str) -> None:
    desk = Desk(Router(policy_named(policy)), fleet(3))
    hashes = chain(1, 20)
    first = desk.ask(hashes, affinity_key="session").replica_id
    again = desk.ask(hashes, affinity_key="session", excluded=frozenset({first}))
    assert again.replica_id != first


@pytest.mark.parametrize("policy", POLICIES)
def test_many_independent_requests_are_spread_over_all_replicas(policy: str) -> None:
    desk = Desk(Router(policy_named(policy)), fleet(8))
    taken = Counter(desk.ask(chain(number, 10), affinity_key=str(number)).replica_id for number in range(800))
    assert len(taken) == 8
    assert max(taken.values()) <= 1.5 * 100


def test_an_unknown_policy_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        policy_named("fastest")
    assert "prefix-aware" in str(caught.value.hint)


def test_requests_go_where_their_prefix_is() -> None:
    desk = Desk(Router(), fleet(4))
    desk.router.receive("replica-2", [KVStored(0, chain(1, 50), b"root")])
    decision = desk.ask(chain(1, 50))
    assert decision.replica_id == "replica-2"
    assert decision.reason is Reason.PREFIX
    assert decision.matched_tokens == decision.best_matched_tokens == 50 * 16
    assert desk.ask(chain(2, 50)).replica_id != "replica-2"


def test_a_burst_of_siblings_does_not_scatter() -> None:
    """Before any replica could tell of the first one."""
    desk = Desk(Router(), fleet(16))
    assert len({desk.ask(chain(1, 60)).replica_id for _ in range(8)}) == 1
    taken = Counter(desk.ask(chain(2, 60) + chain(number, 2)).replica_id for number in range(10, 22))
    assert len(taken) <= 3  # what they do not share makes a queue, too


def test_an_expectation_that_nobody_confirms_is_given_up() -> None:
    desk = Desk(Router(config=RouterConfig(expectation_ttl_s=5.0)), fleet(4))
    desk.ask(chain(1, 50))
    desk.answer(1)
    desk.now = 4.0
    assert desk.ask(chain(1, 50)).matched_tokens == 800
    desk.answer(2)
    desk.now = 6.0
    assert desk.ask(chain(1, 50)).matched_tokens == 0


def test_a_popular_prefix_is_copied_when_its_queue_is_longer_than_computing_it() -> None:
    desk = Desk(Router(), fleet(4))
    desk.router.receive("replica-0", [KVStored(0, chain(1, 50), b"root")])
    decisions = [desk.ask(chain(1, 50) + chain(number + 10, 20)) for number in range(40)]
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
    desk = Desk(Router(), fleet(4))
    desk.learn_speed("replica-3", factor=4.0)
    taken = Counter(desk.ask(chain(number, 20)).replica_id for number in range(200))
    assert taken["replica-3"] < 0.5 * 50


def test_the_queue_that_others_made_counts_too() -> None:
    desk = Desk(Router(), fleet(2))
    for _ in range(20):
        desk.router.heartbeat(
            "replica-0", EngineStats(num_running=5, num_waiting=20, num_waiting_tokens=20_000)
        )
    assert {desk.ask(chain(number, 2)).replica_id for number in range(5)} == {"replica-1"}


def test_a_full_cache_counts_as_a_wait() -> None:
    desk = Desk(Router(), fleet(2))
    desk.router.heartbeat("replica-0", EngineStats(num_kv_blocks_used=12_000))
    assert {desk.ask(chain(number, 200)).replica_id for number in range(3)} == {"replica-1"}


def test_what_is_new_to_everybody_goes_where_it_evicts_nothing() -> None:
    desk = Desk(Router(), fleet(3, num_kv_blocks=100))
    for number in range(2):  # one has room
        desk.router.receive(f"replica-{number}", [KVStored(0, chain(number, 90), b"root")])
    for number in range(3):
        assert desk.ask(chain(number + 10, 50), expected_output_tokens=16).replica_id == "replica-2"
        desk.answer(number + 1)
    # Not at any price: computing it again takes 0.1 s or so.
    busy = EngineStats(num_running=10, num_waiting=10, num_waiting_tokens=20_000)
    desk.router.heartbeat("replica-2", busy)
    assert desk.ask(chain(20, 50), expected_output_tokens=16).replica_id != "replica-2"


def test_where_everybody_is_full_evictions_decide_nothing() -> None:
    desk = Desk(Router(), fleet(4, num_kv_blocks=100))
    for number in range(4):
        desk.router.receive(f"replica-{number}", [KVStored(0, chain(number, 100), b"root")])
    taken = Counter(desk.ask(chain(number + 10, 50)).replica_id for number in range(40))
    assert min(taken.values()) >= 8


def test_one_that_could_serve_alone_is_not_chosen_but_taken() -> None:
    desk = Desk(Router(), fleet(2))
    desk.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    decision = desk.ask(chain(1, 50), excluded=frozenset({"replica-0"}))
    assert decision.reason is Reason.ONLY
    assert decision.replica_id == "replica-1"
    assert decision.matched_tokens == 800


def test_lost_events_cost_trust_until_the_new_start() -> None:
    desk = Desk(Router(), fleet(2))
    assert desk.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    assert not desk.router.receive("replica-1", [KVStored(2, chain(2, 50), b"root")])
    assert desk.router.resyncs_needed() == ("replica-1",)
    assert desk.ask(chain(1, 50)).best_matched_tokens == 0


def test_a_replica_that_leaves_is_forgotten_with_all_it_held() -> None:
    desk = Desk(Router(), fleet(2))
    desk.router.receive("replica-1", [KVStored(0, chain(1, 50), b"root")])
    desk.replicas = desk.replicas[:1]
    assert desk.ask(chain(1, 50)).best_matched_tokens == 0
    assert desk.router.receive("replica-1", [KVStored(7, chain(3, 5), b"root")])
    assert desk.router.resyncs_needed() == ()


def test_what_was_sent_to_a_silent_replica_is_remembered_for_a_while() -> None:
    """An engine of other people tells nothing of its cache: the index is what was sent there."""
    desk = Desk(Router(config=RouterConfig(approximate_ttl_s=100.0)), fleet(4, sends_kv_events=False))
    home = desk.ask(chain(1, 50)).replica_id
    desk.answer(1)
    for number, at_s in enumerate((60.0, 120.0, 180.0), start=2):  # each use renews it
        desk.now = at_s
        decision = desk.ask(chain(1, 50))
        assert (decision.replica_id, decision.matched_tokens) == (home, 800)
        desk.answer(number)
    desk.now = 300.0
    assert desk.ask(chain(1, 50)).matched_tokens == 0


def test_a_region_is_preferred_until_the_wait_there_is_too_long() -> None:
    here, there = fleet(2)[0], msgspec.structs.replace(fleet(2)[1], region="there")
    replicas = (msgspec.structs.replace(here, region="here"), there)
    desk = Desk(Router(config=RouterConfig(spill_over_s=1.0)), replicas)
    decisions = [desk.ask(chain(number, 100), region="here") for number in range(20)]
    spilled = [decision.is_spilled_over for decision in decisions]
    assert {decision.replica_id for decision in decisions if not decision.is_spilled_over} == {"replica-0"}
    assert not any(spilled[:5])  # 0.17 s of prefill each
    assert any(spilled)
    assert desk.ask(chain(99, 2), region="elsewhere").is_spilled_over


def test_a_session_stays_together_where_nothing_else_is_known() -> None:
    desk = Desk(Router(), fleet(8))
    homes = {desk.ask(affinity_key="session", num_prompt_tokens=3000).replica_id}
    desk.answer(1)
    homes.add(desk.ask(affinity_key="session", num_prompt_tokens=3000).replica_id)
    assert len(homes) == 1


def test_sessions_of_a_replica_that_leaves_move_and_others_stay() -> None:
    router = Router(policy_named("session-affinity"))
    desk = Desk(router, fleet(5))
    before = {}
    for number in range(100):
        before[number] = desk.ask(affinity_key=str(number)).replica_id
        desk.answer(number + 1)
    desk.replicas = desk.replicas[1:]
    for number in range(100):
        after = desk.ask(affinity_key=str(number)).replica_id
        desk.answer(number + 101)
        assert (after == before[number]) == (before[number] != "replica-0")


def test_tallies_return_to_nothing_when_all_requests_have_ended() -> None:
    desk = Desk(Router(), fleet(3))
    for number in range(50):
        desk.ask(chain(number, 30))
    for number in range(50):
        if number % 2:
            desk.router.first_token(f"request-{number + 1}", 1.0)
            desk.router.first_token(f"request-{number + 1}", 1.0)
        desk.router.ended(f"request-{number + 1}", 2.0)
        desk.router.ended(f"request-{number + 1}", 2.0)
    for replica in desk.replicas:
        ledger = desk.router.ledger(replica.id)
        assert ledger is not None
        assert ledger.num_requests == ledger.prefill_tokens == 0


def test_the_same_seed_makes_the_same_decisions() -> None:
    runs = [
        [
            Desk(Router(), fleet(6), seed=3).ask(chain(number % 7, 30), model=MODEL).replica_id
            for number in range(30)
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_second_attempt_takes_the_place_of_the_first() -> None:
    desk = Desk(Router(), fleet(2))
    first = desk.ask(chain(1, 10), id="again").replica_id
    desk.ask(chain(1, 10), id="again", excluded=frozenset({first}))
    ledger = desk.router.ledger(first)
    assert ledger is not None
    assert ledger.num_requests == 0


def test_the_speed_of_an_engine_that_tells_nothing_is_learned_from_its_answers() -> None:
    desk = Desk(Router(), ())
    desk.replicas = fleet(2, sends_kv_events=False, num_kv_blocks=None)
    for number in range(1, 200):
        slow = desk.ask(chain(number, 40)).replica_id == "replica-0"
        desk.now += 2.0 if slow else 0.1
        desk.answer(number)
    taken = Counter(desk.ask(chain(number, 40)).replica_id for number in range(1000, 1040))
    assert taken["replica-1"] > 2 * taken["replica-0"]


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "router.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(page), "exec"), {})


def test_a_very_popular_prefix_is_shared_out_even_while_there_is_no_queue() -> None:
    """Each request is answered before the next one comes: only what each replica got lately tells them apart."""
    desk = Desk(Router(), fleet(4))
    taken: Counter[str] = Counter()
    for number in range(1, 401):
        desk.now = number * 0.05
        taken[desk.ask(chain(1, 50)).replica_id] += 1
        desk.answer(number)
    assert max(taken.values()) <= 1.5 * 100


def test_shares_of_long_ago_do_not_matter() -> None:
    desk = Desk(Router(config=RouterConfig(share_window_s=1.0)), fleet(2))
    for number in range(1, 2001):  # far beyond what a float could count to without starting over
        desk.now = number * 10.0
        desk.ask(chain(1, 50))
        desk.answer(number)
    ledger = desk.router.ledger("replica-0")
    assert ledger is not None
    assert ledger.recent_requests < float("inf")
