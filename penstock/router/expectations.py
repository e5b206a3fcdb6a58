"""Blocks that a replica will hold soon, because a request with them was just sent there. Knows no replica's load.

Between a decision and the replica's own KV events pass a queue, a prefill and a heartbeat. A burst of requests with
one prefix falls into that gap, and would scatter if the index did not already know where the first one went. An
expectation is removed unless the replica confirms it in time. For replicas that send no KV events, expectations are
all that is known, and last longer: an approximate index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from penstock.router.index import PrefixIndex


class Expectations:
    """Bounded: past `max_blocks`, the oldest expectations end early."""

    def __init__(self, index: PrefixIndex, max_blocks: int = 200_000) -> None:
        self._index = index
        self._max_blocks = max_blocks
        self._until: dict[int, dict[bytes, float]] = {}  # by bit; when each expected block expires
        self._queues: dict[
            float, deque[tuple[float, int, Sequence[bytes]]]
        ] = {}  # by time to live, oldest first
        self._num_queued = 0

    def __len__(self) -> int:
        """How many blocks are expected and not confirmed."""
        return sum(len(blocks) for blocks in self._until.values())

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

    def is_expected(self, bit: int, block_hash: bytes) -> bool:
        return block_hash in self._until.get(bit, ())

    def settle(self, bit: int, hashes: Sequence[bytes]) -> None:
        """The replica itself reported these blocks as stored or removed."""
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
