"""How many blocks the running requests will still need: a forecast that reserves room without idling the cache.

Running requests are binned by predicted remaining growth, in blocks, with edges that double. By the time a bin's
requests end, those of longer bins have grown by the bin's edge each, and those of shorter bins have given back what
they held. The worst such moment is the headroom to keep. It is a forecast, not a promise: where it fails, preemption
repairs it.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.scheduler.sequence import BATCH_RANK, Sequence

_NUM_BINS = 16
_EDGES_BLOCKS = tuple(1 << index for index in range(_NUM_BINS))


class _Group:
    __slots__ = ("counts", "own_blocks")

    def __init__(self) -> None:
        self.counts = [0] * _NUM_BINS
        self.own_blocks = [0] * _NUM_BINS  # what comes free when the bin's requests end


class Headroom:
    """Batch requests are counted apart, since they yield their blocks to anyone more urgent."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._urgent = _Group()
        self._batch = _Group()

    def enter(self, sequence: Sequence) -> None:
        """A request starts to run, with its table as of now."""
        index = self._bin(sequence, len(sequence.block_ids))
        group = self._group(sequence)
        sequence.remaining_bin = index
        group.counts[index] += 1
        group.own_blocks[index] += sequence.num_own_blocks

    def leave(self, sequence: Sequence) -> None:
        """It stops running; its table is still as at the last call for it."""
        group = self._group(sequence)
        group.counts[sequence.remaining_bin] -= 1
        group.own_blocks[sequence.remaining_bin] -= sequence.num_own_blocks

    def allows(self, candidate: Sequence, num_blocks: int, num_spare: int) -> bool:
        """Whether a request may start with a table of `num_blocks`, after which `num_spare` blocks are left."""
        if candidate.rank == BATCH_RANK:
            return num_spare >= self._needed(candidate, num_blocks, (self._urgent, self._batch))
        num_spare += sum(self._batch.own_blocks)
        return num_spare >= self._needed(candidate, num_blocks, (self._urgent,))

    def check_integrity(self, running: Collection[Sequence]) -> None:
        for group in (self._urgent, self._batch):
            for index in range(_NUM_BINS):
                members = [s for s in running if s.remaining_bin == index and self._group(s) is group]
                assert group.counts[index] == len(members)
                assert group.own_blocks[index] == sum(member.num_own_blocks for member in members)

    def _needed(self, candidate: Sequence, num_blocks: int, groups: tuple[_Group, ...]) -> int:
        counts = [sum(column) for column in zip(*(group.counts for group in groups), strict=True)]
        counts[self._bin(candidate, num_blocks)] += 1
        num_alive = sum(counts)
        worst = given_back = 0
        for index, count in enumerate(counts):
            if count:
                worst = max(worst, num_alive * _EDGES_BLOCKS[index] - given_back)
                num_alive -= count
                given_back += sum(group.own_blocks[index] for group in groups)
        return worst

    def _group(self, sequence: Sequence) -> _Group:
        return self._batch if sequence.rank == BATCH_RANK else self._urgent

    def _bin(self, sequence: Sequence, num_blocks: int) -> int:
        growth = -(-sequence.predicted_length // self._block_size) - num_blocks
        return min((growth - 1).bit_length(), _NUM_BINS - 1) if growth > 1 else 0
