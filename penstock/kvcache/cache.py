"""The block pool and its prefix index. Knows ids, hashes and reference counts; no tensor, token, request or
clock.

Every block is in exactly one state, which follows from three facts about it:

    state    references  indexed  pinned   becomes
    free     0           no       no       active by allocate
    active   1 or more   either   either   on last release: free if not indexed, pinned if pinned, else cached
    cached   0           yes      no       active by acquire; pinned by pin; free when evicted or cleared
    pinned   0           yes      yes      active by acquire; cached when the pin ends; free when cleared

"Indexed" means that the block is full, and its hash leads to it: any request with the same prefix may take a
reference, also while others hold one, and nothing is copied. A hash leads to one block. Whoever computes the
same prefix at the same time ends up with a private block, which becomes free on release.

A pin honours a promise to keep the block. When a pin must be given up before its time, the promise stays, and an
evicted block that is still promised goes to a slot of host memory, if there is one: `restore` brings it back. A
hash leads to a block or to a slot, never to both. What this means for bytes is a list of copies, for `take_copies`.

Methods that take hashes want them in chain order from the start of the chain. All work is O(1) per block, but
for an eviction, which is O(log) of the number of chain tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from penstock.core.hashing import BlockHash
from penstock.core.kv_events import KVEvent
from penstock.core.plan import BlockCopy, HalfCopy, KVCopy
from penstock.kvcache.block import Block, IntegrityError, Promise
from penstock.kvcache.events import EventLog
from penstock.kvcache.eviction import EvictionOrder
from penstock.kvcache.host import HostTier
from penstock.kvcache.integrity import check_cache
from penstock.kvcache.pins import PinBook


class KVCache:
    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        max_pinned_fraction: float = 0.5,
        num_host_blocks: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks and tokens in them, not {num_blocks} of {block_size}")
        if not 0.0 <= max_pinned_fraction <= 1.0:
            raise ValueError(f"max_pinned_fraction is a share from 0 to 1, not {max_pinned_fraction}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_pinned_blocks = int(num_blocks * max_pinned_fraction)

        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is reused first
        self._index: dict[BlockHash, Block] = {}
        self._cached = EvictionOrder(self._blocks, self._index)
        self._pins = PinBook(self._blocks)
        self._host = HostTier(num_host_blocks)
        self._copies: list[KVCopy] = []  # in the order of the decisions that need them
        self._events = EventLog(max_pending_hashes=2 * num_blocks + 1024)
        self._num_active = 0
        self._num_releases = 0
        self._now = -inf  # the latest time that anyone mentioned

        # Counters since construction.
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0  # blocks
        self.pins_demoted = (
            0  # pins given up before their time: over max_pinned_blocks, or to let a request run
        )
        self.copies_to_host = 0
        self.copies_from_host = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_active(self) -> int:
        return self._num_active

    @property
    def num_pinned(self) -> int:
        """Blocks held by a pin alone. A pinned block that requests use counts as active."""
        return self.num_blocks - len(self._free) - len(self._cached) - self._num_active

    @property
    def num_pins(self) -> int:
        """Blocks that carry a pin, active ones too."""
        return len(self._pins)

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_slots

    @property
    def num_host_blocks_used(self) -> int:
        return len(self._host)

    @property
    def promises_lost(self) -> int:
        """Kept blocks that were dropped before their time, because neither tier had room."""
        return self._host.num_kept_lost

    @property
    def usage(self) -> float:
        """The share of blocks that no request can have now: active or pinned."""
        return 1.0 - self.num_available / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are indexed, here or in host memory. Changes nothing."""
        index, host = self._index, self._host.index
        for position, block_hash in enumerate(hashes):
            if block_hash not in index and block_hash not in host:
                return position
        return len(hashes)

    def in_host_memory(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Those of a matched prefix that must be restored before they can be used."""
        host = self._host.index
        return [block_hash for block_hash in hashes if block_hash in host] if host else []

    def acquire(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Take a reference on each of these blocks. Raises, and changes nothing, if one is not on the device."""
        try:
            blocks = [self._index[block_hash] for block_hash in hashes]
        except KeyError as missing:
            raise IntegrityError(f"block {missing} is not indexed: match before acquiring") from None
        for block in blocks:
            block.references += 1
            if block.references == 1:
                self._num_active += 1
                if block.pinned_until is None:
                    self._cached.remove(block)
        return [block.block_id for block in blocks]

    def allocate(self, count: int) -> list[int] | None:
        """Blocks with unknown contents and one reference each, evicting cached ones as needed. None, and no
        change, when there are not that many."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        free = self._free
        if count > len(free) + len(self._cached):
            return None
        while len(free) < count:
            self._evict(self._cached.oldest_tail())
        blocks = self._blocks
        taken = [free.pop() for _ in range(count)]
        for block_id in taken:
            blocks[block_id].references = 1
        self._num_active += count
        return taken

    def restore(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Bring blocks back from host memory, with one reference each. There must be as many available."""
        # Their slots stay out of use meanwhile: making room may send other blocks to host memory.
        slots = [self._host.take(block_hash) for block_hash in hashes]
        block_ids = self.allocate(len(slots))
        if block_ids is None:
            raise IntegrityError(f"{len(slots)} blocks are restored, and {self.num_available} are available")
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._move_in(slot, self._blocks[block_id])
            self._copies.append(BlockCopy(block_id, slot.block_id, to_host=False))
        self.copies_from_host += len(slots)
        return block_ids

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        """Half a block goes to the start of another block, or of its own."""
        self._copies.append(HalfCopy(block_id, offset, to_block_id))

    def take_copies(self) -> tuple[KVCopy, ...]:
        """The copies that what was decided since the last call needs, in the order to make them: after all
        steps planned before, and before anything is written that is planned from now on."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies

    @property
    def has_copies(self) -> bool:
        """Whether blocks that were given away still hold what is to be copied out of them."""
        return bool(self._copies)

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take another reference on each of these active blocks, whether or not they can be found."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not block.references:
                raise IntegrityError(f"block {block_id} is held but nobody else holds it")
            block.references += 1

    def publish(self, block_id: int, block_hash: BlockHash, parent: BlockHash) -> None:
        """Index an active block that is now full of known tokens. If another block already holds that hash,
        the index keeps the older one, and this block stays private."""
        block = self._blocks[block_id]
        if not block.references:
            raise IntegrityError(f"block {block_id} is published but nobody holds it")
        if block.block_hash is not None and block.block_hash != block_hash:
            raise IntegrityError(f"block {block_id} is published twice, with different contents")
        if not self.enable_prefix_caching or block_hash in self._index:
            return
        if block_hash in self._host.index:  # computed anew, though it was there: the older copy is of no use
            self._move_in(self._host.take(block_hash), block)
            return
        block.block_hash = block_hash
        block.parent = parent
        self._index[block_hash] = block
        self._events.stored(block_hash, parent)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Active blocks whose contents were never written: whoever holds them keeps them, and nobody else finds
        them."""
        for block in (self._blocks[block_id] for block_id in block_ids):
            if block.block_hash is None:
                continue
            if not block.references:
                raise IntegrityError(f"block {block.block_id} is withdrawn but nobody holds it")
            del self._index[block.block_hash]
            if block.pinned_until is not None:
                self._pins.end(block)
            self._events.removed(block.block_hash)
            block.block_hash = block.parent = block.promise = None

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference each; ids in chain order. A block that nobody holds any more stays reusable
        if indexed, and is free at once if not."""
        blocks = self._blocks
        for block_id in reversed(block_ids):
            block = blocks[block_id]
            if block.references > 1:
                block.references -= 1
                continue
            if not block.references:
                raise IntegrityError(f"block {block_id} is released but nobody holds it")
            block.references = 0
            self._num_active -= 1
            if block.block_hash is None:
                self._free.append(block_id)
                continue
            self._num_releases += 1
            block.last_use = self._num_releases
            if block.pinned_until is None:
                self._cached.add(block)

    def pin(self, hashes: Sequence[BlockHash], until: float, now: float) -> int:
        """Promise to keep the indexed part of this prefix until a time, and say for how many of its blocks there is
        room: those that are pinned, are in host memory, or find a free slot there if they are evicted. Extends
        promises, never shortens them. Past `max_pinned_blocks`, the pins with the least time left are given up,
        which may include these."""
        self.expire_pins(now)
        if until <= now:
            return 0
        blocks = []
        num_in_host_memory = 0
        for depth, block_hash in enumerate(hashes):
            block = self._index.get(block_hash)
            if block is not None:
                self._promise(block, depth, until)
                blocks.append(block)
            elif self._host.prolong(block_hash, until, is_kept=True):
                num_in_host_memory += 1
            else:
                break
        self._give_up_pins(len(self._pins) - self.max_pinned_blocks)
        num_pinned = sum(block.pinned_until is not None for block in blocks)
        num_unpinned = len(blocks) - num_pinned
        return num_pinned + num_in_host_memory + min(num_unpinned, self._host.num_free)

    def promise(self, hashes: Sequence[BlockHash], until: float, now: float) -> None:
        """As a pin that was given up at once: these blocks may be evicted, and go to host memory if they are. Earlier
        promises stay as they are."""
        self.expire_pins(now)
        for depth, block_hash in enumerate(hashes):
            block = self._index.get(block_hash)
            if block is None:
                self._host.prolong(block_hash, until, is_kept=False)
            elif block.promise is None or block.promise.until <= now:
                block.promise = Promise(until, depth, is_kept=False)

    def keep(self, hashes: Sequence[BlockHash], ttl_s: float, since: float, now: float) -> int:
        """Pin a prefix until `ttl_s` after `since`, and remember that it ends here: `kept_for_s` will find it.
        Returns what `pin` does."""
        num_pinned = self.pin(hashes, since + ttl_s, now)
        last = self._index.get(hashes[-1]) or self._host.index.get(hashes[-1])
        if last is not None and last.promise is not None and since + ttl_s > now:
            longest = max(ttl_s, last.promise.entry_ttl_s or 0.0)
            last.promise = replace(last.promise, entry_ttl_s=longest)
        return num_pinned

    def kept_for_s(self, block_hash: BlockHash, now: float) -> float | None:
        """The time to live of the kept prefix that ends with this block; None if none does, or its time is over."""
        block = self._index.get(block_hash) or self._host.index.get(block_hash)
        promise = None if block is None else block.promise
        return None if promise is None or promise.until <= now else promise.entry_ttl_s

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has come, and say how many. Until this is called they hold."""
        if now > self._now:
            self._now = now
        num_expired = 0
        while (block := self._pins.pop_expired(now)) is not None:
            block.promise = None
            self._unpinned(block)
            num_expired += 1
        if self._host.index:
            for block_hash in self._host.expire(now):
                self._events.removed(block_hash)
        return num_expired

    def make_pins_yield(self, num_available: int) -> None:
        """Give up pins, those with the least time left first, until so many blocks are available, or no pin is
        left."""
        while self.num_available < num_available and len(self._pins):
            self._give_up_pins(1)

    def record_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.lookup_tokens += num_tokens
        self.hit_tokens += num_hit_tokens

    def take_events(self) -> list[KVEvent]:
        """What happened to the index since the last call, in order. When nobody took events for so long that
        catching up would cost more than starting anew, this is `cleared` and then everything that is
        indexed."""
        return self._events.take(self._indexed())

    def restart_events(self) -> None:
        """A reader of events has missed some: the next `take_events` is `cleared` and all that is indexed."""
        self._events.restart()

    def clear(self) -> None:
        """Forget every prefix, pins included. Active blocks stay with their holders but can no longer be
        found, and are free once released."""
        self._pins.clear()
        self._cached.clear()
        self._host.clear()
        for block in self._index.values():
            block.block_hash = block.parent = block.promise = None
            if not block.references:
                self._free.append(block.block_id)
        self._index.clear()
        self._events.cleared()

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise IntegrityError unless every block is in exactly one state and all records agree. With the
        block tables of everyone who holds references, also that the reference counts are exactly those."""
        check_cache(self._blocks, self._free, self._index, tables)
        self._cached.check()
        self._pins.check()
        self._host.check()
        if not self._index.keys().isdisjoint(self._host.index):
            raise IntegrityError("a hash leads to a block and to a slot of host memory")
        if self._num_active != sum(block.references > 0 for block in self._blocks):
            raise IntegrityError(f"the count of active blocks, {self._num_active}, is wrong")
        if len(self._pins) > self.max_pinned_blocks:
            raise IntegrityError(f"{len(self._pins)} blocks are pinned, and {self.max_pinned_blocks} may be")

    def _evict(self, block: Block) -> None:
        block_hash = block.block_hash
        assert block_hash is not None
        del self._index[block_hash]
        self._cached.remove(block)
        lost: BlockHash | None = block_hash
        if block.promise is not None and block.promise.until > self._now:
            lost = self._move_out(block)
        if lost is not None:
            self._events.removed(lost)
        block.block_hash = block.parent = block.promise = None
        self._free.append(block.block_id)
        self.evictions += 1

    def _move_out(self, block: Block) -> BlockHash | None:
        """A promised block leaves the device; returns the hash that is in neither tier any more, if any."""
        lost = self._host.store(block)
        if lost != block.block_hash:
            assert block.block_hash is not None
            slot = self._host.index[block.block_hash]
            self._copies.append(BlockCopy(block.block_id, slot.block_id, to_host=True))
            self.copies_to_host += 1
        return lost

    def _move_in(self, slot: Block, block: Block) -> None:
        """An active block takes over what a slot of host memory held."""
        assert slot.block_hash is not None
        block.block_hash, block.parent, block.promise = slot.block_hash, slot.parent, slot.promise
        self._index[slot.block_hash] = block
        self._host.free(slot)

    def _promise(self, block: Block, depth: int, until: float) -> None:
        """Pin a block until then, or for as long as it was promised before."""
        was_cached = not block.references and block.pinned_until is None
        promise = block.promise
        if promise is None or promise.until <= self._now:
            block.promise = Promise(until, depth)
        else:
            block.promise = replace(promise, until=max(promise.until, until), is_kept=True)
        self._pins.extend(block)
        if was_cached:
            self._cached.remove(block)

    def _give_up_pins(self, count: int) -> None:
        """The blocks stay promised: they go to host memory when they are evicted."""
        for _ in range(count):
            self._unpinned(self._pins.pop_first_to_end())
            self.pins_demoted += 1

    def _unpinned(self, block: Block) -> None:
        """A block lost its pin; unless somebody holds it, it is an ordinary cached block, as old as its last
        use."""
        if not block.references:
            self._cached.add(block)

    def _indexed(self) -> Iterator[tuple[BlockHash, BlockHash]]:
        for index in (self._index.items(), self._host.index.items()):
            for block_hash, block in index:
                if block.parent is not None:
                    yield block_hash, block.parent
