"""Keeps the running requests, which have blocks and a row in the executor, and finds the work that each could do
next.

A request runs from the plan that admits it until it ends or is preempted, and never without its blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.core.hashing import BlockHash
from penstock.kvcache.cache import KVCache
from penstock.scheduler.admission import Headroom
from penstock.scheduler.queue import WaitingQueue
from penstock.scheduler.sequence import Sequence, State, seniority
from penstock.scheduler.tenants import OutputLengthEstimator


@dataclass(frozen=True, slots=True)
class Work:
    """The work that running requests could do in one step."""

    decodes: list[Sequence]
    growing: list[Sequence]  # the decodes that need more slots first
    prefills: list[Sequence]  # most senior first


@dataclass(slots=True)
class SlotUse:
    """Counts token slots in the tables of running requests. A block that several requests share counts for each of
    them. A spare half of a block counts for none."""

    num_slots: int = 0
    num_filled: int = 0  # slots that hold a token, or will hold a known token

    @property
    def fragmentation(self) -> float:
        """Return the share of slots that hold nothing."""
        return 1.0 - self.num_filled / self.num_slots if self.num_slots else 0.0


def _turn_to_grow(sequence: Sequence) -> int:
    """Return the order in which requests grow. Requests in the second half of a block grow first, so that the request
    in the first half can keep the block. Requests without a half grow last, and take the halves that others left."""
    offset = sequence.blocks.half_offset
    return 1 if offset is None else -offset


def _may_start_late(sequence: Sequence) -> bool:
    """Return whether the next step of a request with drafts in flight can be planned. An executor knows the outcome
    of one step, not of several."""
    is_tree = sequence.drafted is not None and sequence.drafted.draft.tree_depth is not None
    return sequence.may_start_late and not is_tree and sequence.num_in_flight == sequence.num_drafted + 1


class RunningSet:
    def __init__(self, cache: KVCache, lengths: OutputLengthEstimator, headroom: Headroom) -> None:
        self._cache = cache
        self._lengths = lengths
        self._headroom = headroom
        self._sequences: dict[int, Sequence] = {}  # by number, in order of admission
        self._released: list[str] = []
        self._slots = SlotUse()
        self._num_started = 0

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._sequences.values()

    @property
    def has_decodes(self) -> bool:
        return any(not sequence.is_prefilling for sequence in self._sequences.values())

    @property
    def fragmentation(self) -> float:
        return self._slots.fragmentation

    def start(self, sequence: Sequence) -> None:
        """Add a request with its first table."""
        sequence.is_prefilling = True
        self._num_started += 1
        sequence.turn = self._num_started
        self._sequences[sequence.number] = sequence
        self._headroom.enter(sequence)
        self._slots.num_slots += sequence.blocks.num_slots
        self._slots.num_filled += sequence.num_filled_slots

    def stop(self, sequence: Sequence) -> None:
        """Remove a request and free its blocks."""
        del self._sequences[sequence.number]
        self._released.append(sequence.request_id)
        self._headroom.leave(sequence)
        self._slots.num_slots -= sequence.blocks.num_slots
        self._slots.num_filled -= sequence.num_filled_slots
        if sequence.blocks.state_slot is not None:
            sequence.blocks.close_state(self._state_end(sequence))
        sequence.blocks.close()
        sequence.table = None
        sequence.num_computed = 0
        sequence.is_prefilling = False
        sequence.has_row = False

    def _state_end(self, sequence: Sequence) -> BlockHash | None:
        """Return the published block whose end is the position of the request's state; None if there is none."""
        num_blocks, rest = divmod(sequence.num_computed, self._cache.block_size)
        if rest or not 0 < num_blocks == sequence.num_published:
            return None
        return sequence.hashes[num_blocks - 1]

    def find_work(self, max_decodes: int, *, starts_late: bool = False) -> Work:
        """Return the next work of each running request, with at most `max_decodes` decodes. The limit matters only
        for requests that are not planned ahead: others may have been admitted while their samples were in flight.
        Requests with drafts in flight have work only if the executor `starts_late`."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.is_prefilling:
                prefills.append(sequence)
            elif (sequence.num_drafted and not (starts_late and _may_start_late(sequence))) or (
                sequence.num_known < sequence.ahead_from and sequence.num_expected > sequence.num_known
            ):
                continue
            elif sequence.num_expected < sequence.length_limit:  # else its last token is in flight
                decodes.append(sequence)
        del decodes[max_decodes:]
        prefills.sort(key=seniority)
        growing = [sequence for sequence in decodes if sequence.num_computed == sequence.table.num_slots]  # type: ignore[union-attr]
        return Work(decodes, growing, prefills)

    def num_blocks_to_grow(self, growing: Iterable[Sequence]) -> int:
        """Return the number of blocks that these requests need to grow together."""
        return self._cache.num_blocks_to_grow(sequence.blocks for sequence in growing)

    def num_window_blocks_to_grow(self, growing: Iterable[Sequence], prefill: Sequence | None = None) -> int:
        """Return the number of blocks that the windows of these requests need to grow together, and the window of a
        prefill for its next few tokens."""
        if self._cache.windows is None:
            return 0
        tail_slots = self._cache.tail_slots
        count = sum(
            sequence.blocks.windows.num_missing(sequence.num_computed, sequence.blocks.num_slots + tail_slots)
            for sequence in growing
            if sequence.blocks.windows is not None
        )
        if prefill is not None and prefill.blocks.windows is not None:
            end = min(prefill.num_computed + prefill.smallest_step, prefill.num_known)
            count += prefill.blocks.windows.num_missing(prefill.num_computed, end)
        return count

    def num_spare(self, growing: Collection[Sequence], prefill: Sequence | None = None) -> int:
        """Return how many blocks are left once these requests have grown and a prefill has gone on; a negative result
        is the number of missing blocks."""
        num_window_blocks = self.num_window_blocks_to_grow(growing, prefill)
        return self._cache.num_spare(self.num_blocks_to_grow(growing), num_window_blocks)

    def grow(self, growing: list[Sequence]) -> set[int]:
        """Give each request more slots, for which the cache must have the blocks. Returns the numbers of the requests
        whose last tokens moved."""
        moved: set[int] = set()
        for sequence in sorted(growing, key=_turn_to_grow) if len(growing) > 1 else growing:
            self._headroom.leave(sequence)
            self._slots.num_slots += self._cache.tail_slots
            if sequence.blocks.grow():
                moved.add(sequence.number)
            if sequence.blocks.windows is not None:
                sequence.blocks.windows.advance(sequence.num_computed, sequence.blocks.num_slots)
            if sequence.predicted_length <= sequence.num_expected:
                sequence.predict_length(self._lengths)
            self._headroom.enter(sequence)
        return moved

    def decoded(self, num_tokens: int) -> None:
        """Count the slots that decodes of a plan fill."""
        self._slots.num_filled += num_tokens

    def take_back(self, sequence: Sequence, num_tokens: int = 1) -> None:
        """Compute the newest positions of a request again."""
        sequence.num_computed -= num_tokens
        self._slots.num_filled -= num_tokens

    def fit_drafts(self, wanted: Iterable[tuple[Sequence, int]], growing: list[Sequence]) -> list[int]:
        """Return how many of the drafts that are wanted each request has slots for, after its next token. A request
        joins `growing` if it needs more slots for them and the cache has blocks to spare."""
        counts: list[int] = []
        # Blocks that are surely spare. Counting them anew for every request would take quadratic time.
        num_spare = self.num_spare(growing)
        for sequence, num_drafts in wanted:
            num_left = sequence.blocks.num_slots - sequence.num_computed
            if not num_left:  # the request is in `growing` already, for its next token
                num_left = self._cache.tail_slots
            elif num_left <= num_drafts:
                num_spare -= 1 + self.num_window_blocks_to_grow((sequence,))
                if num_spare <= 0 or self._cache.has_window_memory:
                    num_spare = self.num_spare((*growing, sequence))
                if num_spare > 0:
                    growing.append(sequence)
                    num_left += self._cache.tail_slots
            counts.append(min(num_drafts, num_left - 1))
        return counts

    def take_released(self) -> tuple[str, ...]:
        """Return the ids of the requests that stopped since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def check_integrity(self) -> None:
        sequences = self._sequences.values()
        block_size = self._cache.block_size
        for sequence in sequences:
            table = sequence.blocks
            num_tail_slots = 0 if table.tail is None else self._cache.tail_slots
            num_slots = len(table.whole_block_ids) * block_size + num_tail_slots
            assert table.num_slots == num_slots, sequence.request_id
            assert sequence.num_computed <= num_slots, sequence.request_id
            assert sequence.num_known <= sequence.num_expected <= sequence.length_limit, sequence.request_id
            assert sequence.num_computed < sequence.num_expected, sequence.request_id
        assert self._slots.num_slots == sum(sequence.blocks.num_slots for sequence in sequences)
        assert self._slots.num_filled == sum(sequence.num_filled_slots for sequence in sequences)
        self._headroom.check_integrity(sequences)


def check_records(sequences: Mapping[str, Sequence], running: RunningSet, queue: WaitingQueue) -> None:
    """Raise AssertionError unless every request either runs or waits, with the matching state."""
    running.check_integrity()
    queue.check_integrity()
    assert len(running) + len(queue) == len(sequences)
    assert all(sequences[s.request_id] is s and s.state is State.RUNNING for s in running.sequences)
    for sequence in queue.members:
        assert sequences[sequence.request_id] is sequence
        assert sequence.table is None
        assert not sequence.num_computed
        assert not sequence.followers
        assert (sequence.state is State.SETTLING) == (sequence.num_in_flight > 0)
        assert (sequence.state is State.HELD) == (sequence.leader is not None)
