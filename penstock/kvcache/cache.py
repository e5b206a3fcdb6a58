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

Methods that take hashes want them in chain order from the start of the chain. All work is O(1) per block, but
for an eviction, which is O(log) of the number of chain tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.kv_events import KVEvent
from penstock.kvcache.block import Block, IntegrityError
from penstock.kvcache.events import EventLog
from penstock.kvcache.eviction import EvictionOrder
from penstock.kvcache.hashing import BlockHash
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
        self._events = EventLog(max_pending_hashes=2 * num_blocks + 1024)
        self._num_active = 0
        self._num_releases = 0

        # Counters since construction.
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0  # blocks
        self.pin_overflows = 0  # pins given up because max_pinned_blocks was reached

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
    def usage(self) -> float:
        """The share of blocks that no request can have now: active or pinned."""
        return 1.0 - self.num_available / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that were found."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading hashes are indexed. Changes nothing."""
        index = self._index
        for position, block_hash in enumerate(hashes):
            if block_hash not in index:
                return position
        return len(hashes)

    def acquire(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Take a reference on each block of a matched prefix. Raises, and changes nothing, if one is not
        indexed."""
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
        block.block_hash = block_hash
        block.parent = parent
        self._index[block_hash] = block
        self._events.stored(block_hash, parent)

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
        """Keep the indexed part of this prefix from eviction until a time, and say how many of its blocks are
        pinned now. Extends pins, never shortens them. Past `max_pinned_blocks`, the pins with the least time
        left are given up, which may include these."""
        self.expire_pins(now)
        if until <= now:
            return 0
        blocks = [self._index[block_hash] for block_hash in hashes[: self.match(hashes)]]
        for depth, block in enumerate(blocks):
            was_cached = not block.references and block.pinned_until is None
            self._pins.extend(block, depth, until)
            if was_cached:
                self._cached.remove(block)
        while len(self._pins) > self.max_pinned_blocks:
            self._unpinned(self._pins.pop_first_to_end())
            self.pin_overflows += 1
        return sum(block.pinned_until is not None for block in blocks)

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has come, and say how many. Until this is called they hold."""
        num_expired = 0
        while (block := self._pins.pop_expired(now)) is not None:
            self._unpinned(block)
            num_expired += 1
        return num_expired

    def record_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.lookup_tokens += num_tokens
        self.hit_tokens += num_hit_tokens

    def take_events(self) -> list[KVEvent]:
        """What happened to the index since the last call, in order. When nobody took events for so long that
        catching up would cost more than starting anew, this is `cleared` and then everything that is
        indexed."""
        return self._events.take(
            (block_hash, block.parent)
            for block_hash, block in self._index.items()
            if block.parent is not None
        )

    def clear(self) -> None:
        """Forget every prefix, pins included. Active blocks stay with their holders but can no longer be
        found, and are free once released."""
        self._pins.clear()
        self._cached.clear()
        for block in self._index.values():
            block.block_hash = block.parent = None
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
        if self._num_active != sum(block.references > 0 for block in self._blocks):
            raise IntegrityError(f"the count of active blocks, {self._num_active}, is wrong")
        if len(self._pins) > self.max_pinned_blocks:
            raise IntegrityError(f"{len(self._pins)} blocks are pinned, and {self.max_pinned_blocks} may be")

    def _evict(self, block: Block) -> None:
        assert block.block_hash is not None
        del self._index[block.block_hash]
        self._cached.remove(block)
        self._events.removed(block.block_hash)
        block.block_hash = block.parent = None
        self._free.append(block.block_id)
        self.evictions += 1

    def _unpinned(self, block: Block) -> None:
        """A block lost its pin; unless somebody holds it, it is an ordinary cached block, as old as its last
        use."""
        if not block.references:
            self._cached.add(block)
