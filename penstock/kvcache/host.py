"""Keeps blocks that leave the device before their time in slots of host memory. Knows ids and hashes, no bytes.

Only retained blocks go to host memory, so every slot in use carries a pin until its retention ends. When all slots
are in use, the block with the least time left is dropped, deepest block first, so that what is left of a chain can
still be matched.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.core.hashing import BlockHash
from penstock.kvcache.block import Block, IntegrityError
from penstock.kvcache.eviction import PinHeap


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = [Block(slot) for slot in range(num_slots)]
        self._free = list(range(num_slots - 1, -1, -1))
        self.index: dict[BlockHash, Block] = {}  # hash to slot; only this class changes it
        self._pins = PinHeap(self._slots)
        self.num_lost = 0  # dropped before their time, though a client had asked to retain them

    def __len__(self) -> int:
        return len(self.index)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def store(self, block: Block) -> BlockHash | None:
        """Store a retained block, unless every stored block has more time left. Returns the hash that is lost, which
        is that of the block itself or of the block that made room; None while there are free slots."""
        assert block.block_hash is not None
        assert block.term is not None
        lost: BlockHash | None = None
        if not self._free:
            weakest = self._weakest(block)
            assert weakest.term is not None
            self.num_lost += weakest.term.was_asked_for
            lost = weakest.block_hash
            assert lost is not None
            if weakest is block:
                return lost
            self.free(self.take(lost))
        slot = self._slots[self._free.pop()]
        slot.block_hash, slot.parent, slot.term = block.block_hash, block.parent, block.term
        self.index[block.block_hash] = slot
        self._pins.extend(slot)
        return lost

    def _weakest(self, block: Block) -> Block:
        """Return the block to be dropped, among this block and the stored ones."""
        if not self.index:  # there are no slots, or the contents of all are being restored
            return block
        held = self._pins.first_to_end()
        assert held.term is not None
        assert block.term is not None
        ours, other = block.term, held.term
        return block if (ours.until, -ours.depth) <= (other.until, -other.depth) else held

    def take(self, block_hash: BlockHash) -> Block:
        """Remove a block. Its slot keeps the contents, and is not used again before `free`."""
        slot = self.index.pop(block_hash)
        self._pins.end(slot)
        return slot

    def free(self, slot: Block) -> None:
        slot.block_hash = slot.parent = slot.term = None
        self._free.append(slot.block_id)

    def prolong(self, block_hash: BlockHash, until: float, *, was_asked_for: bool) -> bool:
        """Keep a block at least until a time. Returns False when the block is not in host memory."""
        slot = self.index.get(block_hash)
        if slot is None:
            return False
        assert slot.term is not None
        term = slot.term
        slot.term = replace(
            term, until=max(term.until, until), was_asked_for=term.was_asked_for or was_asked_for
        )
        self._pins.extend(slot)
        return True

    def expire(self, now: float) -> list[BlockHash]:
        """Drop the blocks whose time is over, and return their hashes."""
        dropped = []
        while (slot := self._pins.pop_expired(now)) is not None:
            assert slot.block_hash is not None
            del self.index[slot.block_hash]
            dropped.append(slot.block_hash)
            self.free(slot)
        return dropped

    def clear(self) -> None:
        for block_hash in list(self.index):
            self.free(self.take(block_hash))

    def check(self) -> None:
        """Raise unless every slot is free, or holds one indexed and pinned block."""
        self._pins.check()
        if len(set(self._free)) != len(self._free) or len(self._free) + len(self.index) != self.num_slots:
            raise IntegrityError("a slot of host memory is neither free nor in use, or both")
        for block_hash, slot in self.index.items():
            if slot.block_hash != block_hash or slot is not self._slots[slot.block_id]:
                raise IntegrityError(f"a hash leads to host slot {slot.block_id}, which holds something else")
            if slot.term is None or slot.pinned_until != slot.term.until:
                raise IntegrityError(f"host slot {slot.block_id} is not pinned for as long as it is retained")
        for slot_id in self._free:
            if self._slots[slot_id].block_hash is not None or self._slots[slot_id].pinned_until is not None:
                raise IntegrityError(f"host slot {slot_id} is free but holds something")
