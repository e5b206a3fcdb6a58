from __future__ import annotations

import pytest

from penstock.core.plan import BlockCopy
from penstock.kvcache import KVCache
from tests.kvcache.chains import Mirror, compute, hashes, in_host_memory, matched, remember


def unpinnable(num_blocks: int, num_host_blocks: int) -> KVCache:
    """Every pin is given up at once, so that promised blocks are evicted like any other."""
    return KVCache(num_blocks, max_pinned_fraction=0.0, num_host_blocks=num_host_blocks)


def evict_all(cache: KVCache) -> None:
    taken = cache.pool.allocate(cache.num_available)
    assert taken is not None
    cache.pool.release(taken)


def test_a_promised_block_goes_to_host_memory_and_comes_back() -> None:
    cache = unpinnable(4, 4)
    table = compute(cache, "abc")
    assert cache.retention.retain(hashes("abc"), until=10.0, now=0.0) == 3
    cache.pool.release(table)
    evict_all(cache)
    assert cache.take_copies() == (
        BlockCopy(table[2], 0, True),
        BlockCopy(table[1], 1, True),
        BlockCopy(table[0], 2, True),
    )
    assert matched(cache, "abc") == "abc"
    assert in_host_memory(cache, hashes("abc")) == hashes("abc")
    restored = cache.pool.restore(hashes("abc"))
    assert cache.take_copies() == tuple(
        BlockCopy(block, slot, False) for block, slot in zip(restored, (2, 1, 0), strict=True)
    )
    assert len(cache.pool.host) == 0
    cache.pool.check_integrity([restored])


def test_what_nobody_was_promised_is_simply_dropped() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "abc")
    evict_all(cache)
    assert matched(cache, "abc") == ""
    assert cache.take_copies() == ()


def test_host_memory_lets_go_when_the_time_is_over() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "abc")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    evict_all(cache)
    cache.retention.expire(9.9)
    assert matched(cache, "abc") == "abc"
    cache.retention.expire(10.0)
    assert matched(cache, "abc") == ""
    assert cache.retention.num_lost == 0


def test_a_promise_that_is_over_does_not_go_to_host_memory() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "abc")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    cache.retention.expire(10.0)
    evict_all(cache)
    assert len(cache.pool.host) == 0
    assert cache.retention.num_lost == 0


def test_a_promise_in_host_memory_can_be_prolonged() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "abc")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    evict_all(cache)
    assert cache.retention.retain(hashes("ab"), until=20.0, now=5.0) == 2
    cache.retention.expire(19.0)
    assert matched(cache, "abc") == "ab"


def test_when_all_slots_are_taken_the_promise_with_least_time_left_is_broken_tail_first() -> None:
    cache = unpinnable(4, 3)
    for names, until in (("abc", 10.0), ("xy", 20.0)):
        remember(cache, names)
        cache.retention.retain(hashes(names), until=until, now=0.0)
        evict_all(cache)
    assert (matched(cache, "abc"), matched(cache, "xy")) == ("a", "xy")
    assert cache.retention.num_lost == 2
    remember(cache, "pq")
    cache.retention.retain(hashes("pq"), until=5.0, now=0.0)
    evict_all(cache)
    assert (matched(cache, "a"), matched(cache, "pq")) == ("a", "")
    cache.pool.check_integrity([])


def test_restoring_may_send_others_out_in_the_same_breath() -> None:
    cache = unpinnable(2, 2)
    for names in ("ab", "xy"):
        remember(cache, names)
        cache.retention.retain(hashes(names), until=10.0, now=0.0)
    assert in_host_memory(cache, hashes("ab")) == hashes("ab")
    cache.take_copies()
    table = cache.pool.restore(hashes("ab"))
    assert [copy.to_host for copy in cache.take_copies()] == [False, False]
    assert cache.retention.num_lost == 2, "all slots held what was on its way back"
    cache.pool.check_integrity([table])


def test_computing_again_what_is_in_host_memory_drops_the_older_copy() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "a")
    cache.retention.retain_entry(hashes("a"), ttl_s=10.0, since=0.0, now=0.0)
    evict_all(cache)
    (block_id,) = cache.pool.allocate(1) or []
    cache.publish(block_id, hashes("a")[0], parent=b"root")
    assert len(cache.pool.host) == 0
    assert cache.retention.entry_ttl_s(hashes("a")[0], now=5.0) == 10.0, "the promise moved with it"
    cache.pool.check_integrity([[block_id]])


def test_moving_between_tiers_is_no_news_for_readers_of_events() -> None:
    cache = unpinnable(4, 4)
    mirror = Mirror()
    remember(cache, "abc")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    mirror.apply(cache.take_events())
    evict_all(cache)
    cache.pool.release(cache.pool.restore(hashes("abc")))
    assert cache.take_events() == []
    evict_all(cache)
    cache.retention.expire(10.0)
    mirror.apply(cache.take_events())
    assert mirror.hashes == set()


@pytest.mark.parametrize("ttls_s", [(10.0, 60.0), (60.0, 10.0)])
def test_an_entry_ends_where_it_was_kept_and_lasts_as_long_as_its_longest_time(
    ttls_s: tuple[float, float],
) -> None:
    cache = KVCache(8)
    remember(cache, "abc")
    for ttl_s in ttls_s:
        assert cache.retention.retain_entry(hashes("ab"), ttl_s, since=0.0, now=0.0) == 2
    assert cache.retention.entry_ttl_s(hashes("ab")[1], now=59.0) == 60.0
    assert cache.retention.entry_ttl_s(hashes("ab")[0], now=59.0) is None
    assert cache.retention.entry_ttl_s(hashes("abc")[2], now=59.0) is None
    assert cache.retention.entry_ttl_s(hashes("ab")[1], now=60.0) is None


def test_a_forgotten_entry_is_not_revived_by_a_longer_one() -> None:
    cache = KVCache(8, max_pinned_fraction=0.0)
    remember(cache, "abc")
    cache.retention.retain_entry(hashes("a"), ttl_s=10.0, since=0.0, now=0.0)
    cache.retention.retain_entry(hashes("abc"), ttl_s=10.0, since=20.0, now=20.0)
    assert cache.retention.entry_ttl_s(hashes("a")[0], now=21.0) is None
    assert cache.retention.entry_ttl_s(hashes("abc")[2], now=21.0) == 10.0


def test_clear_empties_both_tiers() -> None:
    cache = unpinnable(4, 4)
    remember(cache, "abc")
    cache.retention.retain(hashes("abc"), until=10.0, now=0.0)
    evict_all(cache)
    cache.pool.clear()
    assert matched(cache, "abc") == ""
    assert len(cache.pool.host) == 0
    cache.pool.check_integrity([])


def test_pins_yield_only_as_far_as_needed() -> None:
    cache = KVCache(8, max_pinned_fraction=1.0)
    remember(cache, "abcdef")
    cache.retention.retain(hashes("abcdef"), until=10.0, now=0.0)
    assert cache.num_available == 2
    cache.retention.give_way(4)
    assert (cache.num_available, cache.pool.num_pinned, cache.retention.pins_given_up) == (4, 4, 2)
    cache.retention.give_way(3)
    assert cache.retention.pins_given_up == 2


def test_a_promise_alone_pins_nothing_and_shortens_nothing() -> None:
    cache = KVCache(4, num_host_blocks=4)
    remember(cache, "abc")
    cache.retention.retain(hashes("a"), until=50.0, now=0.0)
    cache.retention.swap_out(hashes("abc"), until=10.0, now=0.0)
    assert (cache.retention.num_pins, cache.num_available) == (1, 3)
    evict_all(cache)
    assert in_host_memory(cache, hashes("abc")) == hashes("abc")[1:]
    cache.retention.swap_out(hashes("abc"), until=20.0, now=5.0)
    cache.retention.expire(15.0)
    assert matched(cache, "abc") == "abc"
    cache.retention.expire(20.0)
    assert matched(cache, "abc") == "a"
    cache.pool.check_integrity([])


def test_only_what_somebody_asked_to_keep_can_be_lost() -> None:
    """What a preempted request left is no loss to a user, until one asks for it to be kept."""
    cache = unpinnable(4, 2)
    remember(cache, "abc")
    cache.retention.swap_out(hashes("abc"), until=10.0, now=0.0)
    evict_all(cache)
    assert (matched(cache, "abc"), cache.retention.num_lost) == ("ab", 0)
    cache.retention.retain(hashes("a"), until=5.0, now=0.0)
    remember(cache, "xy")
    cache.retention.swap_out(hashes("xy"), until=20.0, now=0.0)
    evict_all(cache)
    assert (matched(cache, "ab"), cache.retention.num_lost) == ("", 1)
    cache.pool.check_integrity([])


def test_withdrawn_blocks_are_found_by_nobody() -> None:
    cache = KVCache(6, num_host_blocks=2)
    remember(cache, "ab")
    table = compute(cache, "abcd")
    cache.retention.retain(hashes("abcd"), until=10.0, now=0.0)
    cache.withdraw(table[2:])
    assert matched(cache, "abcd") == "ab"
    assert cache.retention.num_pins == 2
    cache.pool.check_integrity([table])
    cache.pool.release(table)
    assert cache.pool.num_free == 4
    cache.pool.check_integrity([])


def spill(cache: KVCache, letters: str) -> None:
    """Compute a chain, and evict the whole cache."""
    cache.pool.release(compute(cache, letters))
    evict_all(cache)


def test_spilled_blocks_go_before_retained_ones_and_deepest_first() -> None:
    cache = unpinnable(4, 3)
    cache.pool.spills = True
    spill(cache, "abcd")
    assert matched(cache, "abcd") == "abc", "the deepest block came first, and made room for the last"
    cache.retention.retain(hashes("a"), 10.0, 0.0)
    spill(cache, "xyz")
    assert matched(cache, "abcd") == "a"
    assert matched(cache, "xyz") == "xy"
    cache.retention.expire(10.0)
    assert matched(cache, "abcd") == "a", "its time is over, and it stays until others need its slot"
    spill(cache, "klm")
    assert matched(cache, "abcd") == ""
    assert cache.retention.num_lost == 0
    cache.check_integrity([])


def test_nothing_spills_unless_it_pays() -> None:
    cache = unpinnable(4, 3)
    spill(cache, "abcd")
    assert len(cache.pool.host) == 0
