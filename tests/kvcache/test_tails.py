"""Halves of blocks: who gets which, what is copied, and that none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import HalfCopy
from penstock.kvcache import IntegrityError, KVCache
from penstock.kvcache.table import TailHalves

HALF = 8


def make(num_blocks: int = 4) -> tuple[KVCache, TailHalves]:
    cache = KVCache(num_blocks)
    return cache, TailHalves(cache.pool, enabled=True)


def take_half(tails: TailHalves) -> tuple[int, int]:
    block_id, offset = tails.take()
    assert offset is not None
    return block_id, offset


def test_two_tails_take_one_block() -> None:
    cache, tails = make()
    first, second = take_half(tails), take_half(tails)
    assert first[0] == second[0]
    assert [first[1], second[1]] == [0, HALF]
    assert cache.pool.num_active == 1
    third = take_half(tails)
    assert third[0] != first[0]
    tails.check_integrity([first, second, third])
    cache.pool.check_integrity([[block_id] for block_id, _ in (first, second, third)])


def test_a_half_that_was_given_back_is_taken_first() -> None:
    cache, tails = make()
    first, second = take_half(tails), take_half(tails)
    tails.give_back(*first)
    assert cache.pool.num_active == 1
    assert take_half(tails) == first
    tails.give_back(*first)
    tails.give_back(*second)
    assert (cache.pool.num_active, cache.pool.num_free, tails.num_spare) == (0, 4, 0)


def test_who_is_alone_in_a_block_gets_all_of_it() -> None:
    cache, tails = make(1)
    block_id, offset = take_half(tails)
    assert not tails.is_shared(block_id)
    assert tails.widen(block_id, offset) == block_id
    assert cache.take_copies() == ()
    cache.pool.check_integrity([[block_id]])
    assert tails.num_spare == 0

    cache.pool.release([block_id])
    first, second = take_half(tails), take_half(tails)
    tails.give_back(*first)
    assert tails.widen(*second) == block_id, "no other block is needed"
    assert cache.take_copies() == (HalfCopy(block_id, HALF, block_id),)


def test_who_shares_a_block_moves_to_another() -> None:
    cache, tails = make()
    first, second = take_half(tails), take_half(tails)
    assert tails.is_shared(first[0])
    whole_id = tails.widen(*first)
    assert whole_id != first[0]
    assert cache.take_copies() == (HalfCopy(first[0], 0, whole_id),)
    tails.check_integrity([second])
    cache.pool.check_integrity([[whole_id], [second[0]]])
    assert take_half(tails) == first


def test_without_halves_every_tail_is_a_block() -> None:
    cache = KVCache(2)
    tails = TailHalves(cache.pool, enabled=False)
    assert not any(tails.suffices(count) for count in range(17))
    assert {tails.take(), tails.take()} == {(0, None), (1, None)}
    assert tails.num_slots == 16


def test_blocks_of_an_odd_size_have_no_halves() -> None:
    with pytest.raises(ValueError, match="5 tokens has no halves"):
        TailHalves(KVCache(2, block_size=5).pool, enabled=True)


def test_what_half_a_block_holds() -> None:
    _, tails = make()
    assert [count for count in range(16) if tails.suffices(count)] == list(range(1, HALF + 1))


def test_a_half_that_nobody_gave_back_shows() -> None:
    _, tails = make()
    take_half(tails)
    with pytest.raises(IntegrityError, match="do not add up"):
        tails.check_integrity([])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "widen", "give back"]), st.integers(0, 20)), max_size=80))
def test_any_order_of_calls_loses_nothing(script: list[tuple[str, int]]) -> None:
    """Every half holds a number of its owner, which goes where the copies take it."""
    cache, tails = make(6)
    contents: dict[tuple[int, int], int] = {}
    halves: list[tuple[tuple[int, int], int]] = []
    blocks: list[tuple[int, int]] = []
    for number, (call, which) in enumerate(script):
        if call == "take":
            if tails.num_spare or cache.num_available:
                half = take_half(tails)
                halves.append((half, number))
                contents[half] = number
        elif halves:
            half, owner = halves.pop(which % len(halves))
            if call == "give back":
                tails.give_back(*half)
            elif cache.num_available or not tails.is_shared(half[0]):
                whole_id = tails.widen(*half)
                for copy in cache.take_copies():
                    assert isinstance(copy, HalfCopy)
                    contents[copy.to_block_id, 0] = contents[copy.block_id, copy.offset]
                blocks.append((whole_id, owner))
            else:
                halves.append((half, owner))
        tails.check_integrity(half for half, _ in halves)
        cache.pool.check_integrity([*([half[0]] for half, _ in halves), *([block] for block, _ in blocks)])
        assert all(contents[half] == owner for half, owner in halves)
        assert all(contents[block_id, 0] == owner for block_id, owner in blocks)
