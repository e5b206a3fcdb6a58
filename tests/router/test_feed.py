from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.hashing import chain_hash, root_hash
from penstock.core.messages import KVCleared, KVEvent, KVRemoved, KVStored
from penstock.kvcache import KVCache
from penstock.router.index import Expectations, KVFeed, PrefixIndex

ROOT = root_hash("tenant")


def make_feed() -> tuple[PrefixIndex, KVFeed]:
    index = PrefixIndex()
    return index, KVFeed(index, Expectations(index))


def hashes(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "big") for number in numbers)


def test_events_in_order_are_the_index() -> None:
    index, feed = make_feed()
    feed.receive([KVStored(0, hashes(1, 2, 3), ROOT), KVRemoved(1, hashes(3))])
    assert index.match(hashes(1, 2, 3), feed.bit) == [(2, feed.bit)]
    assert feed.num_blocks == 2
    feed.receive([KVCleared(2), KVStored(3, hashes(1), ROOT)])
    assert index.match(hashes(1, 2), feed.bit) == [(1, feed.bit)]
    assert feed.num_blocks == 1
    assert not feed.needs_resync


def test_after_a_gap_nothing_is_trusted_until_a_new_start() -> None:
    index, feed = make_feed()
    feed.receive([KVStored(0, hashes(1), ROOT)])
    feed.receive([KVStored(2, hashes(5), ROOT)])
    assert feed.needs_resync
    assert feed.num_gaps == 1
    assert index.match(hashes(1), feed.bit) == []
    feed.receive([KVStored(3, hashes(6), ROOT)])
    assert index.match(hashes(6), feed.bit) == []
    feed.receive([KVCleared(4), KVStored(5, hashes(1, 2), ROOT)])
    assert not feed.needs_resync
    assert index.match(hashes(1, 2), feed.bit) == [(2, feed.bit)]


def test_events_told_twice_change_nothing() -> None:
    index, feed = make_feed()
    events: list[KVEvent] = [
        KVStored(0, hashes(1), ROOT),
        KVRemoved(1, hashes(1)),
        KVStored(2, hashes(2), ROOT),
    ]
    feed.receive(events)
    feed.receive(events)
    assert not feed.needs_resync
    assert index.match(hashes(1), feed.bit) == []
    assert index.match(hashes(2), feed.bit) == [(1, feed.bit)]


def use_cache(cache: KVCache, rng: Random) -> Iterator[list[bytes]]:
    """Requests of random chains from a small alphabet, each released at once; yields the chains."""
    while True:
        chain, parent = [], ROOT
        for _ in range(rng.randint(1, 6)):
            parent = chain_hash(parent, (rng.randint(0, 2),))
            chain.append(parent)
        found = cache.match(chain)
        block_ids = cache.pool.acquire(chain[:found])
        fresh = cache.pool.allocate(len(chain) - found)
        assert fresh is not None
        block_ids += fresh
        for position, (block_id, block_hash) in enumerate(zip(block_ids, chain, strict=True)):
            cache.publish(block_id, block_hash, chain[position - 1] if position else ROOT)
        cache.pool.release(block_ids)
        yield chain


@given(seed=st.integers(0, 10_000), lost=st.floats(0.0, 0.6))
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_a_new_start_makes_the_index_equal_to_the_cache(seed: int, lost: float) -> None:
    """Against the real cache, with batches lost at random and a new start asked for after every gap."""
    rng = Random(seed)
    cache = KVCache(12, block_size=1)
    index, feed = make_feed()
    chains = []
    for chain, _ in zip(use_cache(cache, rng), range(60), strict=False):
        chains.append(chain)
        events = cache.take_events()
        if rng.random() >= lost:
            feed.receive(events)
        if feed.needs_resync:
            cache.restart_events()
    cache.restart_events()
    feed.receive(cache.take_events())
    assert not feed.needs_resync
    for chain in chains:
        depth = cache.match(chain)
        assert index.match(chain, feed.bit) == ([(depth, feed.bit)] if depth else [])
