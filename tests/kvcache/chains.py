"""Short ways to fill a cache with chains and to follow its events, for tests."""

from __future__ import annotations

from penstock.core.messages import KVCleared, KVEvent, KVRemoved, KVStored
from penstock.kvcache import BlockHash, KVCache, chain_hash, root_hash


def hashes(names: str, salt: str = "") -> list[BlockHash]:
    """The chain of blocks whose contents are these letters: "ab" and "ac" share their first block."""
    chain = []
    parent = root_hash(salt)
    for name in names:
        parent = chain_hash(parent, [ord(name)])
        chain.append(parent)
    return chain


def compute(cache: KVCache, names: str, salt: str = "") -> list[int]:
    """What a request does: reuse what is there, compute and publish the rest. Returns its block table."""
    chain = hashes(names, salt)
    num_matched = cache.match(chain)
    table = cache.pool.acquire(chain[:num_matched])
    fresh = cache.pool.allocate(len(chain) - num_matched)
    assert fresh is not None, "the cache is too small for this test"
    table += fresh
    for position in range(num_matched, len(chain)):
        parent = chain[position - 1] if position else root_hash(salt)
        cache.publish(table[position], chain[position], parent)
    return table


def remember(cache: KVCache, names: str, salt: str = "") -> None:
    """Compute a chain and let it go, so that it is cached."""
    cache.pool.release(compute(cache, names, salt))


def matched(cache: KVCache, names: str, salt: str = "") -> str:
    """The part of a chain that can be reused."""
    return names[: cache.match(hashes(names, salt))]


def in_host_memory(cache: KVCache, chain: list[BlockHash]) -> list[BlockHash]:
    """The hashes of a matched prefix that must be restored before they can be used."""
    return [block_hash for block_hash in chain if block_hash in cache.pool.host.index]


class Mirror:
    """A reader of events, as the router is one: the set of hashes a replica can reuse."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()
        self.next_sequence = 0

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            assert event.sequence == self.next_sequence, "sequence numbers have a gap"
            self.next_sequence += 1
            match event:
                case KVStored(block_hashes=stored):
                    assert not self.hashes & set(stored), "stored what was already there"
                    self.hashes |= set(stored)
                case KVRemoved(block_hashes=removed):
                    assert set(removed) <= self.hashes, "removed what was not there"
                    self.hashes -= set(removed)
                case KVCleared():
                    self.hashes.clear()
