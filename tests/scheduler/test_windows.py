"""Models whose layers have windows: what requests can start from, and what they give back. The strict executor checks
in every step that all tokens in sight are where the tables say."""

from __future__ import annotations

import pytest

from penstock.core.plan import WindowGroup
from penstock.core.request import CacheBreakpoint, Grammar, Tier
from tests.scheduler.strict import Driver, Faults, make_request
from tests.scheduler.test_states import answered

DOCUMENT = tuple(index * 7 % 50 for index in range(40))  # ten blocks
WINDOW = WindowGroup(8, 2)  # two whole blocks are in sight


def window_driver(**settings: object) -> Driver:
    return Driver(**{"windows": (WINDOW,), "max_num_seqs": 3, **settings})  # type: ignore[arg-type]


def in_use(driver: Driver) -> int:
    return driver.cache.stats().num_kv_blocks_used


def test_a_long_request_has_no_more_window_blocks_than_it_sees() -> None:
    driver = window_driver(max_num_batched_tokens=4, num_blocks=60, max_model_len=200)
    driver.add(make_request("long", 120, 60))
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, in_use(driver) - 30)
    assert 45 - 30 <= most <= 45 - 30 + 2 * 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_window_blocks", [None, 40], ids=["shared memory", "own memory"])
def test_a_prefix_is_reused_where_its_window_is_there(depth: int, num_window_blocks: int | None) -> None:
    driver = window_driver(depth=depth, num_window_blocks=num_window_blocks)
    assert answered(driver, "first", DOCUMENT) == 0
    assert answered(driver, "again", DOCUMENT) == 36
    assert answered(driver, "longer", (*DOCUMENT, *range(6))) == 40
    assert answered(driver, "middle", (*DOCUMENT[:20], *range(30, 40))) == 20, (
        "there is memory for all windows"
    )


def test_blocks_behind_a_window_go_before_any_other_prefix() -> None:
    driver = window_driver(num_blocks=48, max_num_batched_tokens=8)
    assert answered(driver, "first", DOCUMENT[:20]) == 0  # 5 blocks and 2 × 3 of windows
    assert answered(driver, "other", tuple(range(40))) == 0  # 10 blocks and 2 × 10, of which most are spent
    assert answered(driver, "third", tuple(range(7, 31))) == 0
    assert answered(driver, "again", DOCUMENT[:20]) == 16
    assert answered(driver, "middle", (*range(20), 49, 49, 49)) == 0, "its window was given away"
    assert answered(driver, "middle again", (*range(20), 48, 48, 48)) == 20, "and is kept from now on"


def test_a_burst_of_siblings_computes_its_common_prefix_once() -> None:
    driver = window_driver(max_num_batched_tokens=16, max_num_seqs=4, num_blocks=120)
    for number in range(4):
        driver.add(make_request(f"r{number}", (*DOCUMENT, number, number + 1)))
    driver.run()
    cached = [driver.first_events[f"r{number}"].num_cached_tokens for number in range(4)]
    assert cached == [0, 40, 40, 40]


def test_windows_of_retained_prefixes_stay_until_their_time_is_over() -> None:
    driver = window_driver(num_blocks=60, max_pinned_fraction=0.6)
    marks = (CacheBreakpoint(16, 60.0), CacheBreakpoint(32, 60.0, (16,)))
    answered(driver, "writer", DOCUMENT, breakpoints=marks)
    for number in range(9):
        answered(driver, f"other{number}", tuple((number * 11 + index) % 50 for index in range(40)))
    reader = (*DOCUMENT[:32], 9, 9, 9, 9, 9, 9)
    assert answered(driver, "reader", reader, breakpoints=(CacheBreakpoint(32, 60.0),)) == 32
    assert answered(driver, "short", (*DOCUMENT[:16], 9, 9), breakpoints=(CacheBreakpoint(16, 60.0),)) == 16
    driver.now += 100.0
    answered(driver, "later", (3, 2, 1))
    assert in_use(driver) == 0, "no pin is left"


def test_rejected_drafts_and_late_masks_find_their_window_again() -> None:
    driver = window_driver(max_draft_tokens=12, draft_share=1.0, spoiled_share=0.7, num_blocks=200)
    driver.executor.faults = Faults(late_share=0.3)
    driver.add(make_request("drafted", DOCUMENT, 80))
    driver.add(make_request("late", 30, 30, grammar=Grammar("json")))
    driver.run()


def test_a_preempted_request_goes_on_from_its_window() -> None:
    driver = window_driver(max_num_batched_tokens=12, max_num_seqs=1)
    driver.add(make_request("long", DOCUMENT, 2, tier=Tier.BATCH))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", 4, 3))
    driver.run()
    begun = [c.start for plan in driver.plans for c in plan.chunks if c.request_id == "long" and c.begins]
    assert begun == [0, 24]


def test_a_chunk_that_was_not_computed_leaves_no_window() -> None:
    driver = window_driver()
    driver.add(make_request("lost", DOCUMENT))
    driver.plan()
    driver.fail_latest_plan(0)
    driver.commit()
    assert answered(driver, "again", DOCUMENT) == 0


def test_requests_that_share_windows_with_a_failed_chunk_end_with_it() -> None:
    """The windows may be shared though the blocks are not: their first owner has published other blocks."""
    driver = window_driver(num_blocks=120, max_num_batched_tokens=100)
    driver.add(make_request("first", (*DOCUMENT, 1)))
    driver.add(make_request("second", (*DOCUMENT, 2)))
    driver.plan()
    driver.fail_latest_plan(0)
    driver.commit()
    driver.run()
    assert {driver.finished[name].error for name in ("first", "second")} == {"no memory"}


def test_memory_follows_the_windows_and_not_the_context() -> None:
    """Gemma 3 27B: 10 layers see everything, and 52 the newest 1,024 tokens, in blocks of 10 layers."""
    driver = Driver(
        windows=(WindowGroup(1024, 6),),
        block_size=16,
        num_blocks=2048 + 6 * 80,
        max_model_len=32_768,
        max_num_batched_tokens=256,
    )
    assert driver.cache.longest_context() >= 32_768
    whole = Driver(block_size=16, num_blocks=2048 * 7, max_model_len=32_768)
    assert whole.cache.num_blocks / driver.cache.num_blocks > 5
