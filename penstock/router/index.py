"""Which replicas hold which prefixes: one table from block hash to a set of replicas. Knows no load and no clock.

The set is a bit mask, so that one lookup per block of a prompt answers for all replicas at once. A replica that
forgets everything gets a new bit, and its old one is ignored until enough old bits have gathered to be worth a sweep.

Memory is bounded by `max_entries` whatever the replicas hold. Entries live in two generations. When the younger is
full, the older is dropped, a few entries at a time, and the younger takes its place. Whatever is matched or stored
moves to the younger: an entry is forgotten only after half of `max_entries` others were used since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def open(self) -> int:
        """Returns the bit of a new replica, which holds nothing yet."""
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
        """The bits of the replicas that hold this block."""
        return (self._young.get(block_hash) or self._old.get(block_hash, 0)) & self._live_bits

    def match(self, hashes: Sequence[bytes], bits: int) -> dict[int, int]:
        """For each of these replicas that holds a leading part of the chain: its bit, and how many blocks."""
        old = self._old
        depths: dict[int, int] = {}
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
                        _set_each(depths, holding ^ still_holding, depth)
                    holding = still_holding
                    if not holding:
                        break
            depth += 1
        if depth and holding:
            _set_each(depths, holding, depth)
        if depth and old:
            self._rejuvenate(hashes[:depth])
        return depths

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
        """Take retired bits out of every entry, so that they can be given out again."""
        live = self._live_bits
        self._young = {block_hash: left for block_hash, bits in self._young.items() if (left := bits & live)}
        self._old = {block_hash: left for block_hash, bits in self._old.items() if (left := bits & live)}
        self._dying = {}
        self._sets.clear()
        self._retired_bits = 0


def _set_each(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        depths[lowest] = depth
        bits ^= lowest
