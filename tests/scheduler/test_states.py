"""Models whose layers have a fixed state: which prefixes a request can start from, and which snapshots are taken. The
strict executor checks in every step that a state has seen exactly the tokens in front of the chunk."""

from __future__ import annotations

import pytest

from penstock.core.engine_config import SchedulerConfig
from penstock.core.plan import StateCopy, StateSlots, StepPlan
from penstock.core.request import CacheBreakpoint, Grammar, Tier
from penstock.kvcache.cache import KVCache
from penstock.scheduler import Scheduler
from tests.scheduler.strict import Driver, Faults, make_request

DOCUMENT = tuple(index * 7 % 50 for index in range(40))  # ten blocks


def state_driver(**settings: object) -> Driver:
    return Driver(**{"num_spare_states": 4, "max_num_seqs": 3, **settings})  # type: ignore[arg-type]


def answered(driver: Driver, request_id: str, prompt: tuple[int, ...], **settings: object) -> int:
    """Serve a request alone. Returns how many of its prompt's tokens were reused."""
    driver.add(make_request(request_id, prompt, **settings))  # type: ignore[arg-type]
    driver.run()
    cached = driver.first_events[request_id].num_cached_tokens
    assert cached is not None
    return cached


def chunk_ends(plans: list[StepPlan], request_id: str) -> list[int]:
    return [
        chunk.start + chunk.num_tokens
        for plan in plans
        for chunk in plan.chunks
        if chunk.request_id == request_id
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_repeated_prompt_starts_from_the_snapshot_at_its_last_block(depth: int) -> None:
    driver = state_driver(depth=depth)
    assert answered(driver, "first", DOCUMENT) == 0
    assert chunk_ends(driver.plans, "first")[:2] == [36, 40]
    assert answered(driver, "again", DOCUMENT) == 36
    assert answered(driver, "longer", (*DOCUMENT[:36], 1, 2, 3, 4, 5, 6)) == 36


def test_a_short_prompt_is_computed_in_one_chunk() -> None:
    driver = state_driver()
    answered(driver, "short", DOCUMENT[:15])
    assert chunk_ends(driver.plans, "short")[0] == 15


def test_without_prefix_caching_no_chunk_is_cut_and_no_snapshot_taken() -> None:
    driver = state_driver(prefix_caching=False)
    answered(driver, "first", DOCUMENT)
    assert chunk_ends(driver.plans, "first")[0] == 40
    assert driver.cache.states is not None
    assert driver.cache.states.num_snapshots == 0
    assert answered(driver, "again", DOCUMENT) == 0


def test_the_third_request_reuses_a_prefix_that_two_requests_share() -> None:
    """Keys and values alone do not help the second request. It takes the snapshot where the two part."""
    driver = state_driver()
    shared = DOCUMENT[:24]
    assert answered(driver, "first", (*shared, *range(12))) == 0
    assert answered(driver, "second", (*shared, *range(20, 30))) == 0
    assert answered(driver, "third", (*shared, *range(30, 44))) == 24


def test_a_burst_of_siblings_computes_its_common_prefix_once() -> None:
    driver = state_driver(max_num_batched_tokens=16, max_num_seqs=4)
    for number in range(4):
        driver.add(make_request(f"r{number}", (*DOCUMENT, number, number + 1)))
    driver.run()
    cached = [driver.first_events[f"r{number}"].num_cached_tokens for number in range(4)]
    assert cached == [0, 40, 40, 40]


def test_siblings_of_one_plan_wait_for_a_snapshot_that_this_plan_computes() -> None:
    driver = state_driver(max_num_batched_tokens=200, max_num_seqs=4)
    for number in range(4):
        driver.add(make_request(f"r{number}", (*DOCUMENT, number, number + 1)))
    driver.run()
    cached = [driver.first_events[f"r{number}"].num_cached_tokens for number in range(4)]
    assert cached[2:] == [40, 40]  # the first computes, the second takes the snapshot


def test_every_breakpoint_gets_a_snapshot_that_others_do_not_push_out() -> None:
    driver = state_driver(num_spare_states=2, num_blocks=200, max_pinned_fraction=1.0)
    marks = (CacheBreakpoint(16, 60.0), CacheBreakpoint(32, 60.0, (16,)))
    answered(driver, "writer", DOCUMENT, breakpoints=marks)
    use = driver.first_events["writer"].cache_use
    assert use is not None
    assert use.written_tokens == (16, 16)
    for number in range(9):
        answered(driver, f"other{number}", tuple((number * 11 + index) % 50 for index in range(40)))
    reader = (*DOCUMENT[:32], 9, 9, 9, 9, 9, 9)
    assert answered(driver, "reader", reader, breakpoints=(CacheBreakpoint(32, 60.0),)) == 32
    use = driver.first_events["reader"].cache_use
    assert use is not None
    assert use.read_tokens == 32


def test_retained_snapshots_go_to_host_memory_when_requests_need_their_slots() -> None:
    driver = state_driver(
        num_spare_states=0, num_host_states=2, max_num_seqs=2, num_blocks=200, max_pinned_fraction=1.0
    )
    mark = (CacheBreakpoint(32, 60.0),)
    answered(driver, "writer", DOCUMENT, breakpoints=mark)
    for number in range(4):
        driver.add(make_request(f"other{number}", 40, 8))
    driver.run()
    assert answered(driver, "reader", (*DOCUMENT[:32], 9, 9, 9), breakpoints=mark) == 32
    assert driver.executor.num_states_restored == 1


def test_retained_snapshots_give_way_to_requests_and_count_as_lost() -> None:
    driver = state_driver(num_spare_states=0, max_num_seqs=1, num_blocks=200, max_pinned_fraction=1.0)
    mark = (CacheBreakpoint(32, 60.0),)
    answered(driver, "writer", DOCUMENT, breakpoints=mark)
    answered(driver, "other", (1, 2, 3))
    assert answered(driver, "reader", DOCUMENT, breakpoints=mark) == 0


def test_a_preempted_prompt_goes_on_from_the_block_where_it_stopped() -> None:
    driver = state_driver(max_num_batched_tokens=10, max_num_seqs=1)
    driver.add(make_request("long", DOCUMENT, 2, tier=Tier.BATCH))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", 4, 3))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 1
    begun = [c.start for plan in driver.plans for c in plan.chunks if c.request_id == "long" and c.begins]
    assert begun == [0, 16]


def test_snapshots_go_with_the_blocks_that_they_belong_to() -> None:
    driver = state_driver(num_blocks=12)
    answered(driver, "first", DOCUMENT)
    assert driver.cache.states is not None
    assert driver.cache.states.num_snapshots > 0
    answered(driver, "other", tuple(range(44)))
    assert answered(driver, "again", DOCUMENT) < 36


def test_a_request_whose_mask_was_late_starts_again_from_a_snapshot() -> None:
    driver = state_driver()
    driver.executor.faults = Faults(late_share=0.5)
    driver.add(make_request("late", DOCUMENT, 6, grammar=Grammar("json")))
    driver.run()
    starts = [chunk.start for plan in driver.plans for chunk in plan.chunks if chunk.begins]
    assert len(starts) > 1
    assert set(starts[1:]) == {36}


def test_a_chunk_that_was_not_computed_leaves_no_snapshot() -> None:
    driver = state_driver()
    driver.add(make_request("lost", DOCUMENT))
    driver.plan()
    driver.fail_latest_plan(0)
    driver.commit()
    assert answered(driver, "again", DOCUMENT) == 0


def test_slots_start_from_zeros_and_models_without_states_have_none() -> None:
    driver = state_driver()
    answered(driver, "first", (1, 2, 3))
    assert driver.plans[0].copies == (StateCopy(0),)
    assert driver.plans[0].chunks[0].state_slot == 0
    plain = Driver()
    answered(plain, "first", (1, 2, 3))
    assert plain.plans[0].copies == ()
    assert plain.plans[0].chunks[0].state_slot is None


def test_too_few_slots_and_drafts_are_refused() -> None:
    def build(**settings: object) -> Scheduler:
        config = SchedulerConfig(max_num_seqs=4, **settings)  # type: ignore[arg-type]
        cache = KVCache(8, states=StateSlots(3 if not config.max_draft_tokens else 4))
        return Scheduler(config, cache, max_model_len=100, eos_token_ids=frozenset())

    with pytest.raises(ValueError, match="3 state slots are too few for 4 requests"):
        build(max_draft_tokens=0)
    with pytest.raises(ValueError, match="drafts"):
        build(max_draft_tokens=2)
