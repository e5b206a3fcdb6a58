"""The prefix index tells which replicas hold which prefixes, by block hash. This module also fills it. Knows no load
and no clock.

Penstock's own replicas hash their KV blocks with the same function. External engines report no hashes: for them,
chunks of the text are hashed, which is enough to remember what was sent where.

A set of replicas is a bit mask, so that one lookup per block of a prompt answers for all replicas at once. A replica
that forgets everything gets a new bit, and its old one is ignored until enough old bits have gathered to be worth a
sweep.

Memory is bounded by `max_entries` whatever the replicas hold. Entries live in two generations. When the younger is
full, the older is dropped, a few entries at a time, and the younger takes its place. A matched or stored entry moves
to the younger: an entry is forgotten only after half of `max_entries` others were used since.

A replica's KV events arrive after the request has waited and its prompt is computed. A burst of requests with one
prefix may arrive before the events, and would scatter if the index did not remember where the first request went.
Such an expectation is removed unless the replica confirms it in time. For replicas that send no KV events, the index
knows expectations only, which then last longer: an approximate index.

The sequence numbers of KV events rise by one. A gap means that events were lost: everything known of the replica is
dropped, and the replica must send everything again. It does so in the same stream, as `cleared` and then `stored` for
all blocks that it holds, so the new start needs no message of its own and cannot overtake other events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import inf

from penstock.core.hashing import BlockHash, chain_hashes, root_hash
from penstock.core.messages import KVCleared, KVEvent, KVStored

_TEXT_CHUNK_BYTES = 64  # about 16 tokens of English: chunks and blocks are of one size
MAX_TEXT_CHUNKS = 2048  # that are hashed, on the event loop; texts that share all of them go to one server
_DIGEST_BYTES = 16


def hash_tokens(salt: str, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes that a replica gives to the blocks of this prompt. The last token never counts: a replica
    always computes it. `salt` is the tenant's, as in the replica."""
    return chain_hashes(root_hash(salt), token_ids[: max(0, len(token_ids) - 1)], block_size)


def hash_text(salt: str, text: str) -> list[BlockHash]:
    """Return the hashes of text whose tokens are unknown, of its beginning only if the text is long. An unfilled last
    chunk has no hash."""
    most = MAX_TEXT_CHUNKS * _TEXT_CHUNK_BYTES
    data = text[:most].encode()[:most]
    parent = root_hash(salt)
    hashes = []
    for start in range(0, len(data) - _TEXT_CHUNK_BYTES + 1, _TEXT_CHUNK_BYTES):
        chunk = data[start : start + _TEXT_CHUNK_BYTES]
        parent = blake2b(parent + chunk, digest_size=_DIGEST_BYTES, person=b"text chunk").digest()
        hashes.append(parent)
    return hashes


_MAX_RETIRED_BITS = 64
_DROPPED_PER_INSERT = 2  # so that the generation dropped last is gone before the next one follows


class PrefixIndex:
    def __init__(self, max_entries: int = 500_000) -> None:
        if max_entries < 2:
            raise ValueError(f"an index needs room for two entries at least, not {max_entries}")
        self._max_young = max_entries // 2
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._dying: dict[bytes, int] = {}
        self._live_bits = 0
        self._retired_bits = 0  # retired bits, which entries may still have set
        self._sets: dict[int, int] = {}  # one object for all equal sets: less memory, and equal by identity

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._dying)

    @property
    def live_bits(self) -> int:
        """Return the bits of all replicas."""
        return self._live_bits

    def open(self) -> int:
        """Return the bit of a new replica, which holds nothing yet."""
        used = self._live_bits | self._retired_bits
        bit = ~used & (used + 1)
        self._live_bits |= bit
        return bit

    def close(self, bit: int) -> None:
        """Forget everything about a replica. Its bit must not be used any more."""
        self._live_bits &= ~bit
        self._retired_bits |= bit
        if self._retired_bits.bit_count() >= _MAX_RETIRED_BITS:
            self._sweep()

    def store(self, bit: int, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            holders = self._young.get(block_hash)
            if holders is None:
                self._insert(block_hash, self._old.pop(block_hash, 0) & self._live_bits | bit)
            elif not holders & bit:
                self._young[block_hash] = self._shared(holders | bit)

    def remove(self, bit: int, hashes: Iterable[bytes]) -> None:
        for generation in (self._young, self._old):
            for block_hash in hashes:
                holders = generation.get(block_hash, 0)
                if holders & bit:
                    left = (holders ^ bit) & self._live_bits
                    if left:
                        generation[block_hash] = self._shared(left)
                    else:
                        del generation[block_hash]

    def holders(self, block_hash: bytes) -> int:
        """Return the bits of the replicas that hold this block."""
        return (self._young.get(block_hash) or self._old.get(block_hash, 0)) & self._live_bits

    def match(self, hashes: Sequence[bytes], bits: int) -> list[tuple[int, int]]:
        """Return which of these replicas hold a leading part of the chain: numbers of blocks, in ascending order,
        each with the bits of the replicas that hold this many."""
        old = self._old
        found: list[tuple[int, int]] = []
        holding = bits
        depth = 0
        last_holders = None
        for holders in map(self._young.get, hashes):
            if holders is None:
                holders = old.get(hashes[depth], 0)
            if (
                holders is not last_holders
            ):  # the next block of a chain mostly has the holders of the one before
                last_holders = holders
                still_holding = holding & holders
                if still_holding != holding:
                    if depth:
                        found.append((depth, holding ^ still_holding))
                    holding = still_holding
                    if not holding:
                        break
            depth += 1
        if depth and holding:
            found.append((depth, holding))
        if depth and old:
            self._rejuvenate(hashes[:depth])
        return found

    def _rejuvenate(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            holders = self._old.pop(block_hash, 0) & self._live_bits
            if holders:
                self._insert(block_hash, holders)

    def _insert(self, block_hash: bytes, holders: int) -> None:
        if len(self._young) >= self._max_young:
            self._dying = self._old
            self._old = self._young
            self._young = {}
            self._sets.clear()
        self._young[block_hash] = self._shared(holders)
        dying = self._dying
        for _ in range(min(_DROPPED_PER_INSERT, len(dying))):
            dying.popitem()

    def _shared(self, holders: int) -> int:
        return self._sets.setdefault(holders, holders)

    def _sweep(self) -> None:
        """Remove retired bits from every entry, so that they can be used again."""
        live = self._live_bits
        self._young = {block_hash: left for block_hash, bits in self._young.items() if (left := bits & live)}
        self._old = {block_hash: left for block_hash, bits in self._old.items() if (left := bits & live)}
        self._dying = {}
        self._sets.clear()
        self._retired_bits = 0


class Expectations:
    """Holds blocks that replicas are expected to store. Past `max_blocks`, the oldest expectations end early."""

    def __init__(self, index: PrefixIndex, max_blocks: int = 200_000) -> None:
        self._index = index
        self._max_blocks = max_blocks
        self._until: dict[int, dict[bytes, float]] = {}  # by bit; when each expected block expires
        self._queues: dict[
            float, deque[tuple[float, int, Sequence[bytes]]]
        ] = {}  # by time to live, oldest first
        self._num_queued = 0

    def __len__(self) -> int:
        """Return the number of blocks that are expected and not confirmed."""
        return sum(len(blocks) for blocks in self._until.values())

    def num_of(self, bit: int) -> int:
        """Return the number of blocks that one replica is expected to store."""
        return len(self._until.get(bit, ()))

    def expect(self, bit: int, hashes: Sequence[bytes], now: float, ttl_s: float) -> None:
        if not hashes:
            return
        until_s = now + ttl_s
        self._until.setdefault(bit, {}).update(dict.fromkeys(hashes, until_s))
        self._index.store(bit, hashes)
        self._queues.setdefault(ttl_s, deque()).append((until_s, bit, hashes))
        self._num_queued += len(hashes)
        while self._num_queued > self._max_blocks:
            self._end_first(
                min((queue for queue in self._queues.values() if queue), key=lambda queue: queue[0][0])
            )

    def settle(self, bit: int, hashes: Sequence[bytes]) -> None:
        """Remove expectations of blocks that the replica has reported as stored or removed."""
        expected = self._until.get(bit)
        if expected:
            for block_hash in hashes:
                expected.pop(block_hash, None)

    def forget(self, bit: int) -> None:
        """Forget all expectations of a replica. The caller updates the index."""
        self._until.pop(bit, None)

    def expire(self, now: float) -> None:
        for queue in self._queues.values():
            while queue and queue[0][0] <= now:
                self._end_first(queue)

    def _end_first(self, queue: deque[tuple[float, int, Sequence[bytes]]]) -> None:
        until_s, bit, hashes = queue.popleft()
        self._num_queued -= len(hashes)
        expected = self._until.get(bit)
        if expected is None:
            return
        # A later request may have renewed an expectation, which then expires later.
        overdue = [block_hash for block_hash in hashes if expected.get(block_hash, inf) <= until_s]
        for block_hash in overdue:
            del expected[block_hash]
        self._index.remove(bit, overdue)


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
        """Forget everything about this replica."""
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
