"""Decides which cached block is evicted next, and which pin ends next. Knows expiry times as plain numbers and never
reads a clock.

When a pin ends before its parent's pin, the rest of the chain can still be matched; the reverse would not. Chains
are pinned from their root with one expiry, and pins are only ever extended, so a parent's pin never ends
first; among equal expiries the deepest block loses its pin first.

The rule of eviction: among cached blocks that no other cached block follows (the tails), the least recently used goes
first. A chain therefore shrinks from its end, and the rest always starts at its root and can still be matched. Since
a tree of blocks has a leaf, a tail exists whenever anything is cached: every cached block can be evicted.

Tails sit in a heap by last use. Blocks inside a chain are in no heap. They are only counted, by the hash that they
follow. Releasing or reusing a chain of any length therefore costs one heap entry or none. A block that stops being a
tail leaves a stale entry behind, which is skipped later.

`HostTier` keeps blocks that leave the device in slots of host memory. Retained blocks leave the device before their
time: their slots carry a pin until the retention ends. All others are plain: they were evicted from the device. When
all slots are in use, the oldest plain block is dropped, which is the deepest of its chain; without plain blocks, the
retained block with the least time left, deepest first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import Block, BlockState, IntegrityError, RetentionTerm


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = [Block(slot) for slot in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))
        self.index: dict[BlockHash, Block] = {}  # hash to slot; only this class changes it
        self._pins = PinHeap(self._slots, len(self._slots))
        self._plain: OrderedDict[BlockHash, Block] = OrderedDict()  # not retained, the oldest first
        self.num_lost = 0  # dropped before their time, though a client had asked to retain them

    def __len__(self) -> int:
        return len(self.index)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def store(self, block: Block) -> BlockHash | None:
        """Store a block, unless every stored block is worth more. Returns the lost hash: the block's own hash, or
        the hash of the stored block that was dropped for it; None while there are free slots."""
        assert block.block_hash is not None
        lost: BlockHash | None = None
        if not self._free:
            weakest = self._weakest(block)
            self.num_lost += weakest.term is not None and weakest.term.was_asked_for
            lost = weakest.block_hash
            assert lost is not None
            if weakest is block:
                return lost
            self.free(self.take(lost))
        slot = self._slots[self._free.pop()]
        slot.block_hash, slot.parent, slot.term = block.block_hash, block.parent, block.term
        self.index[block.block_hash] = slot
        if slot.term is None:
            self._plain[block.block_hash] = slot
        else:
            self._pins.extend(slot)
        return lost

    def _weakest(self, block: Block) -> Block:
        """Return the block to be dropped, among this block and the stored ones."""
        if self._plain:
            return next(iter(self._plain.values()))
        if (
            not self.index or block.term is None
        ):  # there are no slots, or the contents of all are being restored
            return block
        held = self._pins.first_to_end()
        assert held.term is not None
        assert block.term is not None
        ours, other = block.term, held.term
        return block if (ours.until, -ours.depth) <= (other.until, -other.depth) else held

    def hash_at(self, slot: int) -> BlockHash | None:
        """Return the hash of the block in a slot; None if the slot is empty."""
        return self._slots[slot].block_hash

    def take(self, block_hash: BlockHash) -> Block:
        """Remove a block. Its slot keeps the contents, and is not used again before `free`."""
        slot = self.index.pop(block_hash)
        if self._plain.pop(block_hash, None) is None:
            self._pins.end(slot)
        return slot

    def free(self, slot: Block) -> None:
        slot.block_hash = slot.parent = slot.term = None
        self._free.append(slot.block_id)

    def prolong(self, block_hash: BlockHash, depth: int, until: float, *, was_asked_for: bool) -> bool:
        """Keep a block at least until a time. Returns False when the block is not in host memory."""
        slot = self.index.get(block_hash)
        if slot is None:
            return False
        self._plain.pop(block_hash, None)
        term = slot.term or RetentionTerm(until, depth, was_asked_for=was_asked_for)
        slot.term = replace(
            term, until=max(term.until, until), was_asked_for=term.was_asked_for or was_asked_for
        )
        self._pins.extend(slot)
        return True

    def expire(self, now: float, *, keeps: bool) -> list[BlockHash]:
        """Drop the blocks whose time is over, and return their hashes. With `keeps`, they stay as plain blocks."""
        dropped: list[BlockHash] = []
        while (slot := self._pins.pop_expired(now)) is not None:
            assert slot.block_hash is not None
            if keeps:
                slot.term = None
                self._plain[slot.block_hash] = slot
                continue
            del self.index[slot.block_hash]
            dropped.append(slot.block_hash)
            self.free(slot)
        return dropped

    def clear(self) -> None:
        for block_hash in list(self.index):
            self.free(self.take(block_hash))

    def check(self) -> None:
        """Raise unless every slot is free, or holds one indexed block that is pinned or plain."""
        self._pins.check()
        if len(set(self._free)) != len(self._free) or len(self._free) + len(self.index) != self.num_slots:
            raise IntegrityError("a slot of host memory is neither free nor in use, or both")
        for block_hash, slot in self.index.items():
            if slot.block_hash != block_hash or slot is not self._slots[slot.block_id]:
                raise IntegrityError(f"a hash leads to host slot {slot.block_id}, which holds something else")
            if (slot.term is None) != (self._plain.get(block_hash) is slot):
                raise IntegrityError(f"host slot {slot.block_id} is retained and plain, or neither")
            if slot.pinned_until != (None if slot.term is None else slot.term.until):
                raise IntegrityError(f"host slot {slot.block_id} is not pinned for as long as it is retained")
        for slot_id in self._free:
            if self._slots[slot_id].block_hash is not None or self._slots[slot_id].pinned_until is not None:
                raise IntegrityError(f"host slot {slot_id} is free but holds something")


class PinHeap:
    """Holds every pin. The pin of an active block takes effect when the block's last reference is released."""

    def __init__(self, blocks: list[Block], max_blocks: int) -> None:
        """`blocks` grows up to `max_blocks`."""
        self._blocks = blocks
        self._count = 0
        self._expiries: list[
            tuple[float, int, int]
        ] = []  # heap of (until, -depth, block id), stale ones included
        self._max_entries = 2 * max_blocks + 64

    def __len__(self) -> int:
        return self._count

    def extend(self, block: Block) -> None:
        """Pin a block for as long as it is retained, or let its pin end later; never earlier."""
        term = block.term
        assert term is not None
        if block.pinned_until is None:
            self._count += 1
        elif block.pinned_until >= term.until:
            return
        block.pinned_until = term.until
        if len(self._expiries) >= self._max_entries:
            self._expiries = sorted({entry for entry in self._expiries if self._is_current(entry)})
        heapq.heappush(self._expiries, (term.until, -term.depth, block.block_id))

    def pop_expired(self, now: float) -> Block | None:
        """Remove the pin that ended first; return None when every pin has time left."""
        first = self._first()
        return self._take() if first is not None and first[0] <= now else None

    def first_to_end(self) -> Block:
        """Return the block whose pin has the least time left."""
        first = self._first()
        if first is None:
            raise IntegrityError("nothing is pinned, so no pin can be given up")
        return self._blocks[first[2]]

    def pop_first_to_end(self) -> Block:
        """Remove the pin with the least time left."""
        self.first_to_end()
        return self._take()

    def end(self, block: Block) -> None:
        """Remove the pin of this block."""
        if block.pinned_until is None:
            raise IntegrityError(f"block {block.block_id} is not pinned")
        block.pinned_until = None
        self._count -= 1

    def clear(self) -> None:
        for _, _, block_id in self._expiries:
            self._blocks[block_id].pinned_until = None
        self._expiries.clear()
        self._count = 0

    def check(self) -> None:
        pinned = {block.block_id for block in self._blocks if block.pinned_until is not None}
        current = {entry[2] for entry in self._expiries if self._is_current(entry)}
        if len(pinned) != self._count or pinned != current:
            raise IntegrityError(
                f"blocks {sorted(pinned ^ current)} are pinned but not in the heap, or the reverse"
            )

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        until, negative_depth, block_id = entry
        block = self._blocks[block_id]
        # The depth must match too: a block may have been reused, and pinned until the same time.
        return block.pinned_until == until and block.term is not None and block.term.depth == -negative_depth

    def _first(self) -> tuple[float, int, int] | None:
        while self._expiries and not self._is_current(self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0] if self._expiries else None

    def _take(self) -> Block:
        block = self._blocks[heapq.heappop(self._expiries)[2]]
        block.pinned_until = None
        self._count -= 1
        return block


class EvictionOrder:
    def __init__(self, blocks: list[Block], index: Mapping[BlockHash, Block], max_blocks: int) -> None:
        """`blocks` grows up to `max_blocks`."""
        self._blocks = blocks
        self._index = index  # read only: finds the parent of a tail
        self._num_cached = 0
        self._cached_children: dict[BlockHash, int] = {}  # parent hash -> cached blocks that follow it
        self._tails: list[tuple[int, int]] = []  # heap of (last_use, block id), stale entries included
        self._max_entries = 2 * max_blocks + 64

    def __len__(self) -> int:
        return self._num_cached

    def add(self, block: Block) -> None:
        """Add a block that became cached. Its `last_use` says when it was last released."""
        parent = block.parent
        children = self._cached_children
        assert parent is not None
        self._num_cached += 1
        children[parent] = children.get(parent, 0) + 1
        if block.block_hash not in children:
            self._push(block)

    def remove(self, block: Block) -> None:
        """Remove a block that is no longer cached. Call this after the block's state has changed."""
        parent = block.parent
        children = self._cached_children
        assert parent is not None
        self._num_cached -= 1
        remaining = children[parent] - 1
        if remaining:
            children[parent] = remaining
            return
        del children[parent]
        above = self._index.get(parent)
        if above is not None and not above.references and above.pinned_until is None:
            self._push(above)

    def oldest_tail(self) -> Block:
        """Return the block to evict next, which stays in the order until `remove`."""
        while self._tails:
            last_use, block_id = self._tails[0]
            if self._is_tail(last_use, block_id):
                return self._blocks[block_id]
            heapq.heappop(self._tails)
        raise IntegrityError("nothing is cached, so nothing can be evicted")

    def clear(self) -> None:
        self._num_cached = 0
        self._cached_children.clear()
        self._tails.clear()

    def check(self) -> None:
        """Compare the counts and the heap with the records of the blocks."""
        cached = [block for block in self._blocks if block.state is BlockState.CACHED]
        children: dict[BlockHash, int] = {}
        for block in cached:
            assert block.parent is not None
            children[block.parent] = children.get(block.parent, 0) + 1
        if self._num_cached != len(cached):
            raise IntegrityError(f"{len(cached)} blocks are cached, but {self._num_cached} were counted")
        if children != self._cached_children:
            raise IntegrityError("the counts of cached children are wrong")
        queued = {block_id for last_use, block_id in self._tails if self._is_tail(last_use, block_id)}
        tails = {block.block_id for block in cached if block.block_hash not in children}
        if queued != tails:
            raise IntegrityError(f"blocks {sorted(queued ^ tails)} are tails but not queued, or the reverse")

    def _is_tail(self, last_use: int, block_id: int) -> bool:
        block = self._blocks[block_id]
        return (
            block.last_use == last_use
            and not block.references
            and block.block_hash is not None
            and block.pinned_until is None
            and block.block_hash not in self._cached_children
        )

    def _push(self, block: Block) -> None:
        if len(self._tails) >= self._max_entries:
            self._tails = sorted({entry for entry in self._tails if self._is_tail(*entry)})
        heapq.heappush(self._tails, (block.last_use, block.block_id))
