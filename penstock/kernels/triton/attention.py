"""Paged attention. Keys and values are read in place through the block table: no gather, no padding.

Two kernels. `decode`: one query token per request; the context is cut into splits that run side by side and are
merged by a second, small kernel. `prefill`: tiles of query tokens, each walking its request's keys once.
Cache layout: see `paged_kv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.device import num_processors
from penstock.kernels.triton.overlap import wait_for_previous
from penstock.kernels.triton.paged_kv import PagedLayer

DECODE_KEYS = 128
PREFILL_KEYS = 64
MAX_SPLITS = 128
SHORTEST_SPLIT = 128
LONGEST_SPLIT = 4096
PROGRAMS_PER_PROCESSOR = 1.5


@triton.jit
def _widened(cached, type: tl.constexpr):
    """Keys or values as they are multiplied: float8 in float16, which the hardware widens it to."""
    if cached.dtype == tl.float8e4nv:
        wide = cached.to(tl.float16)
    else:
        wide = cached.to(type)
    return wide


@triton.jit
def _scores(q, k, scale, softcap, HAS_CAP: tl.constexpr):
    """Scaled and capped scores, in units of log2."""
    scores = tl.dot(q, k) * scale
    if HAS_CAP:
        ratio = scores / softcap
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * ratio)) - 1.0)
    return scores * 1.4426950408889634


# Numbers that change from step to step are not specialized, nor is where its small arrays lie: each new kind would
# compile the kernel again.
@triton.jit(
    do_not_specialize=["table_stride", "window", "split_keys", "splits"],
    do_not_specialize_on_alignment=["block_tables", "context_lens"],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    partial_out,
    partial_max,
    partial_sum,
    block_tables,
    context_lens,
    table_stride,
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    per_group: tl.constexpr = H // G
    wait_for_previous()
    length = tl.load(context_lens + request)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(length - window, 0) // KEYS * KEYS
    begin = first_key + split * split_keys
    end = tl.minimum(begin + split_keys, length)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    keys = tl.arange(0, KEYS)
    row_inside = rows < per_group
    dim_inside = dims < D
    q_at = q + (request * H + group * per_group + rows[:, None]) * D + dims[None, :]
    queries = tl.load(q_at, mask=row_inside[:, None] & dim_inside[None, :], other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, D_PAD), tl.float32)
    table = block_tables + request * table_stride

    for start in range(begin, end, KEYS):
        at = start + keys
        present = at < end
        if HAS_WINDOW:
            present = present & (at >= length - window)
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)
        offset = (block * G + group) * BLOCK_SIZE * D + (at % BLOCK_SIZE) * D
        k = tl.load(
            k_cache + offset[None, :] + dims[:, None], mask=present[None, :] & dim_inside[:, None], other=0.0
        )
        v = tl.load(
            v_cache + offset[:, None] + dims[None, :], mask=present[:, None] & dim_inside[None, :], other=0.0
        )
        k = _widened(k, q.dtype.element_ty)
        v = _widened(v, q.dtype.element_ty)
        k_scale = 1.0
        if HAS_SCALES:
            k_scale = tl.load(k_scales + offset // D, mask=present, other=0.0)[None, :]
        scores = _scores(queries.to(k.dtype), k, scale * k_scale, softcap, HAS_CAP)
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        if HAS_SCALES:
            weights *= tl.load(v_scales + offset // D, mask=present, other=0.0)[None, :]
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = new_highest

    if not IS_SPLIT:
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out + (request * H + group * per_group + rows[:, None]) * D + dims[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=row_inside[:, None] & dim_inside[None, :])
    else:
        head = request * H + group * per_group + rows
        tl.store(partial_max + head * splits + split, highest, mask=row_inside)
        tl.store(partial_sum + head * splits + split, total, mask=row_inside)
        part_at = partial_out + (head[:, None] * splits + split) * D + dims[None, :]
        tl.store(part_at, weighted, mask=row_inside[:, None] & dim_inside[None, :])


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out,
    partial_max,
    partial_sum,
    out,
    splits,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    dims = tl.arange(0, D_PAD)
    inside = dims < D
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((D_PAD,), tl.float32)
    wait_for_previous()
    for start in range(0, splits, TILE):
        at = head * splits + start + tile
        present = start + tile < splits
        peaks = tl.load(partial_max + at, mask=present, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        shares = tl.exp2(peaks - safe)
        total = total * decay + tl.sum(shares * tl.load(partial_sum + at, mask=present, other=0.0), axis=0)
        # A split without a share, past the end or far below the peak, is not read.
        used = (shares > 0)[:, None] & inside[None, :]
        parts = tl.load(partial_out + at[:, None] * D + dims[None, :], mask=used, other=0.0)
        weighted = weighted * decay + tl.sum(parts * shares[:, None], axis=0)
        highest = new_highest
    result = weighted / tl.where(total > 0, total, 1.0)
    tl.store(out + head * D + dims, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["table_stride", "first_request", "window"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    block_tables,
    query_starts,
    context_lens,
    table_stride,
    first_request,
    scale,
    softcap,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64) + first_request
    head = tl.program_id(2)
    group = head // (H // G)
    q_start = tl.load(query_starts + request)
    q_count = tl.load(query_starts + request + 1) - q_start
    tile_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # longest tiles first
    if tile_start >= q_count:
        return
    length = tl.load(context_lens + request)
    rows = tile_start + tl.arange(0, ROWS)
    dims = tl.arange(0, D_PAD)
    keys = tl.arange(0, KEYS)
    row_inside = rows < q_count
    dim_inside = dims < D
    position = length - q_count + rows  # of each query in its request
    q_at = (q_start + rows[:, None]).to(tl.int64) * H * D + head * D + dims[None, :]
    queries = tl.load(q + q_at, mask=row_inside[:, None] & dim_inside[None, :], other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, D_PAD), tl.float32)
    table = block_tables + request * table_stride

    first_position = length - q_count + tile_start
    last_key = tl.minimum(first_position + ROWS, length)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    for start in range(first_key, last_key, KEYS):
        at = start + keys
        present = at < last_key
        block = tl.load(table + at // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        offset = (block * G + group) * BLOCK_SIZE * D + (at % BLOCK_SIZE) * D
        k = tl.load(
            k_cache + offset[None, :] + dims[:, None], mask=present[None, :] & dim_inside[:, None], other=0.0
        )
        v = tl.load(
            v_cache + offset[:, None] + dims[None, :], mask=present[:, None] & dim_inside[None, :], other=0.0
        )
        k = _widened(k, q.dtype.element_ty)
        v = _widened(v, q.dtype.element_ty)
        k_scale = 1.0
        if HAS_SCALES:
            k_scale = tl.load(k_scales + offset // D, mask=present, other=0.0)[None, :]
        scores = _scores(queries.to(k.dtype), k, scale * k_scale, softcap, HAS_CAP)
        visible = at[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (at[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        if HAS_SCALES:
            weights *= tl.load(v_scales + offset // D, mask=present, other=0.0)[None, :]
        weighted = weighted * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = new_highest

    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + q_at, result.to(out.dtype.element_ty), mask=row_inside[:, None] & dim_inside[None, :])


def attention(q: Tensor, cache: PagedLayer, layer: AttentionLayer, batch: AttentionBatch) -> Tensor:
    """[T, H, D] → [T, H × D]. The first `batch.num_decodes` requests have one query token each."""
    out = torch.empty_like(q)
    if batch.num_decodes:
        _decode(q, cache, out, layer, batch)
    if batch.num_requests > batch.num_decodes:
        _prefill(q, cache, out, layer, batch)
    return out.view(q.shape[0], -1)


def _decode(q: Tensor, cache: PagedLayer, out: Tensor, layer: AttentionLayer, batch: AttentionBatch) -> None:
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    count = batch.num_decodes
    span = batch.max_context_len if layer.window is None else min(batch.max_context_len, layer.window)
    split_keys = split_length(count * kv_heads, span, num_processors(q.device.index or 0))
    # A window need not begin where a tile does, so it may reach into one more.
    splits = triton.cdiv(span + (DECODE_KEYS if layer.window else 0), split_keys)
    partial_out = partial_max = partial_sum = out
    if splits > 1:
        partial_out = torch.empty(count * heads * splits * size, dtype=torch.float32, device=q.device)
        partial_max = torch.empty(count * heads * splits, dtype=torch.float32, device=q.device)
        partial_sum = torch.empty_like(partial_max)
    _decode_kernel[(count, kv_heads, splits)](
        q,
        cache.keys,
        cache.values,
        *cache.scale_pointers,
        out,
        partial_out,
        partial_max,
        partial_sum,
        batch.block_tables,
        batch.context_lens,
        batch.block_tables.stride(0),
        layer.scale,
        layer.softcap or 1.0,
        layer.window or 0,
        split_keys,
        splits,
        H=heads,
        G=kv_heads,
        D=size,
        D_PAD=max(16, triton.next_power_of_2(size)),
        BLOCK_SIZE=cache.block_size,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEYS=DECODE_KEYS if size <= 128 else DECODE_KEYS // 2,
        IS_SPLIT=splits > 1,
        HAS_CAP=layer.softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_SCALES=cache.key_scales is not None,
        num_warps=4,
        num_stages=3 if size <= 128 else 2,
        launch_pdl=True,
    )
    if splits > 1:
        _merge_kernel[(count * heads,)](
            partial_out,
            partial_max,
            partial_sum,
            out,
            splits,
            D=size,
            D_PAD=triton.next_power_of_2(size),
            TILE=8,
            num_warps=4,
            launch_pdl=True,
        )


def _prefill(q: Tensor, cache: PagedLayer, out: Tensor, layer: AttentionLayer, batch: AttentionBatch) -> None:
    heads, size = layer.num_heads, layer.head_dim
    largest = 128 if q.dtype != torch.float32 and size <= 128 else 64
    rows = largest if batch.max_query_len > 16 else 16  # two sizes: each is a kernel to compile
    grid = (triton.cdiv(batch.max_query_len, rows), batch.num_requests - batch.num_decodes, heads)
    _prefill_kernel[grid](
        q,
        cache.keys,
        cache.values,
        *cache.scale_pointers,
        out,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables.stride(0),
        batch.num_decodes,
        layer.scale,
        layer.softcap or 1.0,
        layer.window or 0,
        H=heads,
        G=layer.num_kv_heads,
        D=size,
        D_PAD=max(16, triton.next_power_of_2(size)),
        BLOCK_SIZE=cache.block_size,
        ROWS=rows,
        KEYS=PREFILL_KEYS if size <= 128 else PREFILL_KEYS // 2,
        HAS_CAP=layer.softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_SCALES=cache.key_scales is not None,
        num_warps=8 if rows >= 128 else 4,
        num_stages=3 if size <= 128 else 2,
    )


def split_length(programs: int, span: int, processors: int) -> int:
    """Keys for one program: as many as leave enough programs to fill the chip evenly, whatever the contexts'
    lengths; `programs` is their number without splitting."""
    # Where contexts may be long, most are likely short: nobody should wait for one program that walks for thousands.
    keys = LONGEST_SPLIT if span <= LONGEST_SPLIT else LONGEST_SPLIT // 4
    while keys > SHORTEST_SPLIT and programs * -(-span // keys) < PROGRAMS_PER_PROCESSOR * processors:
        keys //= 2
    return max(keys, triton.next_power_of_2(-(-span // MAX_SPLITS)))
