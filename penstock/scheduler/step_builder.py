"""Builds one step: its chunks, and what is left of its budgets. Knows no queue and no free blocks.

Two budgets bound a step: tokens, and, while any request is decoding, predicted time. The second limits prefill
only; the first prefill of a step always gets a minimum chunk, so that a long prompt advances whatever the target.
"""

from __future__ import annotations

from penstock.core.plan import Chunk
from penstock.scheduler.predictor import StepLoad, StepTimePredictor
from penstock.scheduler.sequence import Sequence

MIN_PREFILL_TOKENS = 16
WORTHWHILE_TILES = 4  # below this, what is left out to end with a whole one weighs more


class StepBuilder:
    __slots__ = ("_predictor", "_target_s", "_tile_tokens", "chunks", "load", "num_tokens_left", "sampling")

    def __init__(
        self, num_tokens: int, predictor: StepTimePredictor, target_s: float | None, tile_tokens: int
    ) -> None:
        self._predictor = predictor
        self._target_s = target_s
        self._tile_tokens = tile_tokens
        self.num_tokens_left = num_tokens
        self.chunks: list[Chunk] = []
        self.sampling: dict[str, Sequence] = {}
        self.load = StepLoad()

    def add_decodes(self, sequences: list[Sequence], moved: set[int]) -> None:
        """One token for each; `moved` are the numbers of those whose last block the executor does not know."""
        chunks, sampling = self.chunks, self.sampling
        context_tokens = 0
        for sequence in sequences:
            start = sequence.num_computed
            request_id = sequence.request_id
            new_blocks: tuple[int, ...] = ()
            tail_offset = 0
            if moved and sequence.number in moved:
                table = sequence.blocks
                new_blocks = (table.block_ids[-1],)
                tail_offset = table.half_offset or 0
            in_flight = 1 if start >= sequence.num_known else 0
            chunks.append(Chunk(request_id, start, 1, True, new_blocks, False, in_flight, tail_offset))
            sampling[request_id] = sequence
            sequence.num_computed = start + 1
            sequence.num_expected += 1
            context_tokens += start
        self.num_tokens_left -= len(sequences)
        self.load.decode_sequences = len(sequences)
        self.load.decode_context_tokens = context_tokens + len(sequences)

    def prefill_room(self, start: int) -> int:
        """Tokens of a prompt, from `start` on, that this step can still take; 0 when not worth a chunk."""
        room = self.num_tokens_left
        is_first = not self.load.prefill_tokens
        if self._target_s is not None and self.load.decode_sequences:
            in_time = self._predictor.prefill_tokens_within(self._target_s, self.load, start)
            in_time = self._in_whole_tiles(in_time)
            room = min(room, max(in_time, MIN_PREFILL_TOKENS) if is_first else in_time)
        return room if is_first or room >= MIN_PREFILL_TOKENS else 0

    def _in_whole_tiles(self, num_tokens: int) -> int:
        """At most `num_tokens`, so that with them the step fills its tiles."""
        filled = self.load.decode_sequences + self.load.prefill_tokens
        tiles = (filled + num_tokens) // self._tile_tokens
        if tiles < WORTHWHILE_TILES:
            return num_tokens
        return max(tiles * self._tile_tokens - filled, 0)

    def add_prefill(self, sequence: Sequence, num_tokens: int, *, begins: bool) -> None:
        """Up to `num_tokens` of the known tokens that are not computed."""
        start = sequence.num_computed
        num_tokens = min(num_tokens, sequence.num_known - start)
        samples = start + num_tokens == sequence.num_known
        new_blocks = tuple(sequence.blocks.block_ids) if begins else ()
        tail_offset = (sequence.blocks.half_offset or 0) if begins else 0
        self.chunks.append(
            Chunk(
                sequence.request_id, start, num_tokens, samples, new_blocks, begins, tail_offset=tail_offset
            )
        )
        sequence.num_computed = start + num_tokens
        sequence.is_prefilling = not samples
        if samples:
            self.sampling[sequence.request_id] = sequence
            sequence.num_expected += 1
        self.num_tokens_left -= num_tokens
        self.load.add_prefill(start, num_tokens)


def share_of_room(room: int) -> int:
    """What a prefill takes when others wait behind it: most, but so that a short prompt need not wait for a very
    long one to finish."""
    if room < 2 * MIN_PREFILL_TOKENS:
        return room
    return room - max(room // 4, MIN_PREFILL_TOKENS)
