"""Whether the next waiting request can start now, and its block table if so. Knows no token budget and no queue.

A request gets blocks for every token it knows at once: the prompt, and after a preemption the answer so far. While
it runs it only ever needs one more block at a time, for its next sampled token. What half a block holds of its last
tokens gets half a block; it is counted as a whole one, so that a request starts only if it could have that.
"""

from __future__ import annotations

import enum

from penstock.core.hashing import BlockHash
from penstock.kvcache.cache import KVCache
from penstock.kvcache.tails import TailHalves
from penstock.scheduler.headroom import Headroom
from penstock.scheduler.prefix import PrefixSharing
from penstock.scheduler.sequence import Sequence

_RETRY_AFTER_PLANS = 8


class Admission(enum.Enum):
    ADMITTED = enum.auto()
    HELD = enum.auto()  # waits for a prefix that a running request is computing
    BLOCKED = enum.auto()  # lacks blocks; so does everyone behind it, who must not overtake


class AdmissionDesk:
    """Remembers who was turned away, so that a long prompt is not looked up again in every plan."""

    def __init__(self, cache: KVCache, tails: TailHalves, sharing: PrefixSharing, headroom: Headroom) -> None:
        self._cache = cache
        self._tails = tails
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

    def admit(self, sequence: Sequence, *, is_alone: bool) -> Admission:
        """Give a request its table. One that would run alone is admitted if at all possible: its growth is then
        bounded by the whole cache."""
        if self._blocked is sequence and not is_alone:
            self._num_turned_away += 1
            if self._num_turned_away % _RETRY_AFTER_PLANS:
                return Admission.BLOCKED
        num_found = self._sharing.lookup(sequence)
        if self._sharing.hold(sequence, num_found):
            return Admission.HELD
        if not self._take_blocks(sequence, num_found, is_alone=is_alone):
            return Admission.BLOCKED
        self._blocked = None
        self._sharing.start(sequence)
        return Admission.ADMITTED

    def _take_blocks(self, sequence: Sequence, num_found: int, *, is_alone: bool) -> bool:
        cache = self._cache
        num_blocks = -(-sequence.num_known // cache.block_size)
        found = sequence.hashes[:num_found]
        to_restore = cache.in_host_memory(found)
        # Taking the reused blocks first keeps the allocation of the others from evicting them.
        reused = cache.acquire(found if not to_restore else _without(found, to_restore))
        num_new = num_blocks - len(reused)
        if is_alone:
            cache.make_pins_yield(num_new)  # when nothing else can run
        num_spare = cache.num_available - num_new
        if num_spare < 0 or not (is_alone or self._headroom.allows(sequence, num_blocks, num_spare)):
            cache.release(reused)
            self._blocked = sequence
            self._num_missing_blocks = max(0, -num_spare)
            return False
        if to_restore:
            reused = self._restore(found, to_restore, reused)
        sequence.block_ids = reused
        self._add_blocks(sequence, num_blocks - num_found)
        sequence.num_reused_blocks = num_found
        sequence.num_computed = num_found * cache.block_size
        return True

    def _add_blocks(self, sequence: Sequence, count: int) -> None:
        """Room for all that it knows, in so many blocks more; half of the last one, where that will do."""
        block_size = self._cache.block_size
        takes_half = self._tails.suffices(sequence.num_known % block_size)
        new = self._cache.allocate(count - takes_half)
        assert new is not None
        sequence.block_ids += new
        sequence.num_slots = len(sequence.block_ids) * block_size
        if takes_half:
            block_id, sequence.half_offset = self._tails.take()
            sequence.block_ids.append(block_id)
            sequence.num_slots += self._tails.num_slots

    def _restore(self, found: list[BlockHash], to_restore: list[BlockHash], reused: list[int]) -> list[int]:
        """The blocks of a prefix that was found, once all are on the device; those in `reused` were there."""
        restored = dict(zip(to_restore, self._cache.restore(to_restore), strict=True))
        on_device = iter(reused)
        return [restored[key] if key in restored else next(on_device) for key in found]


def _without(hashes: list[BlockHash], others: list[BlockHash]) -> list[BlockHash]:
    excluded = set(others)
    return [block_hash for block_hash in hashes if block_hash not in excluded]
