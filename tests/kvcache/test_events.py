from __future__ import annotations

import msgspec

from penstock.core.messages import KVCleared, KVEvent, KVRemoved, KVStored
from penstock.kvcache import KVCache, root_hash
from tests.kvcache.chains import Mirror, compute, hashes, matched, remember


def test_a_chain_is_stored_as_one_event_and_removed_from_its_tail() -> None:
    cache = KVCache(4)
    remember(cache, "abc")
    assert cache.pool.allocate(4) is not None
    a, b, c = hashes("abc")
    assert cache.take_events() == [KVStored(0, (a, b, c), root_hash("")), KVRemoved(1, (c, b, a))]
    assert cache.take_events() == []


def test_a_branch_is_stored_under_its_parent() -> None:
    cache = KVCache(8)
    remember(cache, "abc")
    remember(cache, "abx")
    a, b, c = hashes("abc")
    x = hashes("abx")[2]
    assert cache.take_events() == [KVStored(0, (a, b, c), root_hash("")), KVStored(1, (x,), b)]


def test_sequence_numbers_go_on_from_call_to_call() -> None:
    cache = KVCache(4)
    remember(cache, "ab")
    first = cache.take_events()
    cache.pool.clear()
    second = cache.take_events()
    assert [event.sequence for event in first + second] == [0, 1]
    assert second == [KVCleared(1)]


def test_a_reader_that_comes_late_gets_the_whole_index_instead_of_its_history() -> None:
    cache = KVCache(4)
    mirror = Mirror()
    remember(cache, "ab")
    mirror.apply(cache.take_events())
    for round_number in range(1000):
        remember(cache, chr(1000 + round_number) + "yz")
    table = compute(cache, "k")
    events = cache.take_events()
    assert isinstance(events[0], KVCleared)
    assert len(events) <= 1 + cache.num_blocks
    mirror.apply(events)
    assert mirror.hashes == set(cache.pool.index)
    assert matched(cache, "k") == "k"
    cache.pool.release(table)
    remember(cache, "q")
    mirror.apply(cache.take_events())
    assert mirror.hashes == set(cache.pool.index)


def test_clearing_makes_dropped_news_irrelevant() -> None:
    cache = KVCache(4)
    for round_number in range(1000):
        remember(cache, chr(1000 + round_number) + "yz")
    cache.pool.clear()
    remember(cache, "a")
    assert cache.take_events() == [KVCleared(0), KVStored(1, tuple(hashes("a")), root_hash(""))]


def test_events_survive_the_wire() -> None:
    cache = KVCache(2)
    remember(cache, "a")
    remember(cache, "xy")
    cache.pool.clear()
    remember(cache, "ab")
    remember(cache, "x")
    events = cache.take_events()
    assert {type(event) for event in events} == {KVStored, KVRemoved, KVCleared}
    data = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(data, type=list[KVEvent]) == events


def test_a_reader_that_missed_news_gets_a_new_start() -> None:
    cache = KVCache(8)
    remember(cache, "abc")
    assert len(cache.take_events()) == 1  # and nobody got it
    remember(cache, "x")
    cache.restart_events()
    mirror = Mirror()
    mirror.next_sequence = 1
    events = cache.take_events()
    assert events[0] == KVCleared(1)
    mirror.apply(events)
    assert mirror.hashes == {*hashes("abc"), *hashes("x")}
    assert cache.take_events() == []
