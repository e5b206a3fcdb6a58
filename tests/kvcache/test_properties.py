"""Random operations against a slow and obvious model of the cache; every invariant is checked after each one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kvcache import BlockHash, KVCache, chain_hash, root_hash
from tests.kvcache.chains import Mirror, in_host_memory

LETTERS = st.text("ab", min_size=1, max_size=5)
SALTS = st.sampled_from(["x", "y"])


@dataclass
class Entry:
    """One indexed block in the model, on the device."""

    block_id: int
    parent: BlockHash
    last_use: int = 0
    pinned_until: float | None = None
    promise: tuple[float, int] | None = None  # until when, and depth


@dataclass
class Stored:
    """One block in host memory."""

    slot: int
    parent: BlockHash
    promise: tuple[float, int]

    @property
    def strength(self) -> tuple[float, int, int]:
        return self.promise[0], -self.promise[1], self.slot


@dataclass
class Model:
    """What the cache should contain, found by scanning everything each time."""

    num_blocks: int
    max_pinned: int
    free_slots: list[int]
    host: dict[BlockHash, Stored] = field(default_factory=dict)
    now: float = 0.0
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
        known = {*self.index, *self.host}
        return next((i for i, block_hash in enumerate(chain) if block_hash not in known), len(chain))

    def evict_for(self, count: int) -> None:
        while self.num_free() < count:
            cached = self.cached()
            parents = {entry.parent for entry in cached.values()}
            tails = [key for key in cached if key not in parents]
            victim = min(tails, key=lambda key: cached[key].last_use)
            entry = self.index.pop(victim)
            if entry.promise is not None and entry.promise[0] > self.now:
                self.store(victim, entry.parent, entry.promise)

    def store(self, block_hash: BlockHash, parent: BlockHash, promise: tuple[float, int]) -> None:
        if not self.free_slots:
            if not self.host:
                return
            weakest = min(self.host, key=lambda key: self.host[key].strength)
            if (promise[0], -promise[1]) <= self.host[weakest].strength[:2]:
                return
            self.free_slots.append(self.host.pop(weakest).slot)
        self.host[block_hash] = Stored(self.free_slots.pop(), parent, promise)

    def restore(self, hashes: list[BlockHash]) -> None:
        """Everything but the ids of the blocks, which the caller fills in."""
        leaving = {block_hash: self.host.pop(block_hash) for block_hash in hashes}
        self.evict_for(len(hashes))
        for block_hash, stored in leaving.items():
            self.index[block_hash] = Entry(-1, stored.parent, promise=stored.promise)
            self.free_slots.append(stored.slot)

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            for entry in self.index.values():
                if entry.block_id == block_id and not self.references[block_id]:
                    self.num_releases += 1
                    entry.last_use = self.num_releases

    def pin(self, chain: list[BlockHash], until: float) -> None:
        for depth, block_hash in enumerate(chain[: self.match(chain)]):
            if block_hash in self.host:
                stored = self.host[block_hash]
                stored.promise = (max(until, stored.promise[0]), depth)
                continue
            entry = self.index[block_hash]
            promised = entry.promise[0] if entry.promise is not None else until
            entry.promise = (max(until, promised), depth)
            entry.pinned_until = entry.promise[0]

    def expire(self, now: float) -> int:
        self.now = now
        for block_hash in sorted(
            (key for key, stored in self.host.items() if stored.promise[0] <= now),
            key=lambda key: self.host[key].strength,
        ):
            self.free_slots.append(self.host.pop(block_hash).slot)
        expired = [
            entry
            for entry in self.index.values()
            if entry.pinned_until is not None and entry.pinned_until <= now
        ]
        for entry in expired:
            entry.pinned_until = entry.promise = None
        return len(expired)


@dataclass
class Holder:
    """A running request: its block table, and the hashes of the published part."""

    root: BlockHash
    chain: list[BlockHash]
    table: list[int]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12),
        pinned_fraction=st.sampled_from([0.0, 0.4, 1.0]),
        num_host_blocks=st.sampled_from([0, 2, 8]),
    )
    def make(self, num_blocks: int, pinned_fraction: float, num_host_blocks: int) -> None:
        self.cache = KVCache(num_blocks, max_pinned_fraction=pinned_fraction, num_host_blocks=num_host_blocks)
        self.model = Model(
            num_blocks, self.cache.retention.max_pinned_blocks, list(range(num_host_blocks))[::-1]
        )
        self.kv: list[BlockHash | None] = [None] * num_blocks  # what the memory of each block holds
        self.host_kv: list[BlockHash | None] = [None] * num_host_blocks
        self.mirror = Mirror()
        self.holders: list[Holder] = []
        self.kept: list[tuple[BlockHash, list[BlockHash]]] = []  # roots and chains that were pinned
        self.now = 0.0

    @rule(letters=LETTERS, salt=SALTS, look_first=st.booleans())
    def start(self, letters: str, salt: str, look_first: bool) -> None:
        """A request arrives. Without looking first, it computes again what may be indexed already."""
        root = root_hash(salt)
        self._start(root, chain_of(root, letters), look_first)

    @rule(letters=LETTERS, salt=SALTS, seconds=st.integers(1, 20), squeeze=st.booleans())
    def serve_and_keep(self, letters: str, salt: str, seconds: int, squeeze: bool) -> None:
        """A request comes, asks to keep its prefix, and goes; then, perhaps, others need all the room there is."""
        self.start(letters, salt, look_first=True)
        if self.holders:
            self.pin_running(len(self.holders) - 1, seconds)
            self.give_back(len(self.holders) - 1, head_first=False, keep=0)
        if squeeze:
            self.squeeze()

    @rule(position=st.integers(0, 20), look_first=st.booleans())
    @precondition(lambda self: self.kept)
    def come_back(self, position: int, look_first: bool) -> None:
        """A request for a prefix that was pinned at some time."""
        self._start(*self.kept[position % len(self.kept)], look_first)

    def _start(self, root: BlockHash, chain: list[BlockHash], look_first: bool) -> None:
        num_matched = self.cache.match(chain) if look_first else 0
        if look_first:
            assert num_matched == self.model.match(chain)
        table = self._take(chain[:num_matched])
        if table is None:
            return
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
            self.cache.pool.release(part)
            self.model.release(part)
        holder.table = holder.table[:keep]
        holder.chain = holder.chain[:keep]
        if not holder.table:
            self.holders.remove(holder)

    @rule()
    def squeeze(self) -> None:
        self.allocate(self.cache.num_available)

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        """Somebody needs many blocks for a moment."""
        available = self.model.num_free() + len(self.model.cached())
        assert self.cache.num_available == available
        taken = self.cache.pool.allocate(count)
        assert (taken is not None) == (count <= available)
        if taken is not None:
            assert len(set(taken)) == count
            self.model.evict_for(count)
            self._overwrite(taken)
            self.cache.pool.release(taken)

    @rule(letters=LETTERS, salt=SALTS, seconds=st.integers(-1, 5))
    def pin(self, letters: str, salt: str, seconds: int) -> None:
        self._pin(chain_of(root_hash(salt), letters), seconds)

    @rule(position=st.integers(0, 20), seconds=st.integers(1, 20))
    @precondition(lambda self: self.holders)
    def pin_running(self, position: int, seconds: int) -> None:
        holder = self.holders[position % len(self.holders)]
        self._pin(holder.chain, seconds)
        self.kept.append((holder.root, list(holder.chain)))

    def _pin(self, chain: list[BlockHash], seconds: int) -> None:
        self.model.expire(self.now)
        overflows = self.cache.retention.pins_given_up
        num_pinned = self.cache.retention.retain(chain, until=self.now + seconds, now=self.now)
        if seconds > 0:
            self.model.pin(chain, self.now + seconds)
            self._adopt_overflow(self.cache.retention.pins_given_up - overflows)
            known = chain[: self.model.match(chain)]
            on_device = [self.model.index[key] for key in known if key in self.model.index]
            num_stored = len(known) - len(on_device)
            unpinned = sum(entry.pinned_until is None for entry in on_device)
            with_room = len(on_device) - max(0, unpinned - len(self.model.free_slots))
            assert num_pinned == num_stored + with_room
        else:
            assert num_pinned == 0

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        assert self.cache.retention.expire(self.now) == self.model.expire(self.now)

    @rule(num_available=st.integers(0, 12))
    def make_pins_yield(self, num_available: int) -> None:
        demoted = self.cache.retention.pins_given_up
        self.cache.retention.give_way(num_available)
        with_pin = sum(entry.pinned_until is not None for entry in self.model.index.values())
        num_given_up = self.cache.retention.pins_given_up - demoted
        assert self.cache.num_available >= num_available or num_given_up == with_pin
        self._adopt_overflow(num_given_up, expected=num_given_up)

    @rule()
    def take_events(self) -> None:
        self.mirror.apply(self.cache.take_events())
        assert self.mirror.hashes == {*self.model.index, *self.model.host}

    @rule(rarely=st.integers(0, 4))
    def clear(self, rarely: int) -> None:
        if rarely:
            return
        self.cache.pool.clear()
        self.model.index.clear()
        self.model.free_slots += [stored.slot for stored in self.model.host.values()]
        self.model.host.clear()

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.pool.check_integrity([holder.table for holder in self.holders])
        cache, model = self.cache, self.model
        assert {key: block.block_id for key, block in cache.pool.index.items()} == {
            key: entry.block_id for key, entry in model.index.items()
        }
        assert {key: slot.block_id for key, slot in cache.pool.host.index.items()} == {
            key: stored.slot for key, stored in model.host.items()
        }
        assert cache.pool.num_free == model.num_free()
        assert cache.pool.num_cached == len(model.cached())
        assert cache.pool.num_pinned == len(model.pinned())
        assert cache.pool.num_active == sum(count > 0 for count in model.references.values())
        assert (
            cache.pool.num_free + cache.pool.num_cached + cache.pool.num_pinned + cache.pool.num_active
            == cache.num_blocks
        )

    def _grow(self, holder: Holder, block_hash: BlockHash | None) -> None:
        fresh = self.cache.pool.allocate(1)
        if fresh is None:
            assert self.model.num_free() + len(self.model.cached()) == 0
            return
        self.model.evict_for(1)
        self._overwrite(fresh)
        (block_id,) = fresh
        assert not self.model.references[block_id]
        self.model.references[block_id] = 1
        parent = holder.chain[-1] if holder.chain else holder.root
        if block_hash is not None and len(holder.chain) == len(holder.table):
            self.cache.publish(block_id, block_hash, parent)
            stored = self.model.host.pop(block_hash, None)
            if stored is not None:
                self.model.free_slots.append(stored.slot)
            promise = None if stored is None else stored.promise
            self.model.index.setdefault(block_hash, Entry(block_id, parent, promise=promise))
            self.kv[block_id] = block_hash
            holder.chain.append(block_hash)
        holder.table.append(block_id)

    def _take(self, chain: list[BlockHash]) -> list[int] | None:
        """Take a reference on every block of a matched prefix, wherever it is; None if there is no room for that."""
        away = in_host_memory(self.cache, chain)
        assert away == [block_hash for block_hash in chain if block_hash in self.model.host]
        here = [block_hash for block_hash in chain if block_hash not in away]
        acquired = self.cache.pool.acquire(here)
        assert acquired == [self.model.index[block_hash].block_id for block_hash in here]
        self.model.references.update(acquired)
        if len(away) > self.cache.num_available:
            self.cache.pool.release(acquired)
            self.model.release(acquired)
            return None
        restored = self.cache.pool.restore(away)
        self.model.restore(away)
        for block_hash, block_id in zip(away, restored, strict=True):
            self.model.index[block_hash].block_id = block_id
        self.model.references.update(restored)
        self._copy()
        return [self.model.index[block_hash].block_id for block_hash in chain]

    def _copy(self) -> None:
        """What an executor does before a step."""
        for copy in self.cache.take_copies():
            if copy.to_host:
                self.host_kv[copy.host_slot] = self.kv[copy.block_id]
            else:
                self.kv[copy.block_id] = self.host_kv[copy.host_slot]
        for block_hash, block in self.cache.pool.index.items():
            assert self.kv[block.block_id] == block_hash, "a block holds what it should not"
        for block_hash, slot in self.cache.pool.host.index.items():
            assert self.host_kv[slot.block_id] == block_hash, "a slot holds what it should not"

    def _overwrite(self, block_ids: list[int]) -> None:
        self._copy()
        for block_id in block_ids:
            self.kv[block_id] = None

    def _adopt_overflow(self, num_overflows: int, expected: int | None = None) -> None:
        """Give up as many pins in the model as the cache did, after checking that it had to and chose rightly."""
        with_pin = [key for key, entry in self.model.index.items() if entry.pinned_until is not None]
        if expected is None:
            expected = max(0, len(with_pin) - self.model.max_pinned)
        assert num_overflows == expected
        given_up = [key for key in with_pin if self.cache.pool.index[key].pinned_until is None]
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


CacheMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=50, deadline=None
)
TestRandomOperations = CacheMachine.TestCase
