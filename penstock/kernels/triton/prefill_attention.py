"""Paged attention of requests with several query tokens each: whole prompts, or chunks over a cached prefix.

A tile holds all heads that read the same keys, so that keys are loaded once for all of them. A tile then spans few
tokens, and little is wasted at the ends of chunks and at the causal mask. Most keys precede all queries of a tile;
only the other keys are masked one by one. Where the tiles do not fill the chip, contexts are split as in
`decode_attention`. On Hopper, a kernel of its own computes what fills the chip (`hopper_attention`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.attention_parts import Partials, absorb, finish, load_tile
from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.paged_kv import PagedLayer
from penstock.kernels.triton.targets import attention_tiles, current, has_hopper_kernels, stages

LARGE_TILE, SMALL_TILE, SMALLEST_TILE = 128, 64, 16
LARGE_TILE_GAIN = 1.1
MAX_TILE_HEADS = 16
SHORTEST_SPLIT = 512
SPLIT_UNIT = 256  # a multiple of tiles and of blocks
MAX_SPLITS = 32
SPLIT_COST, SPLIT_COST_KEYS = 1.35, 64  # of a split: a factor, and keys that could be read instead
PROGRAMS_PER_PROCESSOR = 2  # that it can hold
NO_WINDOW = 1 << 30
# Of `hopper_attention`: up to which context the kernel of this module is faster; and the time of a round, and of
# merging the splits of a row, in keys that a program could absorb instead.
SHORT_CONTEXT = 320
ROUND_KEYS, MERGED_ROW_KEYS = 500, 0.2


@triton.jit
def _rows(tile_start, q_start, q_count, first_head, H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of [T, H, D] that a tile holds, and whether each exists. The heads of a token are
    neighbours."""
    row = tl.arange(0, ROWS)
    token = tile_start + row // HEADS
    return (q_start + token) * H + first_head + row % HEADS, token < q_count


@triton.jit
def _absorb_tile(
    highest, total, weighted, queries, cache, table, index, first_position, end, window, group,
    scale, softcap,
    G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Absorb one tile of keys. With MASKED, each query attends only to its part of the tile."""
    tl.assume(index >= 0)
    at = index * KEYS + tl.arange(0, KEYS)
    present = at < end
    visible = present[None, :]
    if MASKED:
        behind = (first_position + tl.arange(0, weighted.shape[0]) // HEADS)[:, None] - at[None, :]
        visible = visible & (behind >= 0) & (behind < window)
    tile = load_tile(
        cache, table, at, present, group, G, D, weighted.shape[1], BLOCK_SIZE, MASKED, HAS_SCALES
    )
    return absorb(
        highest, total, weighted, queries, tile, visible, scale, softcap, MASKED, HAS_CAP, HAS_SCALES
    )


@triton.jit(
    do_not_specialize=["table_stride", "first_request", "window", "first_row", "split_keys", "splits"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    sinks,
    out,
    partial_out,
    partial_max,
    partial_sum,
    block_tables,
    query_starts,
    context_lens,
    table_stride,
    first_request,
    first_row,
    scale,
    softcap,
    window,
    split_keys,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    tiles_of_heads: tl.constexpr = H // HEADS
    tokens: tl.constexpr = ROWS // HEADS
    first_head = tl.program_id(0) % tiles_of_heads * HEADS
    split = tl.program_id(0) // tiles_of_heads
    request = tl.program_id(1).to(tl.int64) + first_request
    group = first_head // (H // G)
    q_start = tl.load(query_starts + request)
    q_count = tl.load(query_starts + request + 1) - q_start
    tile_start = (tl.num_programs(2) - 1 - tl.program_id(2)) * tokens  # the last see most keys: they go first
    if tile_start >= q_count:
        return
    length = tl.load(context_lens + request)
    row, is_row = _rows(tile_start, q_start, q_count, first_head, H, HEADS, ROWS)
    table = block_tables + request * table_stride
    first_position = length - q_count + tile_start
    end = tl.minimum(first_position + tokens, length)
    if IS_SPLIT:
        # Positions count from where the split begins. It has no window.
        skipped = split * split_keys
        table += skipped // BLOCK_SIZE
        first_position -= skipped
        end = tl.minimum(end - skipped, split_keys)
        if end <= 0:
            tl.store(partial_max + (row - first_row) * splits + split, float("-inf"), mask=is_row)
            return
    begin = 0
    whole_begin = 0  # from here on no query's window begins ...
    whole_end = (first_position + 1) // KEYS * KEYS  # ... and every query attends to all keys up to here
    if IS_SPLIT:
        whole_end = tl.maximum(tl.minimum(whole_end, end), 0)
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, end)
        whole_end = tl.maximum(whole_end, whole_begin)

    dims = tl.arange(0, D_PAD)
    inside = is_row[:, None] & (dims < D)[None, :]
    queries = tl.load(q + row[:, None] * D + dims[None, :], mask=inside, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, D_PAD), tl.float32)
    cache = (k_cache, v_cache, k_scales, v_scales)
    if HAS_WINDOW:
        for index in tl.range(begin // KEYS, tl.cdiv(whole_begin, KEYS), num_stages=1):
            highest, total, weighted = _absorb_tile(
                highest, total, weighted, queries, cache, table, index, first_position, end, window, group,
                scale, softcap, G, D, BLOCK_SIZE, HEADS, KEYS, True, HAS_CAP, HAS_SCALES,
            )  # fmt: skip
    for index in tl.range(whole_begin // KEYS, whole_end // KEYS, num_stages=STAGES):
        highest, total, weighted = _absorb_tile(
            highest, total, weighted, queries, cache, table, index, first_position, end, window, group,
            scale, softcap, G, D, BLOCK_SIZE, HEADS, KEYS, False, HAS_CAP, HAS_SCALES,
        )  # fmt: skip
    for index in tl.range(tl.cdiv(whole_end, KEYS), tl.cdiv(end, KEYS), num_stages=1):
        highest, total, weighted = _absorb_tile(
            highest, total, weighted, queries, cache, table, index, first_position, end, window, group,
            scale, softcap, G, D, BLOCK_SIZE, HEADS, KEYS, True, HAS_CAP, HAS_SCALES,
        )  # fmt: skip

    # Loaded again, so that addresses are computed again: addresses kept through the loop would take its registers.
    q_start = tl.load(query_starts + request, volatile=True)
    row, is_row = _rows(tile_start, q_start, q_count, first_head, H, HEADS, ROWS)
    part = (row - first_row) * splits + split
    partials = (partial_out, partial_max, partial_sum)
    finish(highest, total, weighted, row, is_row, part, out, partials, sinks, H, D, IS_SPLIT, HAS_SINKS)


def prefill_attention(
    q: Tensor, cache: PagedLayer, out: Tensor, layer: AttentionLayer, batch: AttentionBatch
) -> None:
    """Writes the rows of `out` after the first `batch.num_decodes`."""
    heads, size = layer.num_heads, layer.head_dim
    hopper: Any = None
    if has_hopper_kernels():
        from penstock.kernels.triton import hopper_attention as hopper
    may_specialize = hopper is not None and hopper.attends(q, cache)
    shape = tile_shape(batch, layer, q.dtype, num_processors(q.device.index or 0), may_specialize)
    if shape.is_specialized:
        hopper.hopper_attention(q, cache, out, layer, batch, shape.heads, shape.splits, shape.split_keys)
        return
    row_heads = shape.heads
    padded_size = max(16, next_power_of_2(size))
    # Half the keys of numbers twice as large, and of heads twice as large.
    keys = (
        attention_tiles().prefill_keys // (1 if size <= 128 else 2) // (2 if q.dtype == torch.float32 else 1)
    )
    num_stages = stages(shape.stages, keys * padded_size * 2 * cache.keys.element_size())
    fitting = fitting_tile(shape.rows, keys, padded_size * q.element_size())
    if fitting != (shape.rows, keys):
        shape, keys, num_stages = replace(shape, rows=fitting[0]), fitting[1], 1
    first_row, num_rows = batch.num_decodes * heads, (q.shape[0] - batch.num_decodes) * heads
    partials = Partials.for_rows(out, num_rows, shape.splits, size)
    grid = (
        heads // row_heads * shape.splits,
        batch.num_requests - batch.num_decodes,
        cdiv(batch.max_query_len, shape.tokens),
    )
    _prefill_kernel[grid](
        q,
        cache.keys,
        cache.values,
        *cache.scale_pointers,
        out if layer.sinks is None else layer.sinks,
        out,
        partials.out,
        partials.highest,
        partials.total,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables.stride(0),
        batch.num_decodes,
        first_row,
        layer.scale,
        layer.softcap or 1.0,
        layer.window or NO_WINDOW,
        shape.split_keys,
        shape.splits,
        H=heads,
        G=layer.num_kv_heads,
        D=size,
        D_PAD=padded_size,
        BLOCK_SIZE=cache.block_size,
        HEADS=row_heads,
        ROWS=shape.rows,
        KEYS=keys,
        STAGES=num_stages,
        IS_SPLIT=shape.splits > 1,
        HAS_CAP=layer.softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_SCALES=cache.key_scales is not None,
        HAS_SINKS=layer.sinks is not None,
        num_warps=4,
    )
    partials.merge_into(out[batch.num_decodes :], num_rows, heads, size, layer.sinks)


def fitting_tile(rows: int, keys: int, row_bytes: int) -> tuple[int, int]:
    """Return how many queries and keys of these a tile has whose queries, keys and values fit into shared memory."""
    while (rows + 2 * keys) * row_bytes > current().shared_bytes and rows > SMALLEST_TILE:
        rows, keys = (rows, keys // 2) if keys > SMALLEST_TILE else (rows // 2, keys)
    return rows, keys


@dataclass(frozen=True, slots=True)
class TileShape:
    rows: int
    heads: int  # neighbours that read the same keys
    splits: int
    split_keys: int
    is_specialized: bool = False  # whether the tile is one of `hopper_attention`

    @property
    def tokens(self) -> int:
        return self.rows // self.heads

    @property
    def stages(self) -> int:
        return 3 if self.rows == LARGE_TILE else 2


def tile_shape(
    batch: AttentionBatch,
    layer: AttentionLayer,
    dtype: torch.dtype,
    processors: int,
    may_specialize: bool = False,
) -> TileShape:
    per_group = layer.num_heads // layer.num_kv_heads
    return _best_shape(
        num_requests=batch.num_requests - batch.num_decodes,
        queries=batch.max_query_len,
        span=batch.max_context_len,
        num_heads=layer.num_heads,
        tile_heads=min(per_group & -per_group, MAX_TILE_HEADS),  # the largest power of two that divides it
        may_split=layer.window is None,
        may_be_large=dtype != torch.float32 and layer.head_dim <= 128,
        may_specialize=may_specialize,
        processors=processors,
    )


@functools.lru_cache
def _best_shape(
    *,
    num_requests: int,
    queries: int,
    span: int,
    num_heads: int,
    tile_heads: int,
    may_split: bool,
    may_be_large: bool,
    may_specialize: bool,
    processors: int,
) -> TileShape:
    """Return the tile and the number of splits. Programs run in rounds, as many at a time as the chip has slots, and
    a round that is not full takes as long as a full one. A larger tile does more with each key that it reads; small
    tiles, and splits, fill the last round."""

    def rounds(rows: int, splits: int, slots: int) -> int:
        tiles = num_requests * -(-queries // (rows // tile_heads))
        return -(-tiles * (num_heads // tile_heads) * splits // slots)

    def cost(rows: int, splits: int) -> float:
        keys = span if splits == 1 else SPLIT_COST * (span / splits + SPLIT_COST_KEYS)
        return rounds(rows, splits, PROGRAMS_PER_PROCESSOR * processors) * rows * keys

    def specialized_cost(splits: int) -> float:
        merging = MERGED_ROW_KEYS * num_requests * queries * num_heads if splits > 1 else 0
        return rounds(LARGE_TILE, splits, processors) * (span / splits + ROUND_KEYS) + merging

    def split(rows: int, splits: int, *, is_specialized: bool = False) -> TileShape:
        split_keys = -(-span // (splits * SPLIT_UNIT)) * SPLIT_UNIT
        return TileShape(rows, tile_heads, -(-span // split_keys), split_keys, is_specialized)

    choices = range(1, max(1, min(span // SHORTEST_SPLIT, MAX_SPLITS)) + 1 if may_split else 2)
    if may_specialize and span > SHORT_CONTEXT and queries * tile_heads > SMALL_TILE:
        return split(LARGE_TILE, min(choices, key=specialized_cost), is_specialized=True)
    splits = min(choices, key=lambda splits: cost(SMALL_TILE, splits))
    sees_much = span >= 4 * queries  # else the causal mask cuts through many tiles, and small ones waste less
    if may_be_large and sees_much and cost(LARGE_TILE, 1) < LARGE_TILE_GAIN * cost(SMALL_TILE, splits):
        return TileShape(LARGE_TILE, tile_heads, 1, span)
    return split(SMALL_TILE, splits)
