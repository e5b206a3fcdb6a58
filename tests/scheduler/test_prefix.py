"""Prefix reuse between requests that overlap in time."""

from __future__ import annotations

import pytest

from penstock.core.request import Tier
from tests.scheduler.strict import Driver, make_request

SHARED = tuple(index * 7 % 50 for index in range(100))


def cached(driver: Driver) -> dict[str, int | None]:
    return {request_id: event.num_cached_tokens for request_id, event in driver.first_events.items()}


def test_a_burst_of_siblings_in_one_step_computes_the_shared_prefix_once() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=2000)
    for index in range(16):
        driver.add(make_request(f"r{index}", (*SHARED, index, index), 2))
    driver.step()
    assert driver.plans[0].num_tokens == 102 + 15 * 2
    driver.run()
    assert sorted(cached(driver).values(), key=str) == sorted([0] + [100] * 15, key=str)
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16 * 102, 15 * 100)


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_wait_for_a_prefix_that_takes_several_steps(depth: int) -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=30, depth=depth)
    for index in range(6):
        driver.add(make_request(f"r{index}", (*SHARED, index, index), 2))
    driver.add(make_request("other", 10, 2))
    driver.run()
    assert driver.executor.num_tokens_computed == 102 + 5 * 2 + 10 + 7
    assert [cached(driver)[f"r{index}"] for index in range(6)] == [0] + [100] * 5


def test_a_held_sibling_does_not_hold_up_others() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=40)
    driver.add(make_request("leader", SHARED, 16))
    driver.add(make_request("sibling", (*SHARED, 1), 16))
    driver.step()
    driver.add(make_request("other", 10, 2))
    driver.step()
    assert [chunk.request_id for chunk in driver.plans[-1].chunks] == ["leader", "other"]
    driver.step()
    driver.step()
    assert [chunk.request_id for chunk in driver.plans[-1].chunks] == ["leader", "sibling"]
    driver.run()
    assert cached(driver)["sibling"] == 100


def test_a_request_is_held_only_once() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=40, max_model_len=400)
    for name in "abc":
        driver.add(make_request(name, (*SHARED, *SHARED, *name.encode()), 2))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().num_waiting == 2
    driver.abort("a")
    driver.step()
    assert [chunk.request_id for chunk in driver.plans[-1].chunks] == ["b"]
    driver.step()
    assert [chunk.request_id for chunk in driver.plans[-1].chunks] == ["b", "c"]
    driver.run()


def test_held_siblings_go_on_without_a_leader_that_leaves() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=20)
    for name in ("leader", "b", "c"):
        driver.add(make_request(name, (*SHARED, len(name)), 2))
    driver.step()
    assert driver.scheduler.stats().num_waiting == 2
    driver.abort("leader")
    driver.run()
    assert cached(driver) == {"b": 20, "c": 100}


def test_a_held_sibling_can_be_aborted() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=20)
    driver.add(make_request("leader", SHARED, 2))
    driver.add(make_request("sibling", SHARED, 2))
    driver.step()
    driver.abort("sibling")
    driver.run()
    assert list(driver.finished) == ["leader"]


def test_an_urgent_request_does_not_wait_for_a_less_urgent_leader() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=40)
    driver.add(make_request("leader", SHARED, 2, tier=Tier.BATCH))
    driver.step()
    driver.add(make_request("urgent", (*SHARED[:90], 1), 2, tier=Tier.PRIORITY))
    driver.run()
    assert cached(driver)["urgent"] == 40


def test_the_last_prompt_token_is_computed_even_if_everything_is_cached() -> None:
    driver = Driver()
    driver.add(make_request("a", SHARED[:16], 2))
    driver.run()
    driver.add(make_request("b", SHARED[:16], 2))
    driver.run()
    assert cached(driver)["b"] == 12
    driver.add(make_request("c", SHARED[:17], 2))
    driver.run()
    assert cached(driver)["c"] == 16


def test_blocks_of_answers_are_reused_by_the_next_turn() -> None:
    driver = Driver(depth=2)
    driver.add(make_request("a", SHARED[:6], 12))
    driver.run()
    driver.add(make_request("b", (*SHARED[:6], *driver.answers["a"], 3), 2))
    driver.run()
    assert cached(driver)["b"] == 16  # of 18 computed tokens, in blocks of 4


def test_tenants_share_nothing() -> None:
    driver = Driver()
    driver.add(make_request("a", SHARED[:20], 2, tenant="a"))
    driver.run()
    driver.add(make_request("b", SHARED[:20], 2, tenant="b"))
    driver.run()
    assert cached(driver) == {"a": 0, "b": 0}


def test_without_prefix_caching_nothing_is_looked_up_or_held() -> None:
    driver = Driver(num_blocks=400, max_num_batched_tokens=30, prefix_caching=False)
    for index in range(3):
        driver.add(make_request(f"r{index}", SHARED, 2))
    driver.run()
    assert driver.executor.num_tokens_computed == 3 * 100 + 3
