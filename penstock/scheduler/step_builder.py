"""Builds one step within its budgets, with a model that predicts how long a step takes. Knows no clock, queue or free
blocks.

The model of step times is fitted by recursive least squares with forgetting, on relative errors. Each observation is
divided by the larger of the observed and the predicted time. A step of 5 ms therefore counts as much as a step of 2
s, and an outlier has a bounded error. Errors far beyond the usual one are cut as well.

Only the diagonal of the covariance is kept. A weight whose feature is absent from a step stays exactly as it is, at
the price of slower convergence. Hours of decoding change neither the cost of a prefill token nor its variance; a full
covariance would drift away.

Two budgets bound a step: tokens, and, while any request is decoding, predicted time. The second limits prefill
only; the first prefill of a step always gets a minimum chunk, so that a long prompt advances whatever the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from penstock.core.plan import Chunk, Encoding
from penstock.scheduler.sequence import Drafted, Sequence

_FORGETTING = 0.98  # of each weight, per step that tells something about it: old steps fade
_NOISE_VARIANCE = 0.01  # of relative errors: about a tenth either way
_CUT_AT_USUAL_ERRORS = 3.0
_MIN_CUT = 0.1  # relative errors below this are never cut
_USUAL_ERROR_DECAY = 0.9
_NO_LIMIT_TOKENS = 1 << 30

# Seconds per unit before any observation: between a CPU and a fast GPU. The spread covers both.
_PRIOR = (3e-3, 1e-4, 1e-4, 2e-7, 1e-8, 2e-5)
_PRIOR_SPREAD = 30.0


@dataclass(slots=True, init=False)
class StepLoad:
    """The work of a step: the features of the model, besides a constant. The constructor is written out, because
    those of dataclasses stay slow when the scheduler is compiled."""

    prefill_tokens: int
    decode_sequences: int
    decode_context_tokens: int  # KV entries that decodes read
    prefill_pairs: int  # of query and key, in the attention of prefills
    draft_tokens: int  # of decodes, besides one token for each
    encoder_patches: int  # of images

    def __init__(
        self,
        prefill_tokens: int = 0,
        decode_sequences: int = 0,
        decode_context_tokens: int = 0,
        prefill_pairs: int = 0,
        draft_tokens: int = 0,
        encoder_patches: int = 0,
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self.decode_sequences = decode_sequences
        self.decode_context_tokens = decode_context_tokens
        self.prefill_pairs = prefill_pairs
        self.draft_tokens = draft_tokens
        self.encoder_patches = encoder_patches

    @property
    def decode_rows(self) -> int:
        """Count the tokens of decodes. A drafted token costs what another decode would, without its context. Two
        features could not be told apart, since steps with many decodes have many drafts."""
        return self.decode_sequences + self.draft_tokens

    def add_prefill(self, start: int, num_tokens: int) -> None:
        self.prefill_tokens += num_tokens
        self.prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepTimePredictor:
    def __init__(self) -> None:
        self._weights = list(_PRIOR)  # seconds per unit of each feature; never negative
        self._max_variances = [(weight * _PRIOR_SPREAD) ** 2 for weight in _PRIOR]
        self._variances = list(self._max_variances)
        self._usual_error = 1.0

    def predict(self, load: StepLoad) -> float:
        """Predict the seconds that a step takes."""
        base, per_prefill, per_row, per_context, per_pair, per_patch = self._weights
        return (
            base
            + per_prefill * load.prefill_tokens
            + per_row * load.decode_rows
            + per_context * load.decode_context_tokens
            + per_pair * load.prefill_pairs
            + per_patch * load.encoder_patches
        )

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """Predict the seconds that tokens of a prompt, from `start` on, add to steps."""
        load = StepLoad()
        load.add_prefill(start, num_tokens)
        return self.predict(load) - self._weights[0]

    @property
    def draft_token_s(self) -> float:
        """Return the predicted seconds of one drafted token in a step."""
        return self._weights[2]

    def prefill_tokens_within(self, target_s: float, load: StepLoad, start: int) -> int:
        """Return how many tokens of a prompt, from `start` on, fit on top of `load` in a step of `target_s`."""
        room_s = target_s - self.predict(load)
        if room_s <= 0.0:
            return 0
        per_pair = self._weights[4]
        per_token = self._weights[1] + per_pair * (start + 0.5)
        if per_token <= 0.0:
            return _NO_LIMIT_TOKENS
        # The positive root of per_pair / 2 · n² + per_token · n = room_s, in the form that survives per_pair = 0.
        return int(2.0 * room_s / (per_token + sqrt(per_token * per_token + 2.0 * per_pair * room_s)))

    def tiles_within(self, target_s: float, load: StepLoad, tile_patches: int) -> int:
        """Return how many tiles of an image can be encoded on top of `load` in a step of `target_s`."""
        tile_s = self._weights[5] * tile_patches
        room_s = target_s - self.predict(load)
        if room_s <= 0.0:
            return 0
        return int(room_s / tile_s) if tile_s > 0.0 else _NO_LIMIT_TOKENS

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        """Learn from a step."""
        if not (load.prefill_tokens or load.prefill_pairs or load.encoder_patches):
            self.observe_decodes([(load.decode_rows, load.decode_context_tokens, elapsed_s)])
        elif elapsed_s > 0.0:
            predicted_s = self.predict(load)
            scale = 1.0 / (elapsed_s if elapsed_s > predicted_s else predicted_s)
            error = self._cut((elapsed_s - predicted_s) * scale)
            features = (
                scale,
                load.prefill_tokens * scale,
                load.decode_rows * scale,
                load.decode_context_tokens * scale,
                load.prefill_pairs * scale,
                load.encoder_patches * scale,
            )
            weights, variances, most = self._weights, self._variances, self._max_variances
            total = 0.0
            for index in range(6):
                total += variances[index] * features[index] * features[index]
            total += _NOISE_VARIANCE
            for index in range(6):
                if features[index]:
                    weights[index], variances[index] = _corrected(
                        weights[index], variances[index], most[index], features[index], error, total
                    )

    def observe_decodes(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """Learn from steps of decodes alone: the rows, the context and the seconds of each. The result is that of
        `observe`, to the last bit, because absent features add zero."""
        base, _, per_row, per_context, *_ = weights = self._weights
        of_base, _, of_row, of_context, *_ = variances = self._variances
        most_base, _, most_row, most_context, *_ = self._max_variances
        for rows, context_tokens, elapsed_s in steps:
            if elapsed_s <= 0.0:
                continue
            predicted_s = base + per_row * rows + per_context * context_tokens
            scale = 1.0 / (elapsed_s if elapsed_s > predicted_s else predicted_s)
            error = self._cut((elapsed_s - predicted_s) * scale)
            in_rows, in_context = rows * scale, context_tokens * scale
            total = of_base * scale * scale + of_row * in_rows * in_rows
            total += of_context * in_context * in_context
            total += _NOISE_VARIANCE
            base, of_base = _corrected(base, of_base, most_base, scale, error, total)
            if rows:
                per_row, of_row = _corrected(per_row, of_row, most_row, in_rows, error, total)
            if context_tokens:
                per_context, of_context = _corrected(
                    per_context, of_context, most_context, in_context, error, total
                )
        weights[0], weights[2], weights[3] = base, per_row, per_context
        variances[0], variances[2], variances[3] = of_base, of_row, of_context

    def _cut(self, error: float) -> float:
        usual_error = self._usual_error
        limit = _CUT_AT_USUAL_ERRORS * usual_error
        if limit < _MIN_CUT:
            limit = _MIN_CUT
        self._usual_error = _USUAL_ERROR_DECAY * usual_error + (1.0 - _USUAL_ERROR_DECAY) * abs(error)
        return error if -limit <= error <= limit else (limit if error > 0.0 else -limit)


def _corrected(
    weight: float, variance: float, most: float, feature: float, error: float, total: float
) -> tuple[float, float]:
    """Return the weight of one feature, corrected by its part in the error, and the new variance, which is at most
    `most`. `total`: the variance of all parts."""
    spread = variance * feature
    gain = spread / total
    weight += gain * error
    variance = (variance - gain * spread) / _FORGETTING
    return weight if weight > 0.0 else 0.0, variance if variance < most else most


MIN_PREFILL_TOKENS = 16
# Time for images in a step without decodes: new requests and cancellations wait for the step's end.
IDLE_ENCODER_S = 0.5
WORTHWHILE_TILES = 4  # with fewer tiles, dropping tokens to end at a full tile costs more than it saves


class StepBuilder:
    __slots__ = (
        "_block_size",
        "_predictor",
        "_target_s",
        "_tile_tokens",
        "chunks",
        "drafted",
        "encodings",
        "load",
        "num_tokens_left",
        "others_decode",
        "sampling",
        "scoring",
    )

    def __init__(
        self,
        num_tokens: int,
        predictor: StepTimePredictor,
        target_s: float | None,
        tile_tokens: int,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        self._predictor = predictor
        self._target_s = target_s
        self._tile_tokens = tile_tokens
        self.num_tokens_left = num_tokens
        self.chunks: list[Chunk] = []
        self.encodings: list[Encoding] = []
        self.sampling: dict[str, Sequence] = {}
        self.drafted: dict[str, Drafted] = {}  # by request
        self.scoring: dict[str, Sequence] = {}  # requests with chunks whose prompt tokens are scored
        self.load = StepLoad()
        self.others_decode = False  # requests of other ranks wait for their tokens until this step ends

    def add_decodes(self, sequences: list[Sequence], moved: set[int]) -> None:
        """Add one token for each request. `moved`: numbers of requests whose last block the executor does not
        know."""
        chunks, sampling = self.chunks, self.sampling
        context_tokens = 0
        for sequence in sequences:
            start = sequence.num_computed
            request_id = sequence.request_id
            in_flight = 1 if start >= sequence.num_known else 0
            if (moved and sequence.number in moved) or sequence.num_drafted:
                chunks.append(self._changed_decode(sequence, in_flight, sequence.number in moved))
            else:
                chunks.append(Chunk(request_id, start, 1, True, (), False, in_flight))
            sampling[request_id] = sequence
            sequence.num_computed = start + 1
            sequence.num_expected += 1
            context_tokens += start
        self.num_tokens_left -= len(sequences)
        self.load.decode_sequences = len(sequences)
        self.load.decode_context_tokens = context_tokens + len(sequences)

    def _changed_decode(self, sequence: Sequence, in_flight: int, is_moved: bool) -> Chunk:
        """Return one token of a request with blocks that the executor does not know, or with drafts in flight."""
        table = sequence.blocks
        return Chunk(
            sequence.request_id,
            sequence.num_computed,
            1,
            True,
            (table.block_ids[-1],) if is_moved else (),
            in_flight=in_flight,
            tail_offset=(table.half_offset or 0) if is_moved else 0,
            window_blocks=() if table.windows is None else table.windows.take_new(),
            unsettled=sequence.num_drafted,
        )

    def add_drafted(self, sequence: Sequence, drafted: Drafted) -> None:
        """Add the newest token of a request, and drafts of the tokens that follow."""
        start, drafts = sequence.num_computed, drafted.token_ids
        num_tokens = 1 + len(drafts)
        table = sequence.blocks
        self.chunks.append(
            Chunk(
                sequence.request_id,
                start,
                num_tokens,
                True,
                tuple(table.block_ids[start // self._block_size :]),
                in_flight=1 if start >= sequence.num_known else 0,
                tail_offset=table.half_offset or 0,
                drafts=drafts,
                window_blocks=() if table.windows is None else table.windows.take_new(),
                unsettled=sequence.num_drafted,
                tree_depth=drafted.draft.tree_depth,
            )
        )
        self.sampling[sequence.request_id] = sequence
        self.drafted[sequence.request_id] = sequence.drafted = drafted
        sequence.num_drafted += len(drafts)
        sequence.num_computed = start + num_tokens
        sequence.num_expected += num_tokens
        self.num_tokens_left -= num_tokens
        self.load.decode_sequences += 1
        self.load.decode_context_tokens += start + 1
        self.load.draft_tokens += len(drafts)

    def prefill_room(self, start: int) -> int:
        """Return how many tokens of a prompt, from `start` on, this step can still take; 0 when a chunk is not worth
        it."""
        room = self.num_tokens_left
        is_first = not self.load.prefill_tokens
        if self._target_s is not None and (self.load.decode_sequences or self.others_decode):
            in_time = self._predictor.prefill_tokens_within(self._target_s, self.load, start)
            in_time = self._in_whole_tiles(in_time)
            room = min(room, max(in_time, MIN_PREFILL_TOKENS) if is_first else in_time)
        return room if is_first or room >= MIN_PREFILL_TOKENS else 0

    def _in_whole_tiles(self, num_tokens: int) -> int:
        """Return at most `num_tokens`, such that the step fills its tiles."""
        filled = self.load.decode_sequences + self.load.draft_tokens + self.load.prefill_tokens
        tiles = (filled + num_tokens) // self._tile_tokens
        if tiles < WORTHWHILE_TILES:
            return num_tokens
        return max(tiles * self._tile_tokens - filled, 0)

    def encoder_room(self, tile_patches: int) -> int:
        """Return how many tiles of an image this step can still encode. The first tile of a step always fits."""
        target_s = IDLE_ENCODER_S
        if self.load.decode_sequences or self.others_decode:
            if self._target_s is None:
                return _NO_LIMIT_TOKENS
            target_s = self._target_s
        num_tiles = self._predictor.tiles_within(target_s, self.load, tile_patches)
        return num_tiles if self.load.encoder_patches else max(1, num_tiles)

    def add_encoding(self, encoding: Encoding, tile_patches: int) -> None:
        self.encodings.append(encoding)
        self.load.encoder_patches += encoding.num_tiles * tile_patches

    def add_prefill(self, sequence: Sequence, num_tokens: int, *, begins: bool) -> None:
        """Add up to `num_tokens` of the known tokens that are not computed."""
        start = sequence.num_computed
        num_tokens = min(num_tokens, sequence.num_known - start)
        if sequence.snapshot_ends is not None:
            num_tokens = self._cut_for_states(start, num_tokens, sequence)
        samples = start + num_tokens == sequence.num_known
        windows = sequence.blocks.windows
        if windows is not None:
            windows.advance(start, start + num_tokens)
        new_blocks = tuple(sequence.blocks.block_ids) if begins else ()
        tail_offset = (sequence.blocks.half_offset or 0) if begins else 0
        scores_from = None
        if sequence.num_scored < min(start + num_tokens, sequence.num_prompt - 1):
            scores_from = sequence.num_scored
            sequence.num_scored = start + num_tokens
            self.scoring[sequence.request_id] = sequence
        self.chunks.append(
            Chunk(
                sequence.request_id,
                start,
                num_tokens,
                samples,
                new_blocks,
                begins,
                tail_offset=tail_offset,
                scores_from=scores_from,
                state_slot=sequence.blocks.state_slot if begins else None,
                window_blocks=() if windows is None else windows.take_new(),
            )
        )
        sequence.has_row = True
        sequence.num_computed = start + num_tokens
        sequence.is_prefilling = not samples
        if samples:
            self.sampling[sequence.request_id] = sequence
            sequence.num_expected += 1
        self.num_tokens_left -= num_tokens
        self.load.add_prefill(start, num_tokens)

    def _cut_for_states(self, start: int, num_tokens: int, sequence: Sequence) -> int:
        """Return at most `num_tokens`, such that the chunk ends where a snapshot of its state is taken; or at the end
        of a block, so that a snapshot could be taken if the request is preempted."""
        ends, block_size = sequence.snapshot_ends, self._block_size
        end = start + num_tokens
        if ends and ends[0] * block_size <= end:
            return ends[0] * block_size - start
        whole = end - end % block_size
        return whole - start if start < whole and end < sequence.num_known else num_tokens


def share_of_room(room: int) -> int:
    """Return the tokens of a prefill when other requests wait behind it. The prefill gets most of the room, but not
    all, so that a short prompt need not wait for a very long one."""
    if room < 2 * MIN_PREFILL_TOKENS:
        return room
    return room - max(room // 4, MIN_PREFILL_TOKENS)
