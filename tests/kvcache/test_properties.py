"""Random operations against a slow and obvious model of the cache; every invariant is checked after each one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kvcache import BlockHash, KVCache, chain_hash, root_hash
from tests.kvcache.chains import Mirror

LETTERS = st.text("ab", min_size=1, max_size=5)
SALTS = st.sampled_from(["x", "y"])


@dataclass
class Entry:
    """One indexed block in the model."""

    block_id: int
    parent: BlockHash
    last_use: int = 0
    pinned_until: float | None = None


@dataclass
class Model:
    """What the cache should contain, found by scanning everything each time."""

    num_blocks: int
    max_pinned: int
    index: dict[BlockHash, Entry] = field(default_factory=dict)
    references: Counter[int] = field(default_factory=Counter)
    num_releases: int = 0

    def cached(self) -> dict[BlockHash, Entry]:
        return {
            key: entry
            for key, entry in self.index.items()
            if not self.references[entry.block_id] and entry.pinned_until is None
        }

    def pinned(self) -> list[Entry]:
        return [
            entry
            for entry in self.index.values()
            if not self.references[entry.block_id] and entry.pinned_until is not None
        ]

    def num_free(self) -> int:
        indexed = {entry.block_id for entry in self.index.values()}
        active = {block_id for block_id, count in self.references.items() if count}
        return self.num_blocks - len(indexed | active)

    def match(self, chain: list[BlockHash]) -> int:
        return next((i for i, block_hash in enumerate(chain) if block_hash not in self.index), len(chain))

    def evict_for(self, count: int) -> None:
        while self.num_free() < count:
            cached = self.cached()
            parents = {entry.parent for entry in cached.values()}
            tails = [key for key in cached if key not in parents]
            del self.index[min(tails, key=lambda key: cached[key].last_use)]

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            for entry in self.index.values():
                if entry.block_id == block_id and not self.references[block_id]:
                    self.num_releases += 1
                    entry.last_use = self.num_releases

    def pin(self, chain: list[BlockHash], until: float) -> None:
        for block_hash in chain[: self.match(chain)]:
            entry = self.index[block_hash]
            entry.pinned_until = max(until, entry.pinned_until or until)

    def expire(self, now: float) -> int:
        expired = [
            entry
            for entry in self.index.values()
            if entry.pinned_until is not None and entry.pinned_until <= now
        ]
        for entry in expired:
            entry.pinned_until = None
        return len(expired)


@dataclass
class Holder:
    """A running request: its block table, and the hashes of the published part."""

    root: BlockHash
    chain: list[BlockHash]
    table: list[int]


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), pinned_fraction=st.sampled_from([0.0, 0.4, 1.0]))
    def make(self, num_blocks: int, pinned_fraction: float) -> None:
        self.cache = KVCache(num_blocks, max_pinned_fraction=pinned_fraction)
        self.model = Model(num_blocks, self.cache.max_pinned_blocks)
        self.mirror = Mirror()
        self.holders: list[Holder] = []
        self.now = 0.0

    @rule(letters=LETTERS, salt=SALTS, look_first=st.booleans())
    def start(self, letters: str, salt: str, look_first: bool) -> None:
        """A request arrives. Without looking first, it computes again what may be indexed already."""
        root = root_hash(salt)
        chain = chain_of(root, letters)
        num_matched = self.cache.match(chain) if look_first else 0
        if look_first:
            assert num_matched == self.model.match(chain)
        table = self.cache.acquire(chain[:num_matched])
        assert table == [self.model.index[block_hash].block_id for block_hash in chain[:num_matched]]
        self.model.references.update(table)
        holder = Holder(root, chain[:num_matched], table)
        self.holders.append(holder)
        for block_hash in chain[num_matched:]:
            self._grow(holder, block_hash)

    @rule(position=st.integers(0, 20), letter=st.sampled_from("ab"), full=st.booleans())
    @precondition(lambda self: self.holders)
    def grow(self, position: int, letter: str, full: bool) -> None:
        """A running request fills its next block, or takes one without filling it."""
        holder = self.holders[position % len(self.holders)]
        if len(holder.chain) == len(holder.table):
            parent = holder.chain[-1] if holder.chain else holder.root
            self._grow(holder, chain_hash(parent, [ord(letter)]) if full else None)

    @rule(position=st.integers(0, 20), head_first=st.booleans(), keep=st.integers(0, 4))
    @precondition(lambda self: self.holders)
    def give_back(self, position: int, head_first: bool, keep: int) -> None:
        """A request ends, or gives back the blocks past `keep`; block by block from its head, or all at once."""
        holder = self.holders[position % len(self.holders)]
        leaving = holder.table[keep:]
        for part in [[block_id] for block_id in leaving] if head_first else [leaving]:
            self.cache.release(part)
            self.model.release(part)
        holder.table = holder.table[:keep]
        holder.chain = holder.chain[:keep]
        if not holder.table:
            self.holders.remove(holder)

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        """Somebody needs many blocks for a moment."""
        available = self.model.num_free() + len(self.model.cached())
        assert self.cache.num_available == available
        taken = self.cache.allocate(count)
        assert (taken is not None) == (count <= available)
        if taken is not None:
            assert len(set(taken)) == count
            self.model.evict_for(count)
            self.cache.release(taken)

    @rule(letters=LETTERS, salt=SALTS, seconds=st.integers(-1, 5))
    def pin(self, letters: str, salt: str, seconds: int) -> None:
        chain = chain_of(root_hash(salt), letters)
        self.model.expire(self.now)
        overflows = self.cache.pin_overflows
        num_pinned = self.cache.pin(chain, until=self.now + seconds, now=self.now)
        if seconds > 0:
            self.model.pin(chain, self.now + seconds)
            self._adopt_overflow(self.cache.pin_overflows - overflows)
            indexed = chain[: self.model.match(chain)]
            assert num_pinned == sum(self.model.index[key].pinned_until is not None for key in indexed)
        else:
            assert num_pinned == 0

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        assert self.cache.expire_pins(self.now) == self.model.expire(self.now)

    @rule()
    def take_events(self) -> None:
        self.mirror.apply(self.cache.take_events())
        assert self.mirror.hashes == set(self.model.index)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.index.clear()

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity([holder.table for holder in self.holders])
        cache, model = self.cache, self.model
        assert {key: block.block_id for key, block in cache._index.items()} == {
            key: entry.block_id for key, entry in model.index.items()
        }
        assert cache.num_free == model.num_free()
        assert cache.num_cached == len(model.cached())
        assert cache.num_pinned == len(model.pinned())
        assert cache.num_active == sum(count > 0 for count in model.references.values())
        assert cache.num_free + cache.num_cached + cache.num_pinned + cache.num_active == cache.num_blocks

    def _grow(self, holder: Holder, block_hash: BlockHash | None) -> None:
        fresh = self.cache.allocate(1)
        if fresh is None:
            assert self.model.num_free() + len(self.model.cached()) == 0
            return
        self.model.evict_for(1)
        (block_id,) = fresh
        assert not self.model.references[block_id]
        self.model.references[block_id] = 1
        parent = holder.chain[-1] if holder.chain else holder.root
        if block_hash is not None and len(holder.chain) == len(holder.table):
            self.cache.publish(block_id, block_hash, parent)
            self.model.index.setdefault(block_hash, Entry(block_id, parent))
            holder.chain.append(block_hash)
        holder.table.append(block_id)

    def _adopt_overflow(self, num_overflows: int) -> None:
        """Give up as many pins in the model as the cache did, after checking that it had to and chose rightly."""
        with_pin = [key for key, entry in self.model.index.items() if entry.pinned_until is not None]
        assert num_overflows == max(0, len(with_pin) - self.model.max_pinned)
        given_up = [key for key in with_pin if self.cache._index[key].pinned_until is None]
        assert len(given_up) == num_overflows
        expiry = {key: self.model.index[key].pinned_until or 0.0 for key in with_pin}
        for key in given_up:
            assert all(expiry[key] <= expiry[kept] for kept in with_pin if kept not in given_up)
            self.model.index[key].pinned_until = None
        for key in with_pin:
            parent = self.model.index[key].parent
            if parent in self.model.index and key not in given_up:
                assert parent not in given_up, "a pinned block lost the pin of the one it hangs on"


def chain_of(root: BlockHash, letters: str) -> list[BlockHash]:
    chain = []
    for letter in letters:
        root = chain_hash(root, [ord(letter)])
        chain.append(root)
    return chain


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestRandomOperations = CacheMachine.TestCase
