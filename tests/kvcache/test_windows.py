"""Blocks of layers with windows: what is found, what goes first, and what integrity means."""

from __future__ import annotations

import pytest

from penstock.core.plan import WindowGroup, WindowLayout
from penstock.kvcache import IntegrityError, KVCache, chain_hashes, root_hash
from penstock.kvcache.table import BlockTable

ROOT = root_hash("")
HASHES = chain_hashes(ROOT, range(40), 4)
OTHERS = chain_hashes(ROOT, range(100, 140), 4)


def window_cache(num_blocks: int, *groups: WindowGroup, memory: int | None = None) -> KVCache:
    return KVCache(num_blocks, block_size=4, windows=WindowLayout(groups, 64, memory))


def compute(cache: KVCache, hashes: list[bytes], *, found: int = 0) -> BlockTable:
    """A request that computes these blocks in one step."""
    table = cache.open_table(hashes[:found])
    table.open_windows()
    table.fill(4 * len(hashes))
    assert table.windows is not None
    table.windows.advance(4 * found, 4 * len(hashes))
    parent = hashes[found - 1] if found else ROOT
    for index in range(found, len(hashes)):
        cache.publish(table.block_ids[index], hashes[index], parent)
        table.windows.publish(index, hashes[index])
        parent = hashes[index]
    cache.check_integrity([table])
    return table


def test_a_prefix_needs_the_blocks_in_sight_of_its_next_token() -> None:
    cache = window_cache(40, WindowGroup(6, 2))
    table = compute(cache, HASHES[:6])
    windows = table.windows
    assert windows is not None
    assert cache.windows is not None
    windows.advance(24, 28)  # token 24 sees tokens 19 to 24: from block 4 on
    assert windows.firsts == [4]
    table.close()
    assert [cache.windows.longest(HASHES[:count]) for count in range(8)] == [0, 1, 2, 3, 4, 5, 6, 6]
    cache.windows.forget(HASHES[1])
    assert [cache.windows.longest(HASHES[:count]) for count in range(6)] == [0, 1, 1, 1, 4, 5]
    cache.check_integrity([])


def test_a_group_in_chunks_starts_anew_with_each_chunk() -> None:
    cache = window_cache(40, WindowGroup(8, in_chunks=True))
    table = compute(cache, HASHES[:5])
    assert table.windows is not None
    assert cache.windows is not None
    table.windows.advance(20, 24)
    assert table.windows.firsts == [4]
    table.close()
    for block_hash in HASHES[:4]:
        cache.windows.forget(block_hash)
    assert cache.windows.longest(HASHES[:4]) == 4, "nothing in front of a new chunk is seen"
    assert cache.windows.longest(HASHES[:3]) == 2


def test_two_windows_of_different_sizes_are_both_needed() -> None:
    cache = window_cache(60, WindowGroup(3), WindowGroup(12))
    table = compute(cache, HASHES[:6])
    table.close()
    assert cache.windows is not None
    cache.windows.forget(HASHES[2])
    assert cache.windows.longest(HASHES[:6]) == 6
    assert cache.windows.longest(HASHES[:5]) == 2
    cache.check_integrity([])


def test_spent_blocks_go_first_and_wanted_ones_with_all_others() -> None:
    cache = window_cache(20, WindowGroup(5, 2))
    table = compute(cache, HASHES[:4])
    assert table.windows is not None
    table.windows.advance(16, 16)  # three blocks of two parts are behind the window
    table.close()
    assert cache.num_available == 20
    other = compute(cache, OTHERS[:3])  # 9 blocks: 8 are free
    assert cache.windows is not None
    assert cache.match(HASHES[:4]) == 4
    assert cache.windows.longest(HASHES[:4]) == 4
    assert cache.windows.longest(HASHES[:1]) == 0, "the oldest spent block was evicted"
    other.close()
    cache.check_integrity([])


def test_pins_of_windows_count_and_are_given_up_with_those_of_their_prefix() -> None:
    cache = window_cache(20, WindowGroup(5, 2))
    table = compute(cache, HASHES[:4])
    assert cache.retention.retain(HASHES[:4], 10.0, 0.0) == 4
    table.close()
    assert cache.retention.num_pins == 4 + 2
    assert cache.num_available == 20 - 6
    cache.retention.retain(HASHES[:3], 20.0, 0.0)
    assert cache.retention.num_pins == 4 + 4
    cache.check_integrity([])
    cache.retention.expire(10.0)
    assert cache.retention.num_pins == 3 + 2
    cache.retention.give_way(20)
    assert cache.num_available == 20
    cache.check_integrity([])


def test_windows_with_memory_of_their_own() -> None:
    cache = window_cache(1000, WindowGroup(8), memory=6)
    assert cache.longest_context() == 4000
    assert cache.num_memory_blocks == 6
    table = compute(cache, HASHES[:5])
    assert cache.num_memory_available == 1
    assert table.windows is not None
    assert table.windows.reach(20, 100) == 4 * (1 + 3), "three blocks come free"
    table.close()
    assert cache.num_memory_available == 6
    cache.pool.clear()
    cache.check_integrity([])


def test_a_table_without_memory_and_bad_groups_are_refused() -> None:
    cache = window_cache(6, WindowGroup(8, 2))
    table = cache.open_table()
    table.open_windows()
    assert table.windows is not None
    assert table.windows.num_missing(0, 16) == 8
    with pytest.raises(IntegrityError, match="without memory"):
        table.windows.advance(0, 16)
    with pytest.raises(ValueError, match="need a window"):
        window_cache(6, WindowGroup(0))
    with pytest.raises(ValueError, match="whole blocks"):
        window_cache(6, WindowGroup(6, in_chunks=True))
