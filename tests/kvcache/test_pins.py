from __future__ import annotations

import pytest

from penstock.kvcache import KVCache
from tests.kvcache.chains import compute, hashes, matched, remember


def test_a_pinned_prefix_survives_pressure_until_it_expires() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    assert cache.retention.retain(hashes("ab"), until=10.0, now=0.0) == 2
    assert (cache.pool.num_pinned, cache.num_available) == (2, 2)
    assert cache.pool.allocate(3) is None
    assert cache.retention.expire(now=9.9) == 0
    assert cache.retention.expire(now=10.0) == 2
    assert (cache.pool.num_pinned, cache.num_available) == (0, 4)
    assert len(cache.pool.allocate(4) or []) == 4


def test_pins_are_extended_and_never_shortened() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    cache.retention.retain(hashes("ab"), until=10.0, now=0.0)
    assert cache.retention.retain(hashes("a"), until=20.0, now=1.0) == 1
    assert cache.retention.retain(hashes("ab"), until=5.0, now=2.0) == 2
    assert cache.retention.expire(now=9.0) == 0
    assert cache.retention.expire(now=10.0) == 1
    assert cache.pool.num_pinned == 1
    assert cache.retention.expire(now=20.0) == 1


def test_only_the_part_that_is_indexed_gets_pinned() -> None:
    cache = KVCache(8)
    remember(cache, "ab")
    assert cache.retention.retain(hashes("abcd"), until=10.0, now=0.0) == 2
    assert cache.retention.retain(hashes("xy"), until=10.0, now=0.0) == 0


def test_a_pin_in_the_past_pins_nothing() -> None:
    cache = KVCache(4)
    remember(cache, "a")
    assert cache.retention.retain(hashes("a"), until=5.0, now=5.0) == 0
    assert cache.pool.num_cached == 1


def test_pinning_lets_overdue_pins_go_first() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    remember(cache, "xy")
    cache.retention.retain(hashes("ab"), until=10.0, now=0.0)
    assert cache.retention.retain(hashes("xy"), until=20.0, now=10.0) == 2
    assert cache.retention.pins_given_up == 0
    assert cache.pool.num_pinned == 2


def test_a_pin_on_an_active_block_takes_effect_on_release() -> None:
    cache = KVCache(4)
    table = compute(cache, "ab")
    assert cache.retention.retain(hashes("ab"), until=10.0, now=0.0) == 2
    assert (cache.pool.num_active, cache.pool.num_pinned) == (2, 0)
    cache.pool.release(table)
    assert (cache.pool.num_active, cache.pool.num_pinned, cache.pool.num_cached) == (0, 2, 0)
    again = cache.pool.acquire(hashes("ab"))
    assert (again, cache.pool.num_pinned) == (table, 0)
    cache.retention.expire(now=10.0)
    cache.pool.release(again)
    assert cache.pool.num_cached == 2


def test_past_the_limit_the_pins_with_least_time_left_are_given_up_tails_first() -> None:
    cache = KVCache(8, max_pinned_fraction=0.5)
    remember(cache, "abc")
    remember(cache, "xyz")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    assert cache.retention.retain(hashes("xyz"), until=20.0, now=0.0) == 3
    assert cache.retention.pins_given_up == 2
    assert cache.pool.num_pinned == 4
    assert len(cache.pool.allocate(4) or []) == 4
    assert (matched(cache, "abc"), matched(cache, "xyz")) == ("a", "xyz")
    cache.check_integrity()


def test_a_pin_that_does_not_fit_at_all_is_cut_to_its_head() -> None:
    cache = KVCache(4, max_pinned_fraction=0.5)
    remember(cache, "abcd")
    assert cache.retention.retain(hashes("abcd"), until=10.0, now=0.0) == 2
    assert cache.pool.allocate(2) is not None
    assert matched(cache, "abcd") == "ab"


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (1.0, 4)])
def test_the_limit_is_a_share_of_all_blocks(fraction: float, expected: int) -> None:
    cache = KVCache(4, max_pinned_fraction=fraction)
    remember(cache, "abcd")
    assert cache.retention.retain(hashes("abcd"), until=10.0, now=0.0) == expected


def test_an_expired_pin_is_as_old_as_its_last_use() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    cache.retention.retain(hashes("ab"), until=10.0, now=0.0)
    remember(cache, "xy")
    cache.retention.expire(now=10.0)
    assert cache.pool.allocate(2) is not None
    assert (matched(cache, "ab"), matched(cache, "xy")) == ("", "xy")


def test_old_expiries_do_not_pile_up() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    for until in range(1, 1000):
        cache.retention.retain(hashes("ab"), until=float(until), now=0.0)
    assert len(cache.pool.pins._expiries) <= 2 * 4 + 64 + 1
    assert cache.retention.expire(now=998.0) == 0
    assert cache.retention.expire(now=999.0) == 2
