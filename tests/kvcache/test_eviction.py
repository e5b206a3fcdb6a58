from __future__ import annotations

from penstock.kvcache import KVCache, root_hash
from tests.kvcache.chains import compute, hashes, matched, remember


def squeeze(cache: KVCache, num_blocks: int) -> None:
    """Take every free block and this many cached ones."""
    assert cache.pool.allocate(cache.pool.num_free + num_blocks) is not None


def test_a_chain_is_evicted_from_its_tail() -> None:
    cache = KVCache(4)
    remember(cache, "abcd")
    for left in ("abc", "ab", "a", ""):
        squeeze(cache, 1)
        assert matched(cache, "abcd") == left
        cache.check_integrity()


def test_the_least_recently_used_chain_goes_first_and_entirely() -> None:
    cache = KVCache(6)
    remember(cache, "abc")
    remember(cache, "xyz")
    cache.pool.release(cache.pool.acquire(hashes("abc")))
    squeeze(cache, 3)
    assert (matched(cache, "xyz"), matched(cache, "abc")) == ("", "abc")


def test_using_a_prefix_keeps_it_longer_than_what_hangs_on_it() -> None:
    cache = KVCache(6)
    remember(cache, "abcd")
    remember(cache, "xy")
    cache.pool.release(cache.pool.acquire(hashes("ab")))
    squeeze(cache, 2)
    assert (matched(cache, "abcd"), matched(cache, "xy")) == ("ab", "xy")
    squeeze(cache, 2)
    assert (matched(cache, "ab"), matched(cache, "xy")) == ("ab", "")


def test_a_trunk_outlives_all_its_branches() -> None:
    cache = KVCache(5)
    remember(cache, "abx")
    remember(cache, "aby")
    remember(cache, "abz")
    for left in (["ab", "aby", "abz"], ["ab", "ab", "abz"], ["ab", "ab", "ab"], ["a", "a", "a"]):
        squeeze(cache, 1)
        assert [matched(cache, names) for names in ("abx", "aby", "abz")] == left


def test_a_parent_released_before_its_child_still_outlives_it() -> None:
    """Blocks may also come back head first, as when a window slides over a sequence."""
    cache = KVCache(4)
    for block_id in compute(cache, "abcd"):
        cache.pool.release([block_id])
    for left in ("abc", "ab", "a", ""):
        squeeze(cache, 1)
        assert matched(cache, "abcd") == left


def test_a_child_whose_holder_has_a_private_parent_goes_before_the_indexed_parent() -> None:
    """Two requests computed "a" at once; the second one's is private, but its "b" hangs on the first one's "a"."""
    cache = KVCache(4)
    a, b = hashes("ab")
    indexed, private, child = cache.pool.allocate(3) or []
    cache.publish(indexed, a, root_hash(""))
    cache.publish(private, a, root_hash(""))
    cache.publish(child, b, a)
    cache.pool.release([indexed])
    cache.pool.release([private, child])
    squeeze(cache, 1)
    assert matched(cache, "ab") == "a"


def test_a_cached_parent_of_an_active_child_can_be_evicted_if_nothing_else_is_left() -> None:
    cache = KVCache(3)
    a, b = hashes("ab")
    indexed, private, child = cache.pool.allocate(3) or []
    cache.publish(indexed, a, root_hash(""))
    cache.publish(child, b, a)
    cache.pool.release([indexed])
    assert cache.num_available == 1
    assert cache.pool.allocate(1) == [indexed]
    assert matched(cache, "ab") == ""
    cache.publish(private, a, root_hash(""))
    assert matched(cache, "ab") == "ab"
    cache.pool.check_integrity([[private, child], [indexed]])


def test_active_blocks_are_never_evicted() -> None:
    cache = KVCache(4)
    table = compute(cache, "ab")
    remember(cache, "xy")
    assert cache.pool.allocate(3) is None
    squeeze(cache, 2)
    assert matched(cache, "ab") == "ab"
    cache.pool.release(table)


def test_old_entries_do_not_pile_up() -> None:
    """Every release queues a tail; what was queued and taken again must not stay for ever."""
    cache = KVCache(4)
    remember(cache, "abcd")
    for _ in range(1000):
        cache.pool.release(cache.pool.acquire(hashes("abcd")))
    assert len(cache.pool.cached._tails) <= 2 * 4 + 64
    cache.check_integrity()
    squeeze(cache, 1)
    assert matched(cache, "abcd") == "abc"


def test_evicted_blocks_are_handed_out_once() -> None:
    cache = KVCache(8)
    remember(cache, "abcd")
    remember(cache, "wxyz")
    taken = cache.pool.allocate(8)
    assert taken is not None
    assert sorted(taken) == list(range(8))
    cache.pool.check_integrity([taken])
