"""Sampling without a sort: the draw of `kernels.reference` for rows that keep the whole vocabulary.

Two small kernels do it. The first reduces each chunk of the vocabulary to its maximum, the place of the maximum, and
its sum of weights. The second walks the chunks of a row to the chunk that holds the drawn share, and that chunk to
the token. Rows with top-k, top-p or min-p go on to `limited_sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import SamplingBatch
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

CHUNK = 2048


@dataclass(frozen=True, slots=True)
class ChunkStatistics:
    """Statistics of every chunk of every row, [S, chunks] each."""

    maxima: Tensor  # float32; NaN where the chunk has one
    places: Tensor  # int32, the first token that has the maximum
    sums: Tensor  # float32, of weights relative to the chunk's own maximum


@triton.jit
def _chunk_kernel(
    logits, temperature, chunk_max, chunk_argmax, chunk_sum, vocabulary, chunks, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_previous()
    values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
    has_nan = tl.max((values != values).to(tl.int32), axis=0)
    values = tl.where(values != values, float("-inf"), values)
    highest = tl.max(values, axis=0)
    where = chunk * CHUNK + tl.argmax(values, axis=0)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0, heat, 1.0)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp((values - safe) / heat), axis=0)
    at = row * chunks + chunk
    tl.store(chunk_max + at, tl.where(has_nan > 0, float("nan"), highest))
    tl.store(chunk_argmax + at, where)
    tl.store(chunk_sum + at, tl.where(highest == float("-inf"), 0.0, total))


@triton.jit
def _mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(seed, position):
    """Return the numbers of `kernels.reference.uniform`."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(_mix(seed.to(tl.uint64) + golden) + position.to(tl.uint64) * golden)
    return (state >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def highest_of(chunk_max, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row. NaNs do not count."""
    index = tl.arange(0, CHUNKS)
    highs = tl.load(chunk_max + row * chunks + index, mask=index < chunks, other=float("-inf"))
    return tl.max(tl.where(highs != highs, float("-inf"), highs), axis=0)


@triton.jit
def _pick_kernel(
    logits,
    temperature,
    seed,
    position,
    chunk_max,
    chunk_argmax,
    chunk_sum,
    out,
    vocabulary,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    wait_for_previous()
    highs = tl.load(chunk_max + row * chunks + index, mask=inside, other=float("-inf"))
    has_nan = tl.max((highs != highs).to(tl.int32), axis=0)
    highs = tl.where(highs != highs, float("-inf"), highs)
    highest = tl.max(highs, axis=0)
    heat = tl.load(temperature + row)
    token = tl.load(chunk_argmax + row * chunks + tl.argmax(highs, axis=0)).to(tl.int64)
    if heat > 0:
        sums = tl.load(chunk_sum + row * chunks + index, mask=inside, other=0.0)
        sums = sums * tl.exp((tl.where(inside, highs, highest) - highest) / heat)
        cumulative = tl.cumsum(sums, axis=0)
        total = tl.sum(sums, axis=0)
        share = uniform(tl.load(seed + row), tl.load(position + row))
        target = (share * total).to(tl.float32)
        chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        last = tl.max(tl.where(sums > 0, index, 0), axis=0)
        chosen = tl.minimum(chosen, last)
        before = tl.sum(tl.where(index < chosen, sums, 0.0), axis=0)
        ids = chosen * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf"))
        weights = tl.exp((values - highest) / heat)
        passed = tl.sum((tl.cumsum(weights, axis=0) + before <= target).to(tl.int32), axis=0)
        final = tl.max(tl.where(weights > 0, tl.arange(0, CHUNK), 0), axis=0)
        token = (chosen * CHUNK + tl.minimum(passed, final)).to(tl.int64)
    unusable = (has_nan > 0) | (highest == float("-inf")) | (highest == float("inf"))
    tl.store(out + row, tl.where(unusable, -1, token))


def chunk_statistics(logits: Tensor, temperature: Tensor) -> ChunkStatistics:
    rows, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    maxima = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sums = torch.empty_like(maxima)
    _chunk_kernel[(rows, chunks)](
        logits,
        temperature,
        maxima,
        places,
        sums,
        vocabulary,
        chunks,
        CHUNK=CHUNK,
        num_warps=4,
        **launch_options(),
    )
    return ChunkStatistics(maxima, places, sums)


def draw_from_whole_vocabulary(logits: Tensor, batch: SamplingBatch, statistics: ChunkStatistics) -> Tensor:
    """float32 [S, V] → int64 [S], as if no row had limits; -1 for a row that cannot be sampled."""
    rows, vocabulary = logits.shape
    chunks = statistics.maxima.shape[1]
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _pick_kernel[(rows,)](
        logits,
        batch.temperature,
        batch.seed,
        batch.position,
        statistics.maxima,
        statistics.places,
        statistics.sums,
        out,
        vocabulary,
        chunks,
        CHUNKS=next_power_of_2(chunks),
        CHUNK=CHUNK,
        num_warps=4,
        **launch_options(),
    )
    return out
