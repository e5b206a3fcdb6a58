from __future__ import annotations

import pytest

from penstock.kvcache import IntegrityError, KVCache, chain_hash, root_hash
from tests.kvcache.chains import compute, hashes, matched, remember


def test_a_running_prefix_is_shared_without_a_copy() -> None:
    cache = KVCache(8)
    first = compute(cache, "abc")
    second = compute(cache, "abd")
    assert second[:2] == first[:2]
    assert cache.pool.num_active == 4
    cache.pool.release(first)
    assert cache.pool.num_active == 3
    cache.pool.check_integrity([second])


def test_released_blocks_are_cached_if_indexed_and_free_if_not() -> None:
    cache = KVCache(8)
    table = compute(cache, "ab")
    tail = cache.pool.allocate(1)
    assert tail is not None
    cache.pool.release(table + tail)
    assert (cache.pool.num_cached, cache.pool.num_free, cache.pool.num_active) == (2, 6, 0)
    assert matched(cache, "abc") == "ab"


def test_a_cached_prefix_is_found_again() -> None:
    cache = KVCache(8)
    first = compute(cache, "abc")
    cache.pool.release(first)
    assert cache.pool.acquire(hashes("abc")) == first
    assert cache.pool.num_cached == 0


def test_the_same_prefix_computed_twice_stays_private_and_becomes_free() -> None:
    cache = KVCache(8)
    (chain,) = hashes("a")
    older, newer = cache.pool.allocate(2) or []
    cache.publish(older, chain, root_hash(""))
    cache.publish(newer, chain, root_hash(""))
    cache.pool.release([newer])
    assert cache.pool.num_free == 7
    assert cache.pool.acquire([chain]) == [older]
    cache.pool.check_integrity([[older], [older]])


def test_publishing_again_changes_nothing() -> None:
    cache = KVCache(4)
    table = compute(cache, "a")
    cache.publish(table[0], hashes("a")[0], root_hash(""))
    assert len(cache.take_events()) == 1


def test_allocation_is_all_or_nothing() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    held = cache.pool.allocate(1)
    assert cache.pool.allocate(4) is None
    assert cache.num_available == 3
    assert matched(cache, "ab") == "ab"
    assert cache.pool.allocate(0) == []
    assert len(cache.pool.allocate(3) or []) == 3
    assert cache.num_available == 0
    assert held is not None


def test_tenants_do_not_see_each_other() -> None:
    cache = KVCache(8)
    remember(cache, "abc", salt="a tenant")
    assert matched(cache, "abc", salt="another") == ""
    assert matched(cache, "abc", salt="a tenant") == "abc"


def test_usage_counts_active_and_pinned_blocks() -> None:
    cache = KVCache(8)
    remember(cache, "ab")
    assert cache.usage == 0.0
    cache.retention.retain(hashes("ab"), until=10.0, now=0.0)
    table = compute(cache, "xy")
    assert cache.usage == pytest.approx(0.5)
    cache.pool.release(table)
    assert cache.usage == pytest.approx(0.25)


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    cache = KVCache(8, enable_prefix_caching=False)
    remember(cache, "abc")
    assert matched(cache, "abc") == ""
    assert cache.pool.num_free == 8
    assert cache.take_events() == []


def test_lookups_are_counted() -> None:
    cache = KVCache(8)
    cache.record_lookup(100, 0)
    cache.record_lookup(100, 64)
    assert (cache.lookup_tokens, cache.hit_tokens) == (200, 64)


def test_clear_forgets_every_prefix_but_takes_no_block_from_its_holder() -> None:
    cache = KVCache(8)
    remember(cache, "ab")
    remember(cache, "xy")
    cache.retention.retain(hashes("xy"), until=10.0, now=0.0)
    table = compute(cache, "mn")
    cache.pool.clear()
    assert [matched(cache, names) for names in ("ab", "xy", "mn")] == ["", "", ""]
    assert (cache.pool.num_active, cache.pool.num_free) == (2, 6)
    cache.pool.check_integrity([table])
    cache.pool.release(table)
    assert cache.pool.num_free == 8
    assert cache.retention.expire(now=20.0) == 0


def test_misuse_is_reported_at_once() -> None:
    cache = KVCache(4)
    table = compute(cache, "a")
    with pytest.raises(IntegrityError, match="different contents"):
        cache.publish(table[0], chain_hash(root_hash(""), [99]), root_hash(""))
    with pytest.raises(IntegrityError, match="not indexed"):
        cache.pool.acquire(hashes("ab"))
    assert cache.pool.num_active == 1
    cache.pool.release(table)
    with pytest.raises(IntegrityError, match="no table holds it"):
        cache.pool.release(table)
    with pytest.raises(IntegrityError, match="no table holds it"):
        cache.publish(table[0], hashes("b")[0], root_hash(""))


def test_integrity_check_notices_a_reference_that_no_table_holds() -> None:
    cache = KVCache(4)
    table = compute(cache, "a")
    cache.pool.check_integrity([table])
    with pytest.raises(IntegrityError, match="tables hold it 0 times"):
        cache.pool.check_integrity([])
    with pytest.raises(IntegrityError, match="tables hold it 2 times"):
        cache.pool.check_integrity([table, table])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_cache_needs_blocks(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="needs blocks"):
        KVCache(num_blocks)


def test_a_held_block_outlives_its_first_holder() -> None:
    cache = KVCache(4, block_size=4)
    block_ids = cache.pool.allocate(2)
    assert block_ids is not None
    cache.pool.share(block_ids)
    cache.pool.release(block_ids)
    cache.pool.check_integrity([block_ids])
    assert cache.num_available == 2
    cache.pool.release(block_ids)
    cache.pool.check_integrity([])
    with pytest.raises(IntegrityError):
        cache.pool.share(block_ids)
