"""Admission: whether the next waiting request can start now, and its block table if so. Knows no token budget and no
queue.

A request gets blocks for all known tokens at once: the prompt, and after a preemption the answer so far. While it
runs it needs at most one more block at a time, for its next sampled token. Its last tokens may get half a block;
admission counts that as a whole one, so that a request starts only if it could have a whole one.
"""

from __future__ import annotations

import enum

from penstock.kvcache.cache import KVCache
from penstock.scheduler.headroom import Headroom
from penstock.scheduler.prefix import PrefixSharing
from penstock.scheduler.sequence import Sequence

_RETRY_AFTER_PLANS = 8


class Outcome(enum.Enum):
    ADMITTED = enum.auto()
    HELD = enum.auto()  # waits for a prefix that a running request is computing
    BLOCKED = enum.auto()  # lacks blocks; requests behind it must not overtake it


class Admission:
    """Remembers the last request that was turned away, so that a long prompt is not looked up in every plan."""

    def __init__(self, cache: KVCache, sharing: PrefixSharing, headroom: Headroom) -> None:
        self._cache = cache
        self._sharing = sharing
        self._headroom = headroom
        self._blocked: Sequence | None = None
        self._num_turned_away = 0
        self._num_missing_blocks = 0

    def room_changed(self) -> None:
        """Blocks came free: it is worth asking again."""
        self._blocked = None

    def num_missing_blocks(self, sequence: Sequence) -> int:
        """How many blocks the last attempt was short of, when it was this request's; else 0."""
        return self._num_missing_blocks if self._blocked is sequence else 0

    def admit(self, sequence: Sequence, *, is_alone: bool) -> Outcome:
        """Give a request its table. A request that would run alone is admitted if at all possible: the whole cache
        is its bound then."""
        if self._blocked is sequence and not is_alone:
            self._num_turned_away += 1
            if self._num_turned_away % _RETRY_AFTER_PLANS:
                return Outcome.BLOCKED
        num_found = self._sharing.lookup(sequence)
        if self._sharing.hold(sequence, num_found):
            return Outcome.HELD
        if not self._take_blocks(sequence, num_found, is_alone=is_alone):
            return Outcome.BLOCKED
        self._blocked = None
        self._sharing.start(sequence)
        return Outcome.ADMITTED

    def _take_blocks(self, sequence: Sequence, num_found: int, *, is_alone: bool) -> bool:
        cache = self._cache
        # Opening the table first keeps the blocks that were found from being evicted.
        table = cache.open_table(sequence.hashes[:num_found])
        num_missing = table.num_missing(sequence.num_known)
        if is_alone:
            cache.retention.give_way(num_missing)  # when nothing else can run
        num_spare = cache.num_available - num_missing
        num_blocks = -(-sequence.num_known // cache.block_size)
        if num_spare < 0 or not (is_alone or self._headroom.allows(sequence, num_blocks, num_spare)):
            table.close()
            self._blocked = sequence
            self._num_missing_blocks = max(0, -num_spare)
            return False
        table.fill(sequence.num_known)
        sequence.table = table
        sequence.num_computed = num_found * cache.block_size
        return True
