"""Several schedulers behind the verbs of one, with data-parallel attention."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from penstock.core.plan import CacheUse, SampledToken, StepPlan, StepResult
from penstock.core.plan_log import (
    AbortCall,
    AddCall,
    CommitCall,
    LogHeader,
    LogRecord,
    PlanCall,
    encode_record,
)
from penstock.core.request import CacheBreakpoint, FinishReason
from penstock.scheduler.build import build_scheduler
from penstock.scheduler.ranks import RankSchedulers, config_of_rank
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.replay import replay
from tests.scheduler.ranks import RanksDriver
from tests.scheduler.strict import Faults, chunks_of, make_request
from tests.scheduler.test_leavers import act

NUM_ACTIONS = 100
HEADER = LogHeader(
    config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    num_blocks=40,
    block_size=16,
    enable_prefix_caching=True,
    max_pinned_fraction=0.5,
    max_model_len=256,
    eos_token_ids=(),
)


def driver_of(**changes: Any) -> RanksDriver:
    return RanksDriver(2, **{"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, **changes})


def random_driver(rng: random.Random) -> RanksDriver:
    driver = RanksDriver(
        rng.choice([1, 2, 2, 3]),
        num_blocks=rng.choice([6, 12, 40]),
        depth=rng.choice([1, 1, 2, 3]),
        max_num_seqs=rng.choice([2, 5, 16]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        itl_target_ms=rng.choice([None, 5.0]),
        queue_timeout_s=rng.choice([None, 2.0]),
        max_queue_requests=rng.choice([3, 1000]),
        num_host_blocks=rng.choice([0, 2, 40]),
        block_copy_s=rng.choice([None, 0.0]),
        halves_blocks=rng.random() < 0.7,
        max_draft_tokens=rng.choice([0, 2, 12]),
        draft_share=rng.choice([0.3, 1.0]),
        spoiled_share=rng.choice([0.0, 0.2]),
        num_spare_states=rng.choice([None, None, 3]),
    )
    driver.executor.faults = Faults(
        rng,
        late_share=rng.choice([0.0, 0.5]),
        end_share=0.05,
        error_share=rng.choice([0.0, 0.02]),
        random_times=rng.random() < 0.5,
    )
    if rng.random() < 0.7:
        driver.expect_short_answers()
    return driver


def random_run(seed: int) -> RanksDriver:
    """A random life of ranks; raises when any record, slot, event or answer is wrong."""
    rng = random.Random(seed)
    driver = random_driver(rng)
    actions = {
        "add": rng.choice([0.1, 0.3]),
        "leave": rng.choice([0.03, 0.2]),
        "plan": 0.15,
        "commit": 0.05,
        "lack memory": rng.choice([0.0, 0.01]),
        "wait": 0.02,
        "step": rng.choice([0.3, 1.0]),
    }
    for number, action in enumerate(rng.choices(list(actions), list(actions.values()), k=NUM_ACTIONS)):
        act(rng, driver, action, number)
        if rng.random() < 0.02:
            driver.ranks.restart_kv_events(driver.now)
        if rng.random() < 0.1:
            driver.check_index()
    driver.run()
    return driver


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_lives_of_ranks_break_nothing(seed: int) -> None:
    random_run(seed)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_calls_give_the_same_plans(seed: int) -> None:
    assert random_run(seed).plans == random_run(seed).plans


def test_requests_go_to_the_rank_with_less_to_do() -> None:
    driver = driver_of()
    for index, length in enumerate((60, 20, 20)):
        driver.add(make_request(f"r{index}", length))
    assert [driver.rank_of(f"r{index}") for index in range(3)] == [0, 1, 1]
    driver.run()


def test_a_cached_prefix_leads_to_its_rank_until_that_rank_is_too_busy() -> None:
    driver = driver_of(num_blocks=100, max_num_seqs=20)
    prefix = tuple(range(40)) * 2
    driver.add(make_request("elsewhere", 90))  # takes the first rank
    driver.add(make_request("first", prefix))
    driver.run()
    ranks = []
    for index in range(12):
        driver.add(make_request(f"r{index}", (*prefix, index), 20))
        ranks.append(driver.rank_of(f"r{index}"))
    assert ranks[:4] == [1] * 4
    assert 0 in ranks
    driver.run()
    assert driver.first_events["r0"].num_cached_tokens == 80


def test_a_rank_without_requests_has_no_plan_and_its_answers_go_on() -> None:
    driver = driver_of()
    driver.add(make_request("alone", 10, 8))
    plan = driver.step()
    assert plan is not None
    assert plan.rank_tokens == (10, 0)
    assert plan.ranks[1] is None
    driver.run()
    assert len(driver.answers["alone"]) == 8


def test_a_full_queue_of_one_rank_leaves_room_on_the_other() -> None:
    own = config_of_rank(driver_of(max_queue_requests=5, max_queue_tokens=101).config, 2)
    assert (own.max_queue_requests, own.max_queue_tokens) == (3, 51)
    driver = driver_of(max_num_seqs=1, max_queue_requests=1)
    prefix = tuple(range(40))
    driver.add(make_request("before", prefix))
    driver.run()
    for index in range(4):
        driver.add(make_request(f"r{index}", (*prefix, index)))
    with pytest.raises(Overloaded, match="queue is full"):
        driver.add(make_request("one too many", prefix))
    assert sorted(driver.rank_of(f"r{index}") for index in range(4)) == [0, 0, 1, 1]
    driver.run()


def test_a_prefix_that_another_rank_keeps_is_not_written_twice() -> None:
    driver = driver_of(num_blocks=100)
    prefix = tuple(range(40))
    marks = (CacheBreakpoint(40, 100.0, ()),)
    driver.add(make_request("first", (*prefix, 1), breakpoints=marks))
    driver.run()
    for rank in (0, 1):  # the second lacks the prefix
        name = f"again on {rank}"
        request = make_request(name, (*prefix, 2), breakpoints=marks)
        driver.requests[name], driver.answers[name], driver.scores[name] = request, [], []
        driver.executor.prompts[name] = request.prompt_token_ids
        order = [rank, 1 - rank]
        with patch("penstock.scheduler.ranks.ranks_by_cost", lambda *_, order=order: order):
            driver.ranks.add(request, driver.now)
    driver.run()
    uses = [driver.first_events[name].cache_use for name in ("first", "again on 0", "again on 1")]
    assert uses == [CacheUse(0, (40,)), CacheUse(40, (0,)), CacheUse(40, (0,))]
    assert driver.first_events["again on 1"].num_cached_tokens == 40
    assert not driver.ranks._kept_elsewhere


def test_an_id_is_refused_while_any_rank_serves_it() -> None:
    driver = driver_of()
    driver.add(make_request("twice", 10))
    with pytest.raises(InvalidRequest, match="already being served"):
        driver.ranks.add(make_request("twice", 50), 0.0)
    with pytest.raises(ContextLengthExceeded):
        driver.ranks.add(make_request("long", 1000), 0.0)
    driver.run()


def test_an_id_comes_back_on_another_rank_while_a_step_of_its_owner_is_in_flight() -> None:
    driver = driver_of(depth=2)
    driver.add(make_request("twice", 10, 20))
    driver.plan()
    driver.abort("twice")
    driver.add(make_request("twice", 12, 9))
    assert driver.rank_of("twice") == 1
    driver.run()
    assert driver.finished["twice"].finish_reason is FinishReason.LENGTH


def two_ranks() -> tuple[RankSchedulers, Any]:
    header = msgspec.structs.replace(
        HEADER, num_ranks=2, config=SchedulerConfig(itl_target_ms=14.0, max_num_batched_tokens=120)
    )
    ranks = build_scheduler(header)
    assert isinstance(ranks, RankSchedulers)
    return ranks, ranks.schedulers


def step(ranks: RankSchedulers, elapsed_s: float) -> StepPlan:
    plan = ranks.plan(0.0)
    assert plan is not None
    sampled = tuple(SampledToken(each.request_id, 7) for each in chunks_of(plan) if each.samples)
    ranks.commit(plan, StepResult(plan.step_id, sampled, elapsed_s), 0.0)
    ranks.check_integrity()
    return plan


def test_all_ranks_learn_from_the_busiest_how_long_steps_take() -> None:
    ranks, (long, short) = two_ranks()
    ranks.add(make_request("long", 100, 1), 0.0)
    ranks.add(make_request("short", 4, 1), 0.0)
    before_s = short.prefill_s(0, 10)
    assert step(ranks, 3.0).rank_tokens == (100, 4)
    assert short.prefill_s(0, 10) == long.prefill_s(0, 10) > before_s
    alone = build_scheduler(msgspec.structs.replace(HEADER, config=long._config))
    assert isinstance(alone, Scheduler)
    alone.add(make_request("long", 100, 1), 0.0)
    plan = alone.plan(0.0)
    assert plan is not None
    alone.commit(plan, StepResult(1, (SampledToken("long", 7),), 3.0), 0.0)
    assert short.prefill_s(0, 10) == alone.prefill_s(0, 10), "the small load was not taken for the cause"


def test_prompts_of_one_rank_let_answers_of_the_others_go_on_in_time() -> None:
    """A rank without answers of its own would compute a whole prompt at once."""
    sizes = []
    for answers in (False, True):
        ranks, _ = two_ranks()
        for index in range(20):  # steps take 10 ms, and 0.1 ms for each token
            ranks.add(make_request(f"r{index}", 5 * (1 + index), 1), 0.0)
            step(ranks, 0.01 + 0.0005 * (1 + index))
        if answers:
            ranks.add(make_request("answer", 5, 50), 0.0)
            step(ranks, 0.0105)
        ranks.add(make_request("prompt", 110, 1), 0.0)
        sizes.append(max(ranks.plan(0.0).rank_tokens))  # type: ignore[union-attr]
    assert sizes[0] == 110
    assert 16 <= sizes[1] < 60


def test_a_log_of_ranks_replays() -> None:
    """With ids that come back on other ranks. The engine writes the same lines."""
    header = msgspec.structs.replace(HEADER, num_ranks=2)
    ranks = build_scheduler(header)
    assert isinstance(ranks, RankSchedulers)
    records: list[LogRecord] = [header]
    for index in range(12):
        request = make_request(f"r{index % 5}", 10 + 7 * index, 6)
        if index >= 5:
            ranks.abort(request.id, 0.0)
            records.append(AbortCall(0.0, request.id))
        ranks.add(request, 0.0)
        records.append(AddCall(0.0, request))
        for _ in range(2):
            plan = ranks.plan(0.0)
            assert plan is not None
            sampled = tuple(SampledToken(each.request_id, 7) for each in chunks_of(plan) if each.samples)
            result = StepResult(plan.step_id, sampled, 0.01)
            ranks.commit(plan, result, 0.0)
            records += [PlanCall(0.0, plan), CommitCall(0.0, result)]
    assert any(
        None not in record.plan.ranks for record in records if isinstance(record, PlanCall) and record.plan
    )
    replayed = replay([encode_record(record) for record in records])
    assert (replayed.mismatch, replayed.num_plans) == (None, 24)


def test_figures_are_those_of_all_ranks() -> None:
    driver = driver_of()
    for index in range(4):
        driver.add(make_request(f"r{index}", 30, 20))
    driver.step()
    stats = driver.ranks.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_kv_blocks) == (4, 0, 80)
    assert stats.num_kv_blocks_used == sum(
        each.stats().num_kv_blocks_used for each in driver.ranks.schedulers
    )
    assert (driver.ranks.num_running, driver.ranks.num_waiting) == (4, 0)
    driver.add(make_request("in time", 5, deadline_s=driver.now + 7.0))
    assert driver.ranks.next_wakeup(driver.now) == driver.now + 7.0
    driver.run()


def test_steps_are_committed_in_order() -> None:
    driver = driver_of(depth=2)
    driver.add(make_request("r", 30, 20))
    first = driver.ranks.plan(0.0)
    assert first is not None
    with pytest.raises(ValueError, match="out of order"):
        driver.ranks.commit(first, StepResult(2, (), 0.1), 0.1)
