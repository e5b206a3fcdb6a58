"""Top-k, top-p and min-p without a sort: the draw of `kernels.reference` for rows that limit which tokens may be
drawn.

The kept tokens are a prefix of the row's ranking, so one logit (and, among equal logits, a count) bounds them. The
bound is found in two steps. First, a histogram of the row, in steps of a quarter of an octave of weight, gives a
level below which no token can be kept, and the few tokens above it are moved together in the order of their ids.
Second, a bisection over the bits of their logits finds the bound exactly. A row that keeps many tokens is slower,
never wrong.

Each kernel runs after `sampling.sample_whole_vocabulary`. It reads that kernel's reductions of the row, and
overwrites its answer for rows that have limits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import SamplingBatch
from penstock.kernels.triton.device import next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.sampling import CHUNK, ChunkStatistics, highest_of, uniform

LEVELS = tl.constexpr(128)
LEVELS_PER_OCTAVE = tl.constexpr(4.0)
LOG2_E = tl.constexpr(1.4426950408889634)
TILE = 4096


@triton.jit
def _is_limited(row, temperature, top_k, top_p, min_p, vocabulary):
    k = tl.load(top_k + row)
    return (tl.load(temperature + row) > 0) & (
        ((k > 0) & (k < vocabulary)) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    )


@triton.jit
def _weight(values, highest, heat):
    return tl.exp((values - highest) / heat)


@triton.jit
def _level(values, highest, heat):
    """Quarter octaves of weight below the row's most probable token."""
    distance = (highest - values) / heat * (LOG2_E * LEVELS_PER_OCTAVE)
    return tl.minimum(distance, LEVELS - 1.0).to(tl.int32)


@triton.jit
def _order(values):
    """float32 → int32 that compare as the floats do."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # minus zero equals zero
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _histogram_kernel(
    logits, temperature, top_k, top_p, min_p, chunk_max, histogram, vocabulary, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many tokens of a chunk are on each level. Forbidden ones (minus infinity) are on none."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_previous()
    if _is_limited(row, temperature, top_k, top_p, min_p, vocabulary):
        highest = highest_of(chunk_max, row, chunks, CHUNKS)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
        allowed = values > float("-inf")
        level = _level(tl.where(allowed, values, highest), highest, tl.load(temperature + row))
        counts = tl.histogram(level, LEVELS, mask=allowed)
        tl.store(histogram + (row * chunks + chunk) * LEVELS + tl.arange(0, LEVELS), counts)


@triton.jit
def _level_kernel(
    temperature, top_k, top_p, min_p, chunk_max, chunk_sum, histogram, lowest_level, offsets, vocabulary, chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The lowest level that a row may keep tokens of, and where each chunk's candidates go: `offsets` [S, chunks + 1]
    ends with their number, which is 0 for a row without limits or with a NaN."""
    row = tl.program_id(0).to(tl.int64)
    levels = tl.arange(0, LEVELS)
    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    wait_for_previous()
    heat = tl.load(temperature + row)
    highs = tl.load(chunk_max + row * chunks + index, mask=inside, other=float("-inf"))
    has_nan = tl.max((highs != highs).to(tl.int32), axis=0) > 0
    highest = highest_of(chunk_max, row, chunks, CHUNKS)
    usable = (highest > float("-inf")) & (highest < float("inf")) & (has_nan == 0)
    chunk_counts = tl.zeros((CHUNKS,), tl.int32)
    if usable & _is_limited(row, temperature, top_k, top_p, min_p, vocabulary):
        parts_at = histogram + (row * chunks + index[:, None]) * LEVELS + levels[None, :]
        parts = tl.load(parts_at, mask=inside[:, None], other=0)
        counts = tl.sum(parts, axis=0)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        least = tl.load(min_p + row)
        lowest = LEVELS - 1
        if (k > 0) & (k < vocabulary):
            # The first level at which there are k tokens.
            lowest = tl.minimum(lowest, tl.sum((tl.cumsum(counts, axis=0) < k).to(tl.int32), axis=0))
        elif p < 1:
            # The first below which at most 1 - p is left. A chunk's sum is relative to its own maximum.
            sums = tl.load(chunk_sum + row * chunks + index, mask=inside, other=0.0)
            total = tl.sum(sums * tl.exp((highs - highest) / heat), axis=0)
            most = counts.to(tl.float32) * tl.exp2(-levels.to(tl.float32) / LEVELS_PER_OCTAVE) * 1.001
            below = tl.sum(most, axis=0) - tl.cumsum(most, axis=0)
            lowest = tl.minimum(lowest, tl.sum((below > (1 - p) * total).to(tl.int32), axis=0))
        # Top-p after top-k needs the weight of all that top-k keeps.
        if (least > 0) & ((k == 0) | (p >= 1)):
            by_weight = (-tl.log2(least) * LEVELS_PER_OCTAVE + 1).to(tl.int32)
            lowest = tl.minimum(lowest, tl.maximum(by_weight, 0))
        tl.store(lowest_level + row, lowest)
        chunk_counts = tl.sum(tl.where(levels[None, :] <= lowest, parts, 0), axis=1)
    ends = tl.cumsum(chunk_counts, axis=0)
    tl.store(offsets + row * (chunks + 1), 0)
    tl.store(offsets + row * (chunks + 1) + 1 + index, ends, mask=inside)


@triton.jit
def _gather_kernel(
    logits, temperature, chunk_max, lowest_level, offsets, candidates, vocabulary, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Move a row's candidates together, in the order of their ids."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_previous()
    first = tl.load(offsets + row * (chunks + 1) + chunk)
    if tl.load(offsets + row * (chunks + 1) + chunk + 1) > first:
        highest = highest_of(chunk_max, row, chunks, CHUNKS)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
        chosen = _is_candidate(values, highest, tl.load(temperature + row), tl.load(lowest_level + row))
        place = first + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(candidates + row * vocabulary + place, values, mask=chosen)


@triton.jit
def _is_candidate(values, highest, heat, lowest):
    allowed = values > float("-inf")
    return allowed & (_level(tl.where(allowed, values, highest), highest, heat) <= lowest)


@triton.jit
def _least_of(candidates, count, TILE: tl.constexpr):
    least = tl.full((TILE,), float("inf"), tl.float32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(candidates + at, mask=at < count, other=float("inf")))
    return tl.min(least, axis=0)


@triton.jit
def _count_from(candidates, count, bound, TILE: tl.constexpr):
    """Candidates whose order is at least `bound`."""
    found = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        values = tl.load(candidates + at, mask=at < count, other=float("-inf"))
        found += ((_order(values) >= bound) & (at < count)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _weights_above(candidates, count, first, second, third, highest, heat, TILE: tl.constexpr):
    """The weights, as float64, of the candidates above each of three bounds: one pass for all of them."""
    above_first = tl.zeros((TILE,), tl.float64)
    above_second = tl.zeros((TILE,), tl.float64)
    above_third = tl.zeros((TILE,), tl.float64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        values = tl.load(candidates + at, mask=at < count, other=float("-inf"))
        order = _order(values)
        weights = tl.where(at < count, _weight(values, highest, heat), 0.0).to(tl.float64)
        above_first += tl.where(order > first, weights, 0.0)
        above_second += tl.where(order > second, weights, 0.0)
        above_third += tl.where(order > third, weights, 0.0)
    return tl.sum(above_first, axis=0), tl.sum(above_second, axis=0), tl.sum(above_third, axis=0)


@triton.jit
def _weight_from(candidates, count, bound, highest, heat, TILE: tl.constexpr):
    """Return the weight, as float64, of the candidates whose order is at least `bound`."""
    weight = tl.zeros((TILE,), tl.float64)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        values = tl.load(candidates + at, mask=at < count, other=float("-inf"))
        kept = (_order(values) >= bound) & (at < count)
        weight += tl.where(kept, _weight(values, highest, heat), 0.0).to(tl.float64)
    return tl.sum(weight, axis=0)


@triton.jit
def _weight_at(bound, highest, heat):
    """The weight of a token whose order is `bound`."""
    order = bound.to(tl.int32)
    value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return _weight(value, highest, heat).to(tl.float64)


@triton.jit
def _kept_weights(
    candidates, count, start, bound, ties_before, ties, least, highest, heat, TILE: tl.constexpr
):
    """Return the weight of each candidate of one tile, 0 for candidates that are not kept, and how many candidates
    equal the bound."""
    at = start + tl.arange(0, TILE)
    values = tl.load(candidates + at, mask=at < count, other=float("-inf"))
    order = _order(values)
    is_tie = (order == bound) & (at < count)
    tie_rank = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0) - 1
    weights = _weight(values, highest, heat)
    kept = ((order > bound) | (is_tie & (tie_rank < ties))) & (at < count)
    # The most probable token always stays, however its weight is rounded.
    kept = kept & ((weights >= least) | (values == highest))
    return tl.where(kept, weights, 0.0).to(tl.float64), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _cut_at_count(candidates, count, lowest, top, k, TILE: tl.constexpr):
    """Top-k: the highest bound from which there are k candidates, and how many that equal it are kept."""
    bound = lowest
    beyond = top + 1
    while beyond - bound > 1:
        middle = (beyond + bound) >> 1
        if _count_from(candidates, count, middle, TILE) >= k:
            bound = middle
        else:
            beyond = middle
    return bound, k - _count_from(candidates, count, bound + 1, TILE)


@triton.jit
def _cut_at_weight(candidates, count, lowest, top, wanted, highest, heat, TILE: tl.constexpr):
    """Top-p: the lowest bound above which less than `wanted` is found, and how many that equal it are kept."""
    under = lowest - 1
    bound = top
    while bound - under > 1:
        width = bound - under
        first = under + tl.maximum(width >> 2, 1)
        second = under + tl.maximum(width >> 1, 1)
        third = under + tl.maximum((width >> 1) + (width >> 2), 1)
        above_first, above_second, above_third = _weights_above(
            candidates, count, first, second, third, highest, heat, TILE
        )
        if above_first < wanted:
            bound = first
        elif above_second < wanted:
            under = first
            bound = second
        elif above_third < wanted:
            under = second
            bound = third
        else:
            under = third
    missing = wanted - _weight_from(candidates, count, bound + 1, highest, heat, TILE)
    each = tl.maximum(_weight_at(bound, highest, heat), 1e-300)
    return bound, tl.minimum(tl.ceil(missing / each), 1e9).to(tl.int32)


@triton.jit
def _draw(candidates, count, bound, ties, least, share, highest, heat, TILE: tl.constexpr):
    """Return the drawn candidate: walk the kept ones in the order of their ids until their weight passes a share of
    the total."""
    total = tl.zeros((), tl.float64)
    seen = 0
    for start in range(0, count, TILE):
        weights, equals = _kept_weights(
            candidates, count, start, bound, seen, ties, least, highest, heat, TILE
        )
        total += tl.sum(weights, axis=0)
        seen += equals
    target = share * total
    passed = tl.zeros((), tl.float64)
    seen = 0
    chosen = count
    last = 0
    for start in range(0, count, TILE):
        weights, equals = _kept_weights(
            candidates, count, start, bound, seen, ties, least, highest, heat, TILE
        )
        at = start + tl.arange(0, TILE)
        is_past = (passed + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_past, at, count), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0), axis=0))
        passed += tl.sum(weights, axis=0)
        seen += equals
    return tl.where(chosen == count, last, chosen)  # rounding may leave the target out of reach


@triton.jit
def _draw_kernel(
    logits, temperature, top_k, top_p, min_p, seed, position, chunk_max, chunk_sum, lowest_level, offsets,
    all_candidates, out, vocabulary, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous()
    count = tl.load(offsets + row * (chunks + 1) + chunks)
    if count > 0:
        candidates = all_candidates + row * vocabulary
        heat = tl.load(temperature + row)
        highest = highest_of(chunk_max, row, chunks, CHUNKS)
        top = _order(highest).to(tl.int64)
        index = tl.arange(0, CHUNKS)
        inside = index < chunks

        bound = _order(_least_of(candidates, count, TILE)).to(tl.int64)
        ties = count
        k = tl.load(top_k + row)
        is_cut = (k > 0) & (k < count)
        if is_cut:
            bound, ties = _cut_at_count(candidates, count, bound, top, k, TILE)
        p = tl.load(top_p + row).to(tl.float64)
        if p < 1:
            if (k > 0) & (k < vocabulary):
                total = _weight_from(candidates, count, bound + is_cut, highest, heat, TILE)
                if is_cut:
                    total += ties * _weight_at(bound, highest, heat)
            else:
                sums = tl.load(chunk_sum + row * chunks + index, mask=inside, other=0.0)
                highs = tl.load(chunk_max + row * chunks + index, mask=inside, other=float("-inf"))
                total = tl.sum((sums * tl.exp((highs - highest) / heat)).to(tl.float64), axis=0)
            wanted = tl.maximum(p * total, 1e-30)
            p_bound, p_ties = _cut_at_weight(candidates, count, bound, top, wanted, highest, heat, TILE)
            ties = tl.where(p_bound > bound, p_ties, tl.minimum(ties, p_ties))
            bound = p_bound
        share = uniform(tl.load(seed + row), tl.load(position + row))
        chosen = _draw(candidates, count, bound, ties, tl.load(min_p + row), share, highest, heat, TILE)

        # Back to its id: the chunk it came from, and its place among that chunk's candidates.
        begins = tl.load(offsets + row * (chunks + 1) + index, mask=inside, other=0x7FFFFFFF)
        chunk = tl.sum((begins <= chosen).to(tl.int32), axis=0) - 1
        first = tl.load(offsets + row * (chunks + 1) + chunk)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
        is_candidate = _is_candidate(values, highest, heat, tl.load(lowest_level + row))
        place = first + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        token = tl.max(tl.where(is_candidate & (place == chosen), ids, 0), axis=0)
        tl.store(out + row, token.to(tl.int64))


def redraw_limited_rows(
    logits: Tensor, batch: SamplingBatch, statistics: ChunkStatistics, out: Tensor
) -> None:
    """Overwrites in `out` (int64 [S]) the tokens of rows that have limits and no NaN."""
    rows, vocabulary = logits.shape
    chunks = statistics.maxima.shape[1]

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    histogram = scratch(rows, chunks, LEVELS.value)
    lowest_level = scratch(rows)
    offsets = scratch(rows, chunks + 1)
    candidates = scratch(rows, vocabulary, dtype=torch.float32)
    limits = batch.temperature, batch.top_k, batch.top_p, batch.min_p
    padded = next_power_of_2(chunks)
    _histogram_kernel[(rows, chunks)](
        logits, *limits, statistics.maxima, histogram, vocabulary, chunks,
        CHUNKS=padded, CHUNK=CHUNK, num_warps=4, **launch_options(),
    )  # fmt: skip
    _level_kernel[(rows,)](
        *limits, statistics.maxima, statistics.sums, histogram, lowest_level, offsets, vocabulary, chunks,
        CHUNKS=padded, num_warps=8, **launch_options(),
    )  # fmt: skip
    _gather_kernel[(rows, chunks)](
        logits, batch.temperature, statistics.maxima, lowest_level, offsets, candidates, vocabulary, chunks,
        CHUNKS=padded, CHUNK=CHUNK, num_warps=4, **launch_options(),
    )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, *limits, batch.seed, batch.position, statistics.maxima, statistics.sums, lowest_level, offsets,
        candidates, out, vocabulary, chunks, CHUNKS=padded, CHUNK=CHUNK, TILE=TILE, num_warps=16, **launch_options(),
    )  # fmt: skip
