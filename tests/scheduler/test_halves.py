"""Two requests in one block: what that saves, and that nobody notices."""

from __future__ import annotations

import pytest

from penstock.core.plan import HalfCopy, StepPlan
from penstock.core.request import FinishReason, Tier
from tests.scheduler.strict import Driver, make_request

BLOCK = 16


def make_driver(**settings: object) -> Driver:
    return Driver(**{"block_size": BLOCK, "halves_blocks": True, **settings})  # type: ignore[arg-type]


def halves_copied(plans: list[StepPlan]) -> int:
    return sum(isinstance(copy, HalfCopy) for plan in plans for copy in plan.copies)


def test_short_tails_share_a_block() -> None:
    driver = make_driver()
    for name in ("a", "b", "c"):
        driver.add(make_request(name, BLOCK + 3, 40))
    driver.step()
    assert driver.cache.pool.num_active == 3 + 2
    slots = 3 * (BLOCK + BLOCK // 2)
    assert driver.scheduler.stats().kv_fragmentation == pytest.approx(1 - 3 * (BLOCK + 3) / slots)
    driver.run()
    assert driver.executor.num_halves_copied > 0


def test_a_long_tail_takes_a_whole_block() -> None:
    driver = make_driver()
    driver.add(make_request("a", BLOCK + 9, 3))
    driver.add(make_request("b", BLOCK, 3))
    driver.step()
    assert driver.cache.pool.num_active == 3
    driver.run()
    assert driver.executor.num_halves_copied == 0


def test_neighbours_that_grow_together_need_one_copy() -> None:
    driver = make_driver()
    driver.add(make_request("a", 5, 8))
    driver.add(make_request("b", 5, 8))
    driver.run()
    assert driver.executor.num_halves_copied == 1


def test_nothing_is_copied_for_a_request_alone() -> None:
    driver = make_driver()
    driver.add(make_request("a", 5, 60))
    driver.run()
    assert halves_copied(driver.plans) == 0


def test_one_request_may_fill_the_cache_to_its_last_slot() -> None:
    driver = make_driver(num_blocks=4)
    driver.add(make_request("a", 5, 100))
    driver.run()
    assert len(driver.answers["a"]) == 4 * BLOCK - 5
    assert driver.scheduler.stats().num_preemptions == 0


def test_the_same_cache_serves_the_same_load_in_fewer_steps() -> None:
    def num_steps(*, halves_blocks: bool) -> int:
        driver = make_driver(num_blocks=16, halves_blocks=halves_blocks)
        for index in range(12):
            driver.add(make_request(f"r{index}", 3 + index % 5, 10 + 3 * index % 29))
        driver.run()
        return len(driver.plans)

    assert num_steps(halves_blocks=True) < num_steps(halves_blocks=False)


@pytest.mark.parametrize("num_blocks", [8, 12, 16])
def test_who_must_leave_a_half_may_cost_another_its_place(num_blocks: int) -> None:
    driver = make_driver(num_blocks=num_blocks, block_size=4)
    driver.expect_short_answers()
    for index in range(8):
        driver.add(make_request(f"r{index}", 3 + index % 5, 10 + 3 * index % 29))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert driver.executor.num_halves_copied > 0
    assert all(event.finish_reason is FinishReason.LENGTH for event in driver.finished.values())


def test_a_failed_prompt_does_not_fail_its_neighbour() -> None:
    driver = make_driver()
    driver.add(make_request("a", 5, 30))
    driver.step()
    driver.add(make_request("b", 5, 30))
    plan = driver.step()
    assert plan is not None
    chunk = next(chunk for chunk in plan.chunks if chunk.request_id == "b")
    assert chunk.tail_offset == BLOCK // 2
    driver.scheduler.fail(chunk, "no memory", driver.now)
    driver.run()
    assert driver.finished["b"].finish_reason is FinishReason.ERROR
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ends_and_aborts_leave_no_half_behind(depth: int) -> None:
    driver = make_driver(
        num_blocks=12, block_size=4, depth=depth, max_num_seqs=7, max_num_batched_tokens=32, aging_s=0.5
    )
    driver.expect_short_answers()
    for index in range(40):
        tier = list(Tier)[index % 3]
        driver.add(make_request(f"r{index}", 3 + index % 23, 4 + index % 31, tier=tier))
        driver.step()
        if index % 5 == 4:
            driver.abort(f"r{index - 2}")
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    assert driver.executor.num_halves_copied > 10
    assert driver.cache.num_available == 12
