"""The running requests: who holds blocks and a row in the executor, and what each could do next. Knows no queue.

A request is in here from the plan that admits it until it ends or is preempted, and never without its blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.kvcache.cache import KVCache
from penstock.scheduler.headroom import Headroom
from penstock.scheduler.lengths import OutputLengthEstimator
from penstock.scheduler.preemption import seniority
from penstock.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """What running requests could do in one step."""

    decodes: list[Sequence]
    growing: list[Sequence]  # the decodes that need a block first
    prefills: list[Sequence]  # most senior first


class RunningSet:
    def __init__(self, cache: KVCache, lengths: OutputLengthEstimator, headroom: Headroom) -> None:
        self._cache = cache
        self._lengths = lengths
        self._headroom = headroom
        self._sequences: dict[int, Sequence] = {}  # by number, in order of admission
        self._released: list[str] = []
        self._num_slots = 0  # token slots in all tables
        self._num_filled_slots = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._sequences.values()

    @property
    def fragmentation(self) -> float:
        """The share of slots that hold no token, and are not meant for a known one either."""
        return 1.0 - self._num_filled_slots / self._num_slots if self._num_slots else 0.0

    def start(self, sequence: Sequence) -> None:
        """Take in a request with its first table."""
        sequence.is_prefilling = True
        self._sequences[sequence.number] = sequence
        self._headroom.enter(sequence)
        self._num_slots += sequence.num_slots
        self._num_filled_slots += sequence.num_filled_slots

    def stop(self, sequence: Sequence) -> None:
        """Let a request go and free its blocks."""
        del self._sequences[sequence.number]
        self._released.append(sequence.request_id)
        self._headroom.leave(sequence)
        self._num_slots -= sequence.num_slots
        self._num_filled_slots -= sequence.num_filled_slots
        self._cache.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_slots = 0
        sequence.num_computed = 0
        sequence.is_prefilling = False

    def find_work(self) -> Work:
        """There are never more decodes than a step has tokens: each of them had a token in its last prefill chunk, in
        a step that also had one for every decode before it."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.is_prefilling:
                prefills.append(sequence)
            elif sequence.is_constrained and sequence.num_in_flight:
                continue
            elif sequence.num_expected < sequence.length_limit:  # else its last token is in flight
                decodes.append(sequence)
        prefills.sort(key=seniority)
        growing = [sequence for sequence in decodes if sequence.num_computed == sequence.num_slots]
        return Work(decodes, growing, prefills)

    def grow(self, growing: list[Sequence]) -> dict[int, int]:
        """One more block for each, which the cache must have; returns it by number."""
        if not growing:
            return {}
        block_ids = self._cache.allocate(len(growing))
        assert block_ids is not None, "room is made before requests grow"
        block_size = self._cache.block_size
        for sequence, block_id in zip(growing, block_ids, strict=True):
            self._headroom.leave(sequence)
            sequence.block_ids.append(block_id)
            sequence.num_slots += block_size
            if sequence.predicted_length <= sequence.num_expected:
                sequence.predict_length(self._lengths)
            self._headroom.enter(sequence)
        self._num_slots += len(growing) * block_size
        return {sequence.number: block_id for sequence, block_id in zip(growing, block_ids, strict=True)}

    def decoded(self, num_tokens: int) -> None:
        """So many requests got one more slot filled by a plan."""
        self._num_filled_slots += num_tokens

    def take_back(self, sequence: Sequence) -> None:
        """Its newest position is to be computed again."""
        sequence.num_computed -= 1
        self._num_filled_slots -= 1

    def take_released(self) -> tuple[str, ...]:
        """Who stopped since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def check_integrity(self) -> None:
        sequences = self._sequences.values()
        block_size = self._cache.block_size
        for sequence in sequences:
            assert sequence.num_slots == len(sequence.block_ids) * block_size, sequence.request_id
            assert sequence.num_computed <= sequence.num_slots, sequence.request_id
            assert sequence.num_known <= sequence.num_expected <= sequence.length_limit, sequence.request_id
            assert sequence.num_computed < sequence.num_expected, sequence.request_id
        assert self._num_slots == sum(sequence.num_slots for sequence in sequences)
        assert self._num_filled_slots == sum(sequence.num_filled_slots for sequence in sequences)
        self._headroom.check_integrity(sequences)
