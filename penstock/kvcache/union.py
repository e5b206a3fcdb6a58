"""Merges the KV events of several caches into the events of one index, which has what any of the caches has.

A reader, such as the router, then sees the caches of all ranks of an engine as one. A hash is stored when the first
cache stores it, and removed when the last cache that had it removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.hashing import BlockHash
from penstock.core.messages import KVCleared, KVEvent, KVRemoved, KVStored


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
