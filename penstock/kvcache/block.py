"""The record of one KV block, the state that follows from it, and the events of the prefix index that no reader has
taken yet.

The log of events is bounded. When the log holds more events than a fresh start would need, the events are dropped,
and the next reader gets `cleared` and the whole index instead. A cache whose events have no reader thus pays almost
nothing for them, and a reader needs no special case. Sequence numbers are assigned when events are taken, so that
merged or dropped events leave no gaps.

`IndexUnion` merges the KV events of several caches into the events of one index, which has what any of the caches
has. A reader, such as the router, then sees the caches of all ranks of an engine as one. A hash is stored when the
first cache stores it, and removed when the last cache that had it removes it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.core.hashing import BlockHash
from penstock.core.messages import KeptEntry, KVCleared, KVEvent, KVRemoved, KVStored


class IntegrityError(Exception):
    """The records of the cache contradict each other, or a caller broke a rule. This is always a bug, whatever the
    load."""


class BlockState(enum.Enum):
    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class RetentionTerm:
    """The time until which a block's contents are retained. The record moves with the contents, to host memory and
    back. On the device, a pin keeps the block from eviction, and may end before that time."""

    until: float
    depth: int  # from the root of the chain
    # Set at the end of a retained prefix: how long each use prolongs the retention.
    entry_ttl_s: float | None = None
    was_asked_for: bool = True  # by a client; False for blocks of a preempted request


class Block:
    """The record of a device block or of a slot of host memory. It lives as long as the cache. Only this room writes
    to it; `state` is derived, never stored."""

    __slots__ = ("block_hash", "block_id", "last_use", "parent", "pinned_until", "references", "term")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.block_hash: BlockHash | None = None  # set exactly while the block is indexed
        self.parent: BlockHash | None = None  # set together with block_hash; the parent need not be indexed
        self.pinned_until: float | None = None  # only indexed blocks carry a pin, active ones too
        self.term: RetentionTerm | None = None  # of indexed blocks; set while pinned, and may outlast the pin
        self.last_use = 0  # a counter, not a time: the order of last releases

    @property
    def state(self) -> BlockState:
        if self.references:
            return BlockState.ACTIVE
        if self.block_hash is None:
            return BlockState.FREE
        return BlockState.CACHED if self.pinned_until is None else BlockState.PINNED


class EventLog:
    def __init__(self, max_pending_hashes: int) -> None:
        self._max_pending_hashes = max_pending_hashes
        self._pending: list[_Pending | KeptEntry] = []
        self._num_pending_hashes = 0
        self._restart = False  # events were dropped: the next reader starts with the whole index
        self._next_sequence = 0

    def stored(self, block_hash: BlockHash, parent: BlockHash) -> None:
        if not self._room_for_one():
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Pending) and last.parent is not None and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
        else:
            self._pending.append(_Pending([block_hash], parent))

    def removed(self, block_hash: BlockHash) -> None:
        if not self._room_for_one():
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Pending) and last.parent is None and last.block_hashes:
            last.block_hashes.append(block_hash)
        else:
            self._pending.append(_Pending([block_hash], None))

    def kept(self, entry: KeptEntry) -> None:
        """Note that a prefix is kept from now on, or for longer."""
        if self._room_for_one():
            self._pending.append(entry)

    def cleared(self) -> None:
        """Drop all pending events, because the index was cleared."""
        self._restart = False
        self._pending = [_Pending([], None)]
        self._num_pending_hashes = 0

    def restart(self) -> None:
        """Make the next reader start with the whole index, because a reader has missed events."""
        self._restart = True
        self._pending = []

    def take(
        self, index: Iterable[tuple[BlockHash, BlockHash]], entries: Iterable[KeptEntry]
    ) -> list[KVEvent]:
        """Return the events since the last call. `index` yields (hash, parent) of every indexed block, and `entries`
        every prefix that is kept; both are read only if pending events were dropped."""
        if self._restart:
            self.cleared()
            for block_hash, parent in index:
                self.stored(block_hash, parent)
            self._pending += entries
        events = [self._number(pending) for pending in self._pending]
        self._pending = []
        self._num_pending_hashes = 0
        return events

    def _room_for_one(self) -> bool:
        if self._restart:
            return False
        if self._num_pending_hashes >= self._max_pending_hashes:
            self.restart()
            return False
        self._num_pending_hashes += 1
        return True

    def _number(self, pending: _Pending | KeptEntry) -> KVEvent:
        sequence = self._next_sequence
        self._next_sequence += 1
        if isinstance(pending, KeptEntry):
            return KVStored(sequence, (), b"", (pending,))
        hashes = tuple(pending.block_hashes)
        if not hashes:
            return KVCleared(sequence)
        return (
            KVRemoved(sequence, hashes)
            if pending.parent is None
            else KVStored(sequence, hashes, pending.parent)
        )


class _Pending:
    """An event that may still grow: stored when it has a parent, cleared when it has no hashes, else
    removed."""

    __slots__ = ("block_hashes", "parent")

    def __init__(self, block_hashes: list[BlockHash], parent: BlockHash | None) -> None:
        self.block_hashes = block_hashes
        self.parent = parent


class IndexUnion:
    def __init__(self, num_caches: int) -> None:
        # The hashes of each cache, in the order in which they were stored.
        self._held: list[dict[BlockHash, None]] = [{} for _ in range(num_caches)]
        self._next_sequence = 0
        self._restarts = False

    def restart(self) -> None:
        """Make the next events start with `cleared`. All caches must restart their events too."""
        self._restarts = True

    def merge(self, events: Sequence[Sequence[KVEvent]]) -> list[KVEvent]:
        """Return the merged events. `events` are those of each cache since the last call."""
        merged: list[KVEvent] = []
        if self._restarts:
            self._restarts = False
            self._held = [{} for _ in self._held]
            merged.append(KVCleared(self._number()))
        for cache, each in enumerate(events):
            for event in each:
                merged += self._merge_one(cache, event)
        return merged

    def _merge_one(self, cache: int, event: KVEvent) -> Iterable[KVEvent]:
        held = self._held[cache]
        match event:
            case KVStored(block_hashes=hashes, parent=parent, kept=kept):
                yield from self._stored(cache, hashes, parent)
                if kept:
                    yield KVStored(self._number(), (), b"", kept)
            case KVRemoved(block_hashes=hashes):
                yield from self._removed(cache, hashes)
            case KVCleared() if held:
                # The end of a chain was stored after its beginning.
                yield from self._removed(cache, tuple(reversed(held)))

    def _stored(self, cache: int, hashes: Sequence[BlockHash], parent: BlockHash) -> Iterable[KVEvent]:
        run: list[BlockHash] = []
        before_run = parent
        for block_hash in hashes:
            if self._has(block_hash):
                if run:
                    yield KVStored(self._number(), tuple(run), before_run)
                run, before_run = [], block_hash
            else:
                run.append(block_hash)
            self._held[cache][block_hash] = None
        if run:
            yield KVStored(self._number(), tuple(run), before_run)

    def _removed(self, cache: int, hashes: Sequence[BlockHash]) -> Iterable[KVEvent]:
        for block_hash in hashes:
            self._held[cache].pop(block_hash, None)
        gone = tuple(block_hash for block_hash in hashes if not self._has(block_hash))
        if gone:
            yield KVRemoved(self._number(), gone)

    def _has(self, block_hash: BlockHash) -> bool:
        return any(block_hash in held for held in self._held)

    def _number(self) -> int:
        number = self._next_sequence
        self._next_sequence += 1
        return number
