"""Slots of fixed states: who owns them, which snapshot makes room, and which copies follow."""

from __future__ import annotations

import pytest

from penstock.core.plan import StateCopy, StateSlots
from penstock.kvcache import IntegrityError, KVCache
from penstock.kvcache.states import StatePool
from tests.kvcache.chains import compute, hashes, remember


def state_cache(num_slots: int, num_host_slots: int = 0, num_blocks: int = 16) -> tuple[KVCache, StatePool]:
    cache = KVCache(
        num_blocks, max_pinned_fraction=1.0, states=StateSlots(num_slots, num_host_slots), num_host_blocks=4
    )
    assert cache.states is not None
    return cache, cache.states


def snapshot(cache: KVCache, states: StatePool, names: str) -> None:
    """What a request does that computes a chain, and leaves a snapshot at its end."""
    table = compute(cache, names)
    slot = states.open(None)
    states.close(slot, hashes(names)[-1])
    cache.pool.release(table)


def test_a_state_is_copied_out_and_in_around_the_next_plan() -> None:
    cache, states = state_cache(3)
    table = compute(cache, "ab")
    slot = states.open(None)
    states.keep(slot, hashes("ab")[-1])
    assert states.longest(hashes("abc")) == 2
    assert states.is_due(hashes("ab")[-1])
    assert cache.take_copies() == (StateCopy(slot),)
    states.take_due()
    assert not states.is_due(hashes("ab")[-1])
    other = states.open(hashes("ab")[-1])
    assert cache.take_copies() == (StateCopy(1, slot), StateCopy(other, 1))
    states.check_integrity([slot, other])
    with pytest.raises(IntegrityError):
        states.check_integrity([slot])
    cache.pool.release(table)


def test_a_slot_that_is_given_back_at_the_end_of_a_block_is_a_snapshot_without_a_copy() -> None:
    cache, states = state_cache(2)
    snapshot(cache, states, "ab")
    assert states.num_snapshots == 1
    assert cache.take_copies() == (StateCopy(0),)
    assert [states.longest(hashes(names)) for names in ("a", "ab", "abc", "x")] == [0, 2, 2, 0]
    snapshot(cache, states, "ab")  # the block has one already
    assert states.num_snapshots == 1
    states.check_integrity([])


def test_the_least_recently_used_snapshot_makes_room() -> None:
    cache, states = state_cache(3)
    for names in ("a", "b"):
        snapshot(cache, states, names)
    states.close(states.open(hashes("a")[-1]))
    snapshot(cache, states, "c")
    snapshot(cache, states, "d")
    assert [names for names in "abcd" if states.longest(hashes(names))] == ["a", "c", "d"]


def test_a_request_takes_over_the_last_snapshot_in_its_slot() -> None:
    cache, states = state_cache(1)
    snapshot(cache, states, "a")
    cache.take_copies()
    slot = states.open(hashes("a")[-1])
    assert cache.take_copies() == ()
    assert (states.num_snapshots, states.num_active) == (0, 1)
    states.check_integrity([slot])
    with pytest.raises(IntegrityError, match="all 1 state slots"):
        states.open(None)


def test_snapshots_of_retained_prefixes_go_last_and_to_host_memory() -> None:
    cache, states = state_cache(2, num_host_slots=1)
    snapshot(cache, states, "a")
    cache.retention.retain(hashes("a"), until=10.0, now=0.0)
    snapshot(cache, states, "b")
    snapshot(cache, states, "c")
    assert [names for names in "abc" if states.longest(hashes(names))] == ["a", "c"]
    slots = [states.open(None), states.open(None)]
    assert StateCopy(0, 0, to_host=True) in cache.take_copies()
    states.close(slots.pop())
    assert states.longest(hashes("a")) == 1
    slots.append(states.open(hashes("a")[-1]))
    assert cache.take_copies() == (StateCopy(slots[-1], 0, from_host=True),)
    states.check_integrity(slots)
    cache.retention.expire(11.0)
    assert states.num_lost == 0


def test_an_unretained_snapshot_does_not_push_a_retained_one_out() -> None:
    cache, states = state_cache(2)
    snapshot(cache, states, "a")
    cache.retention.retain(hashes("a"), until=10.0, now=0.0)
    table = compute(cache, "b")
    slot = states.open(None)
    states.keep(slot, hashes("b")[-1])
    states.take_due()
    assert states.longest(hashes("a")) == 1
    assert states.longest(hashes("b")) == 0
    states.close(slot)
    cache.pool.release(table)
    states.check_integrity([])


def test_a_snapshot_goes_with_its_block() -> None:
    cache, states = state_cache(4, num_blocks=3)
    snapshot(cache, states, "abc")
    remember(cache, "xyz")
    assert states.longest(hashes("abc")) == 0
    states.check_integrity([])
    snapshot(cache, states, "xyz")
    cache.pool.clear()
    assert states.num_snapshots == 0
    states.check_integrity([])


def test_wrong_uses_are_refused() -> None:
    _, states = state_cache(2)
    slot = states.open(None)
    states.close(slot)
    with pytest.raises(IntegrityError):
        states.close(slot)
    with pytest.raises(IntegrityError):
        states.keep(slot, hashes("a")[-1])
    with pytest.raises(IntegrityError):
        states.open(hashes("a")[-1])
    with pytest.raises(ValueError, match="need slots"):
        KVCache(4, states=StateSlots(0))


def test_a_snapshot_that_goes_to_host_memory_does_not_replace_the_one_that_a_request_starts_from() -> None:
    cache, states = state_cache(2, num_host_slots=1)
    for names in "ab":
        snapshot(cache, states, names)
        cache.retention.retain(hashes(names), until=10.0, now=0.0)
    slot = states.open(None)  # "a" goes to host memory
    snapshot_of_b = states.longest(hashes("b"))
    cache.take_copies()
    started = states.open(hashes("a")[-1])  # "b" makes room, and host memory has none
    assert snapshot_of_b == 1
    assert cache.take_copies() == (StateCopy(started, 0, from_host=True),)
    assert (states.longest(hashes("a")), states.longest(hashes("b"))) == (1, 0)
    assert states.num_lost == 1
    states.check_integrity([slot, started])
