"""Feeds the KV events of one replica into the index. Knows their order; knows no load and no other replica.

Sequence numbers rise by one. A gap means that events were lost: everything known of the replica is dropped, and the
replica must send everything again. It does so in the same stream, as `cleared` and then `stored` for all blocks that
it holds, so the new start needs no message of its own and cannot overtake other events.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.kv_events import KVCleared, KVEvent, KVStored
from penstock.router.expectations import Expectations
from penstock.router.index import PrefixIndex


class KVFeed:
    def __init__(self, index: PrefixIndex, expectations: Expectations) -> None:
        self._index = index
        self._expectations = expectations
        self._next_sequence = 0
        self.bit = index.open()  # changes whenever the replica's entries are dropped
        self.num_blocks = 0  # that the replica holds, by its events
        self.needs_resync = False
        self.num_gaps = 0

    def receive(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if event.sequence < self._next_sequence:
                continue  # received before
            if isinstance(event, KVCleared):
                self.drop()
                self.needs_resync = False
            elif event.sequence > self._next_sequence and not self.needs_resync:
                self.num_gaps += 1
                self.drop()
                self.needs_resync = True
            self._next_sequence = event.sequence + 1
            if not self.needs_resync:
                self._apply(event)

    def drop(self) -> None:
        """Forget everything that was known of this replica."""
        self._index.close(self.bit)
        self._expectations.forget(self.bit)
        self.bit = self._index.open()
        self.num_blocks = 0

    def close(self) -> None:
        self._index.close(self.bit)
        self._expectations.forget(self.bit)

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, KVCleared):
            return
        self._expectations.settle(self.bit, event.block_hashes)
        if isinstance(event, KVStored):
            self._index.store(self.bit, event.block_hashes)
            self.num_blocks += len(event.block_hashes)
        else:
            self._index.remove(self.bit, event.block_hashes)
            self.num_blocks -= len(event.block_hashes)
