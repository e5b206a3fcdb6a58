"""Preempted requests whose KV goes to host memory instead of being computed again."""

from __future__ import annotations

import pytest

from penstock.core.messages import EngineStats
from penstock.scheduler.preemption import swap_is_cheaper
from penstock.scheduler.step_builder import StepLoad, StepTimePredictor
from tests.scheduler.strict import Driver, make_request


def run_short_of_blocks(
    block_copy_s: float | None, num_host_blocks: int, depth: int = 1
) -> tuple[Driver, EngineStats]:
    """Two long answers in a cache for one and a half: one is preempted when both have grown."""
    driver = Driver(
        num_blocks=18, num_host_blocks=num_host_blocks, block_copy_s=block_copy_s, depth=depth, max_num_seqs=2
    )
    driver.expect_short_answers()
    driver.add(make_request("a", 8, 50))
    driver.add(make_request("b", 24, 30))
    driver.run()
    assert {name: len(answer) for name, answer in driver.answers.items() if name in "ab"} == {
        "a": 50,
        "b": 30,
    }
    return driver, driver.scheduler.stats()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_moves_there_and_back_is_not_computed_again(depth: int) -> None:
    recomputing, before = run_short_of_blocks(None, 20, depth)
    swapping, after = run_short_of_blocks(0.0, 20, depth)
    assert before.num_preemptions == after.num_preemptions > 0
    assert (before.num_swapped, before.num_blocks_from_host) == (0, 0)
    assert after.num_swapped > 0
    assert after.num_blocks_from_host > 0
    assert after.num_blocks_to_host >= after.num_blocks_from_host
    assert swapping.executor.num_tokens_computed < recomputing.executor.num_tokens_computed


def test_slow_copies_and_absent_memory_swap_nobody() -> None:
    for block_copy_s, num_host_blocks in ((1e3, 20), (0.0, 0)):
        _, stats = run_short_of_blocks(block_copy_s, num_host_blocks)
        assert stats.num_preemptions > 0
        assert (stats.num_swapped, stats.num_blocks_to_host) == (0, 0)


def test_the_rule_weighs_copies_against_a_learned_prefill() -> None:
    predictor = StepTimePredictor()
    load = StepLoad()
    load.add_prefill(0, 1600)
    for _ in range(200):
        predictor.observe(load, 0.5)
    compute_s = predictor.predict(load) - predictor.predict(StepLoad())
    even_s = compute_s / (2 * 100)
    assert swap_is_cheaper(100, 16, 0.9 * even_s, predictor)
    assert not swap_is_cheaper(100, 16, 1.1 * even_s, predictor)


def test_a_swapped_block_is_dropped_in_time() -> None:
    """Swapped blocks of a request that never comes back do not occupy host memory for ever."""
    driver, stats = run_short_of_blocks(0.0, 20)
    driver.now += 1000.0
    driver.cache.retention.expire(driver.now)
    assert stats.num_swapped > 0
    assert len(driver.cache.pool.host._pins) == 0, "the blocks that are left make room for any other"
