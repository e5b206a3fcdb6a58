"""Slots for the states of layers with a fixed state, such as state-space layers. Knows ids, hashes and recency; no
tensor, token or clock.

A state has the same size after one token as after a million, and every token changes all of it. So a request cannot
start from the state of a longer prefix: it needs a snapshot, a copy of the state as it was at the end of a block.

Every slot is in exactly one of three places:

    free      holds nothing that is needed
    active    belongs to a running request, and is overwritten by every step of that request
    snapshot  holds the state at the end of an indexed block, and any request with that prefix may start from it

`keep` asks for a snapshot of an active slot. The step that computes the state is planned at that time, so the copy is
made before the next step. Until then the snapshot is *due*, and requests that need the snapshot wait for one plan.
When a request stops at the end of a block, its slot becomes the snapshot, and nothing is copied.

The least recently used snapshot is evicted first. Snapshots of retained prefixes are evicted last, and move to host
memory if there is room. A snapshot is dropped together with its block.

Copies are made in the order of decisions, like copies of blocks, so a slot may be handed out again at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from penstock.core.hashing import BlockHash
from penstock.core.plan import StateCopy, StateSlots
from penstock.kvcache.block import Block, IntegrityError


class IndexedBlocks(Protocol):
    """The part of the block pool that states depend on."""

    now: float

    def find(self, block_hash: BlockHash) -> Block | None: ...

    def copy_state(self, copy: StateCopy) -> None: ...


class StatePool:
    def __init__(self, pool: IndexedBlocks, slots: StateSlots) -> None:
        if slots.num_slots < 1:
            raise ValueError(f"layers with states need slots, not {slots.num_slots}")
        self.num_slots = slots.num_slots
        self._pool = pool
        self._free = list(range(slots.num_slots - 1, -1, -1))
        self._active: set[int] = set()
        self._snapshots: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._due: dict[
            BlockHash, int
        ] = {}  # hash to the active slot that holds the state until the next plan
        self._num_host_slots = slots.num_host_slots
        self._free_host = list(range(slots.num_host_slots - 1, -1, -1))
        # Hash to host slot, least recently used first.
        self._in_host: OrderedDict[BlockHash, int] = OrderedDict()

        # Counters since construction.
        self.num_taken = 0  # snapshots
        self.num_used = 0  # requests that started from a snapshot
        self.num_lost = 0  # snapshots of retained prefixes that were dropped before their time

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_snapshots(self) -> int:
        """Return the number of snapshots on the device."""
        return len(self._snapshots)

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prefix end with a snapshot, one that is due included. Changes
        nothing."""
        for count in range(len(hashes), 0, -1):
            if self._has(hashes[count - 1]):
                return count
        return 0

    def is_due(self, block_hash: BlockHash) -> bool:
        """Return whether a snapshot does not exist yet, but will exist from the next plan on."""
        return block_hash in self._due

    def open(self, start: BlockHash | None) -> int:
        """Take a slot for a request that starts from a snapshot, or from nothing. There must be a slot that is not
        active."""
        source = None if start is None else self._snapshots.get(start)
        if start is not None and source is not None:
            self._snapshots.move_to_end(start)  # so that this snapshot is evicted last
        # An evicted snapshot may go to host memory, and must not replace this snapshot there.
        in_host = self._in_host.pop(start, None) if start is not None and source is None else None
        slot = self._take(may_drop_retained=True)
        if start is not None and in_host is not None:
            self._in_host[start] = in_host
        if slot is None:
            raise IntegrityError(f"all {self.num_slots} state slots are active")
        self._active.add(slot)
        if start is None:
            self._pool.copy_state(StateCopy(slot))
            return slot
        self.num_used += 1
        if source is not None:
            if slot != source:  # else the snapshot itself was evicted for its slot
                self._pool.copy_state(StateCopy(slot, source))
        elif in_host is not None:
            self._pool.copy_state(StateCopy(slot, in_host, from_host=True))
        else:
            raise IntegrityError("a request starts from a state that is not there: find it before opening")
        return slot

    def keep(self, slot: int, block_hash: BlockHash) -> None:
        """Ask for a snapshot of an active slot, as it is after the step that is being planned. The state is then at
        the end of the block with this hash."""
        if slot not in self._active:
            raise IntegrityError(f"a snapshot is taken of state slot {slot}, which is not active")
        if block_hash in self._snapshots:
            self._snapshots.move_to_end(block_hash)
        elif not self._has(block_hash) and self._is_indexed(block_hash):
            self._due[block_hash] = slot

    def take_due(self) -> None:
        """Take the snapshots that are due. Called at the start of each plan."""
        for block_hash, source in self._due.items():
            slot = self._take(may_drop_retained=self._is_retained(block_hash))
            if slot is not None:
                self._pool.copy_state(StateCopy(slot, source))
                self._snapshots[block_hash] = slot
                self.num_taken += 1
        self._due.clear()

    def close(self, slot: int, at: BlockHash | None = None) -> None:
        """Give back the slot of a request. With `at`, the state is at the end of the block with this hash, once the
        steps planned so far have run, and the slot becomes a snapshot."""
        if slot not in self._active:
            raise IntegrityError(f"state slot {slot} is given back, but no request holds it")
        self._active.remove(slot)
        due = next((block_hash for block_hash, source in self._due.items() if source == slot), None)
        if due is not None:
            del self._due[due]
        if at is None or self._has(at) or not self._is_indexed(at):
            self._free.append(slot)
        else:
            self._snapshots[at] = slot
            self.num_taken += 1

    def forget(self, block_hash: BlockHash) -> None:
        """Drop the snapshot of a block that is no longer indexed."""
        self._due.pop(block_hash, None)
        slot = self._snapshots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)
        slot = self._in_host.pop(block_hash, None)
        if slot is not None:
            self._free_host.append(slot)

    def clear(self) -> None:
        """Drop all snapshots."""
        for block_hash in [*self._due, *self._snapshots, *self._in_host]:
            self.forget(block_hash)

    def check_integrity(self, active: Collection[int | None] | None = None) -> None:
        """Raise IntegrityError unless every slot is in one place and every snapshot belongs to an indexed block. With
        the slots of all running requests, also check that these are the active ones."""
        slots = sorted([*self._free, *self._active, *self._snapshots.values()])
        if slots != list(range(self.num_slots)):
            raise IntegrityError(f"state slots are not in one place each: {slots}")
        if sorted([*self._free_host, *self._in_host.values()]) != list(range(self._num_host_slots)):
            raise IntegrityError("a state slot of host memory is neither free nor in use, or both")
        if not self._active.issuperset(self._due.values()):
            raise IntegrityError("a snapshot is due of a slot that no request holds")
        homes = (self._due, self._snapshots, self._in_host)
        if not all(self._is_indexed(block_hash) for home in homes for block_hash in home):
            raise IntegrityError("a snapshot belongs to a block that is not indexed")
        if len({block_hash for home in homes for block_hash in home}) != sum(map(len, homes)):
            raise IntegrityError("a block has two snapshots")
        if active is not None and set(active) != self._active:
            raise IntegrityError(f"state slots {self._active} are active, and requests hold {active}")

    def _take(self, *, may_drop_retained: bool) -> int | None:
        """Take a free slot, or the slot of the least recently used snapshot."""
        if self._free:
            return self._free.pop()
        victim = next((each for each in self._snapshots if not self._is_retained(each)), None)
        if victim is not None:
            return self._snapshots.pop(victim)
        if not self._snapshots or not may_drop_retained:
            return None
        victim, slot = self._snapshots.popitem(last=False)
        self._move_out(victim, slot)
        return slot

    def _move_out(self, block_hash: BlockHash, slot: int) -> None:
        """Move a retained snapshot to host memory, if there is room or another snapshot to drop."""
        if not self._free_host and not self._in_host:
            self.num_lost += 1
            return
        if not self._free_host:
            lost, host_slot = self._in_host.popitem(last=False)
            self._free_host.append(host_slot)
            self.num_lost += self._is_retained(lost)
        self._in_host[block_hash] = self._free_host.pop()
        self._pool.copy_state(StateCopy(self._in_host[block_hash], slot, to_host=True))

    def _has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._snapshots or block_hash in self._in_host or block_hash in self._due

    def _is_indexed(self, block_hash: BlockHash) -> bool:
        return self._pool.find(block_hash) is not None

    def _is_retained(self, block_hash: BlockHash) -> bool:
        block = self._pool.find(block_hash)
        return block is not None and block.term is not None and block.term.until > self._pool.now
