"""Prompt caching at breakpoints: what is read, written, kept and for how long, on a virtual clock."""

from __future__ import annotations

import msgspec
import pytest

from penstock.core.plan import CacheUse
from penstock.core.request import CacheBreakpoint
from tests.scheduler.strict import Driver, make_request

PROMPT = tuple(index * 7 % 50 for index in range(200))
FIVE_MINUTES, ONE_HOUR = 300.0, 3600.0


def ask(
    driver: Driver,
    request_id: str,
    prompt: tuple[int, ...],
    *positions: int,
    ttl_s: float = FIVE_MINUTES,
    earlier: tuple[int, ...] = (),
    tenant: str = "",
    min_tokens: int | None = None,
) -> CacheUse:
    """Serve one request to its end; what its breakpoints did."""
    breakpoints = tuple(CacheBreakpoint(position, ttl_s, earlier) for position in positions)
    request = make_request(request_id, prompt, 2, tenant=tenant, breakpoints=breakpoints)
    driver.add(msgspec.structs.replace(request, min_cacheable_tokens=min_tokens))
    driver.run()
    use = driver.first_events[request_id].cache_use
    assert use is not None
    return use


def flood(driver: Driver, name: str = "flood") -> None:
    """Serve others until nothing that is evictable has survived."""
    for number in range(6):
        driver.add(make_request(f"{name} {number}", driver.cache.num_blocks * 2 - 8, 2))
        driver.run()


def test_the_first_request_writes_and_the_second_reads() -> None:
    driver = Driver()
    assert ask(driver, "a", PROMPT[:60], 42) == CacheUse(0, (40,)), "cut to whole blocks of 4"
    assert ask(driver, "b", (*PROMPT[:42], 9, 9, 9), 42) == CacheUse(40, (0,))
    assert driver.first_events["b"].num_cached_tokens == 40
    stats = driver.scheduler.stats()
    assert (stats.cache_read_tokens, stats.cache_write_tokens) == (40, 40)


def test_a_prefix_that_is_cached_by_chance_is_no_read() -> None:
    driver = Driver()
    driver.add(make_request("a", PROMPT[:60], 2))
    driver.run()
    assert ask(driver, "b", PROMPT[:60], 42) == CacheUse(0, (40,))
    assert driver.first_events["b"].num_cached_tokens == 56
    assert ask(driver, "c", PROMPT[:61], 42) == CacheUse(40, (0,))
    assert driver.first_events["c"].num_cached_tokens == 60, "of which 40 were kept by a breakpoint"


def test_requests_without_breakpoints_say_nothing_about_them() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:60], 40)
    driver.add(make_request("b", PROMPT[:60], 2))
    driver.run()
    assert driver.first_events["b"].cache_use is None
    assert driver.first_events["b"].num_cached_tokens == 56


def test_each_breakpoint_counts_what_it_adds() -> None:
    driver = Driver()
    assert ask(driver, "a", PROMPT[:100], 20, 41, 80) == CacheUse(0, (20, 20, 40))
    assert ask(driver, "b", (*PROMPT[:60], *range(30)), 20, 41, 80) == CacheUse(40, (0, 0, 40))


def test_entries_end_at_breakpoints_only() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:100], 80)
    assert ask(driver, "b", PROMPT[:100], 60) == CacheUse(0, (60,)), "no entry ends there"
    assert ask(driver, "c", PROMPT[:100], 60) == CacheUse(60, (0,))


def test_a_read_goes_back_to_the_longest_earlier_entry() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:100], 40)
    ask(driver, "b", PROMPT[:100], 60)
    longer = (*PROMPT[:100], 1, 2, 3, 4)
    assert ask(driver, "c", longer, 102, earlier=(20, 40, 60, 90)) == CacheUse(60, (40,))
    assert ask(driver, "d", longer, 102, earlier=(20,)) == CacheUse(100, (0,))


def test_a_prefix_under_the_minimum_is_silently_not_kept() -> None:
    driver = Driver(min_cacheable_tokens=50)
    assert ask(driver, "a", PROMPT[:100], 49, 50) == CacheUse(0, (0, 48))
    assert ask(driver, "b", PROMPT[:100], 49, 50) == CacheUse(48, (0, 0))
    assert ask(driver, "c", PROMPT[:100], 49) == CacheUse(0, (0,))
    assert ask(driver, "d", PROMPT[:100], 80, earlier=(49,)) == CacheUse(0, (80,))


def test_a_request_may_bring_another_minimum() -> None:
    driver = Driver(min_cacheable_tokens=50)
    assert ask(driver, "a", PROMPT[:100], 20, 40, min_tokens=30) == CacheUse(0, (0, 40))
    assert ask(driver, "b", PROMPT[:100], 40, min_tokens=60) == CacheUse(0, (0,))
    assert ask(driver, "c", PROMPT[:100], 40, min_tokens=30) == CacheUse(40, (0,))


def test_a_changed_beginning_invalidates_everything_after_it() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:100], 20, 40, 80)
    changed_second = (*PROMPT[:30], 49, *PROMPT[31:100])
    assert ask(driver, "b", changed_second, 20, 40, 80) == CacheUse(20, (0, 20, 40))
    assert ask(driver, "c", (49, *PROMPT[1:100]), 20, 40, 80) == CacheUse(0, (20, 20, 40))


def test_tenants_cannot_read_each_other() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:60], 40, tenant="a")
    assert ask(driver, "b", PROMPT[:60], 40, tenant="b") == CacheUse(0, (40,))


def test_prefixes_with_another_salt_are_not_read() -> None:
    driver = Driver()
    for request_id, salt, read in (("a", "tools 1", 0), ("b", "tools 2", 0), ("c", "tools 1", 40)):
        request = make_request(request_id, PROMPT[:60], 2, breakpoints=(CacheBreakpoint(42, FIVE_MINUTES),))
        driver.add(msgspec.structs.replace(request, cache_salt=salt))
        driver.run()
        use = driver.first_events[request_id].cache_use
        assert use is not None
        assert use.read_tokens == read


def test_a_breakpoint_at_the_very_end_is_read_but_for_the_last_block() -> None:
    driver = Driver()
    assert ask(driver, "a", PROMPT[:40], 40) == CacheUse(0, (40,))
    assert ask(driver, "b", PROMPT[:40], 40) == CacheUse(36, (0,)), "the last token is always computed"


@pytest.mark.parametrize("ttl_s", [FIVE_MINUTES, ONE_HOUR])
def test_an_entry_ends_on_time(ttl_s: float) -> None:
    driver = Driver()
    start = driver.now
    ask(driver, "a", PROMPT[:60], 40, ttl_s=ttl_s)
    driver.now = start + ttl_s
    assert ask(driver, "late", PROMPT[:60], 40, ttl_s=ttl_s) == CacheUse(0, (40,))
    assert driver.first_events["late"].num_cached_tokens == 56, "the blocks were still there by chance"
    driver = Driver()
    ask(driver, "a", PROMPT[:60], 40, ttl_s=ttl_s)
    driver.now = start + ttl_s - 0.001
    assert ask(driver, "in time", PROMPT[:60], 40, ttl_s=ttl_s).read_tokens == 40


def test_each_read_prolongs_an_entry_by_its_own_time_to_live() -> None:
    driver = Driver()
    ask(driver, "write", PROMPT[:60], 40, ttl_s=ONE_HOUR)
    for number in range(1, 4):
        driver.now = number * 3000.0
        assert ask(driver, f"read {number}", PROMPT[:60], 40).read_tokens == 40
    driver.now = 9000.0 + ONE_HOUR
    assert ask(driver, "too late", PROMPT[:60], 40).read_tokens == 0


def test_an_earlier_entry_is_prolonged_too() -> None:
    driver = Driver()
    ask(driver, "a", PROMPT[:60], 40)
    driver.now = 200.0
    ask(driver, "b", PROMPT[:100], 80, earlier=(40,))
    driver.now = 499.0
    assert ask(driver, "c", (*PROMPT[:60], 0, 0, 0, 0), 40).read_tokens == 40


def test_a_request_that_arrives_in_time_reads_however_long_it_waits() -> None:
    driver = Driver(max_num_seqs=1)
    ask(driver, "a", PROMPT[:60], 40)
    driver.add(make_request("long", 10, 50))
    driver.step()
    driver.now = 299.0
    driver.add(
        make_request("waits", PROMPT[:60], 2, breakpoints=(CacheBreakpoint(40, FIVE_MINUTES),)),
    )
    driver.now = 400.0
    driver.run()
    use = driver.first_events["waits"].cache_use
    assert use is not None
    assert use.read_tokens == 40


def test_an_entry_survives_memory_pressure_until_its_time() -> None:
    driver = Driver(num_blocks=64)
    ask(driver, "a", PROMPT[:100], 100)
    flood(driver)
    assert ask(driver, "b", PROMPT[:110], 100) == CacheUse(100, (0,))
    driver.now += FIVE_MINUTES
    flood(driver, "again")
    assert ask(driver, "c", PROMPT[:110], 100) == CacheUse(0, (100,))
    assert driver.first_events["c"].num_cached_tokens == 0


def test_an_entry_can_be_read_while_its_writer_is_still_answering() -> None:
    driver = Driver()
    mark = (CacheBreakpoint(40, FIVE_MINUTES),)
    driver.add(make_request("writer", PROMPT[:60], 30, breakpoints=mark))
    driver.step()
    assert driver.first_events["writer"].cache_use == CacheUse(0, (40,))
    driver.add(make_request("reader", (*PROMPT[:50], 9), 2, breakpoints=mark))
    driver.step()
    assert driver.first_events["reader"].cache_use == CacheUse(40, (0,))
    driver.run()


def test_past_the_bound_the_oldest_pins_go_to_host_memory_and_come_back() -> None:
    driver = Driver(num_blocks=64, max_pinned_fraction=0.5, num_host_blocks=40)
    first, second = PROMPT[:100], tuple(reversed(PROMPT))[:100]
    ask(driver, "first", first, 100)
    driver.now += 1.0
    ask(driver, "second", second, 100)
    assert driver.scheduler.stats().num_pins_demoted == 2 * 25 - 32
    flood(driver)
    assert driver.scheduler.stats().num_host_blocks_used == 18
    assert ask(driver, "second again", second, 100).read_tokens == 96
    assert ask(driver, "first again", (*first, 1), 100) == CacheUse(100, (0,))
    stats = driver.scheduler.stats()
    assert stats.num_blocks_from_host >= 18
    assert stats.num_kept_blocks_lost == 0


def test_without_room_in_either_tier_usage_says_what_is_left() -> None:
    driver = Driver(num_blocks=64, max_pinned_fraction=0.25)
    assert ask(driver, "a", PROMPT[:100], 100) == CacheUse(0, (64,)), "16 of 64 blocks may be pinned"
    flood(driver)
    assert ask(driver, "b", PROMPT[:110], 100).read_tokens == 0
    assert driver.first_events["b"].num_cached_tokens == 64
    assert driver.scheduler.stats().num_kept_blocks_lost > 0


def test_host_memory_is_given_back_on_time() -> None:
    driver = Driver(num_blocks=64, max_pinned_fraction=0.0, num_host_blocks=40)
    ask(driver, "a", PROMPT[:100], 100)
    flood(driver)
    assert driver.scheduler.stats().num_host_blocks_used == 25
    driver.now = FIVE_MINUTES
    driver.add(make_request("other", 4, 1))
    driver.run()
    assert driver.scheduler.stats().num_host_blocks_used == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    driver = Driver(prefix_caching=False)
    for request_id in "ab":
        assert ask(driver, request_id, PROMPT[:60], 40) == CacheUse(0, (0,))


def test_a_preempted_request_keeps_its_breakpoints() -> None:
    driver = Driver(num_blocks=40, depth=2)
    driver.expect_short_answers()
    for number in range(4):
        prompt = (*PROMPT[number : number + 28], number)
        driver.add(make_request(f"r{number}", prompt, 40, breakpoints=(CacheBreakpoint(28, FIVE_MINUTES),)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions > 0
    for number in range(4):
        use = driver.first_events[f"r{number}"].cache_use
        assert use is not None
        assert use.read_tokens + sum(use.written_tokens) <= 28
