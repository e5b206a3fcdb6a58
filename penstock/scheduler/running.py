"""The running requests: who holds blocks and a row in the executor, and what each could do next. Knows no queue.

A request is in here from the plan that admits it until it ends or is preempted, and never without its blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from penstock.kvcache.cache import KVCache
from penstock.kvcache.metrics import SlotUse
from penstock.kvcache.tails import TailHalves
from penstock.scheduler.headroom import Headroom
from penstock.scheduler.lengths import OutputLengthEstimator
from penstock.scheduler.preemption import seniority
from penstock.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What running requests could do in one step."""

    decodes: list[Sequence]
    growing: list[Sequence]  # the decodes that need more slots first
    prefills: list[Sequence]  # most senior first


def _turn_to_grow(sequence: Sequence) -> int:
    """Who must leave a second half comes first: who has the first half of the same block can then stay. Who has no
    half comes last, and finds those that others left."""
    return 1 if sequence.half_offset is None else -sequence.half_offset


class RunningSet:
    def __init__(
        self, cache: KVCache, tails: TailHalves, lengths: OutputLengthEstimator, headroom: Headroom
    ) -> None:
        self._cache = cache
        self._tails = tails
        self._lengths = lengths
        self._headroom = headroom
        self._sequences: dict[int, Sequence] = {}  # by number, in order of admission
        self._released: list[str] = []
        self._slots = SlotUse()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._sequences.values()

    @property
    def fragmentation(self) -> float:
        return self._slots.fragmentation

    def start(self, sequence: Sequence) -> None:
        """Take in a request with its first table."""
        sequence.is_prefilling = True
        self._sequences[sequence.number] = sequence
        self._headroom.enter(sequence)
        self._slots.num_slots += sequence.num_slots
        self._slots.num_filled += sequence.num_filled_slots

    def stop(self, sequence: Sequence) -> None:
        """Let a request go and free its blocks."""
        del self._sequences[sequence.number]
        self._released.append(sequence.request_id)
        self._headroom.leave(sequence)
        self._slots.num_slots -= sequence.num_slots
        self._slots.num_filled -= sequence.num_filled_slots
        if sequence.tail is not None:
            self._tails.give_back(*sequence.tail)
        self._cache.release(sequence.whole_block_ids)
        sequence.block_ids = []
        sequence.half_offset = None
        sequence.num_slots = 0
        sequence.num_computed = 0
        sequence.is_prefilling = False

    def find_work(self, max_decodes: int) -> Work:
        """What each running request could do next, with at most `max_decodes` decodes. The limit matters only when
        constrained requests, whose samples were in flight while others were admitted, decode again."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.is_prefilling:
                prefills.append(sequence)
            elif sequence.is_constrained and sequence.num_in_flight:
                continue
            elif (
                sequence.num_expected < sequence.length_limit  # else its last token is in flight
                and len(decodes) < max_decodes
            ):
                decodes.append(sequence)
        prefills.sort(key=seniority)
        growing = [sequence for sequence in decodes if sequence.num_computed == sequence.num_slots]
        return Work(decodes, growing, prefills)

    def num_blocks_to_grow(self, growing: Iterable[Sequence]) -> int:
        """Blocks that must be available for these to grow together."""
        num_tails = num_blocks = 0
        num_spare = self._tails.num_spare
        for sequence in growing:
            if sequence.tail is None:
                num_tails += 1
            elif self._tails.is_shared(sequence.block_ids[-1]):
                num_blocks += 1
            else:  # it takes the other half of its block
                num_spare -= 1
        return num_blocks + max(0, num_tails - num_spare)

    def grow(self, growing: list[Sequence]) -> set[int]:
        """More slots for each, for which the cache must have the blocks; returns, by number, whose last tokens belong
        elsewhere now."""
        moved: set[int] = set()
        for sequence in sorted(growing, key=_turn_to_grow):
            self._headroom.leave(sequence)
            if self._grow_one(sequence):
                moved.add(sequence.number)
            if sequence.predicted_length <= sequence.num_expected:
                sequence.predict_length(self._lengths)
            self._headroom.enter(sequence)
        return moved

    def _grow_one(self, sequence: Sequence) -> bool:
        tails = self._tails
        sequence.num_slots += tails.num_slots
        self._slots.num_slots += tails.num_slots
        before = sequence.tail
        if before is None:
            block_id, sequence.half_offset = tails.take()
            sequence.block_ids.append(block_id)
            return True
        block_id = sequence.block_ids[-1] = tails.widen(*before)
        sequence.half_offset = None
        return (block_id, 0) != before

    def decoded(self, num_tokens: int) -> None:
        """So many requests got one more slot filled by a plan."""
        self._slots.num_filled += num_tokens

    def take_back(self, sequence: Sequence) -> None:
        """Its newest position is to be computed again."""
        sequence.num_computed -= 1
        self._slots.num_filled -= 1

    def take_released(self) -> tuple[str, ...]:
        """Who stopped since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def check_integrity(self) -> None:
        sequences = self._sequences.values()
        block_size = self._cache.block_size
        for sequence in sequences:
            num_tail_slots = 0 if sequence.tail is None else self._tails.num_slots
            num_slots = len(sequence.whole_block_ids) * block_size + num_tail_slots
            assert sequence.num_slots == num_slots, sequence.request_id
            assert sequence.num_computed <= sequence.num_slots, sequence.request_id
            assert sequence.num_known <= sequence.num_expected <= sequence.length_limit, sequence.request_id
            assert sequence.num_computed < sequence.num_expected, sequence.request_id
        assert self._slots.num_slots == sum(sequence.num_slots for sequence in sequences)
        assert self._slots.num_filled == sum(sequence.num_filled_slots for sequence in sequences)
        self._headroom.check_integrity(sequences)
        self._tails.check_integrity(sequence.tail for sequence in sequences if sequence.tail is not None)
