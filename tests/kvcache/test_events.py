from __future__ import annotations

import msgspec

from penstock.core.messages import KeptEntry, KVCleared, KVEvent, KVRemoved, KVStored
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


def test_readers_hear_of_prefixes_that_are_kept_and_of_those_that_are_prolonged() -> None:
    cache = KVCache(8)
    remember(cache, "abc")
    cache.take_events()
    assert cache.retention.retain_entry(hashes("ab"), 300.0, since=0.0, now=1.0) == 2
    last = hashes("ab")[-1]
    assert cache.take_events() == [KVStored(1, (), b"", (KeptEntry(last, 2, 299.0),))]
    cache.retention.prolong_entry(hashes("ab"), since=10.0, now=10.0)
    cache.retention.prolong_entry(hashes("ab"), since=10.0, now=20.0)
    assert cache.take_events() == [KVStored(2, (), b"", (KeptEntry(last, 2, 300.0),))], "told once"
    cache.retention.prolong_entry(hashes("abc"), since=20.0, now=20.0)
    assert cache.take_events() == [], "no entry ends there"


def test_a_new_reader_hears_of_all_prefixes_that_are_still_kept() -> None:
    cache = KVCache(8)
    remember(cache, "abc")
    cache.retention.retain_entry(hashes("ab"), 300.0, since=0.0, now=0.0)
    cache.retention.retain_entry(hashes("abc"), 60.0, since=0.0, now=0.0)
    cache.restart_events(now=100.0)
    assert cache.take_events() == [
        KVCleared(0),
        KVStored(1, tuple(hashes("abc")), root_hash("")),
        KVStored(2, (), b"", (KeptEntry(hashes("ab")[-1], 2, 200.0),)),
    ]


def test_readers_of_an_earlier_version_pass_over_kept_prefixes() -> None:
    class EarlierStored(msgspec.Struct, frozen=True, tag="stored"):
        sequence: int
        block_hashes: tuple[bytes, ...]
        parent: bytes

    event = KVStored(3, (), b"", (KeptEntry(b"x" * 16, 2, 300.0),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=EarlierStored) == EarlierStored(
        3, (), b""
    )
    assert b"kept" not in msgspec.msgpack.encode(KVStored(3, (b"x",), b"y")), "costs nothing elsewhere"
