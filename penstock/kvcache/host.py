"""Keeps blocks that leave the device in slots of host memory. Knows ids and hashes, no bytes.

Retained blocks leave the device before their time: their slots carry a pin until the retention ends. All others are
plain: they were evicted from the device. When all slots are in use, the oldest plain block is dropped, which is the
deepest of its chain; without plain blocks, the retained block with the least time left, deepest first. So the rest of
a chain can still be matched.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import Block, IntegrityError, RetentionTerm
from penstock.kvcache.eviction import PinHeap


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
