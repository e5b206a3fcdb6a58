"""Paged attention over prompts on Hopper: what `prefill_attention` computes, with the parts of a program in warps of
their own.

Two warps copy keys and values to shared memory, block by block, with the copy engine. Two groups of four warps
multiply 64 rows each: while one group computes the weights of a tile of keys, the other group keeps the tensor cores
busy (the groups take turns), and a tile's products with values run beside the next tile's products with queries. The
kernel is written in Gluon, the layer of Triton in which a kernel says which warps do what. Gluon has no interpreter:
the tests of this kernel need a GPU (`tests/gpu`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.attention_parts import Partials
from penstock.kernels.triton.device import next_power_of_2
from penstock.kernels.triton.few_hopper import shared_layout
from penstock.kernels.triton.paged_kv import PagedLayer

ROWS = 128  # of a program, half of them in each group of warps
SMALLEST_BLOCK = 8  # rows over which shared memory is swizzled
NO_WINDOW = 1 << 30

HALF = gl.constexpr(ROWS // 2)
COLUMNS = gl.constexpr(64)  # of one copy: 128 bytes, over which shared memory is swizzled
LOG2_E = gl.constexpr(1.4426950408889634)
NOWHERE = gl.constexpr(1 << 30)
# Newer versions of Triton have other names for the same.
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _as_tiles(boxes, shape: gl.constexpr, layout: gl.constexpr):
    """The memory of boxes [rows of a block, 64 columns] as tiles [keys, D]: a tile is its first 64 columns of all
    keys, then the next 64."""
    if HAS_REINTERPRET:
        tiles = boxes.reinterpret(boxes.dtype, shape, layout)
    else:
        tiles = boxes._reinterpret(boxes.dtype, shape, layout)
    return tiles


@gluon.jit
def _copy_tiles(
    cache, boxes, ready, free, table, group, first, last, end,
    G: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, D_PAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of keys, or of values, from the last to the first, each as soon as its place is free. The part
    of the last block that lies before `end` goes to the end of its box. What is copied from outside of the cache is
    zero, so nothing that follows `end` in a block reaches a product."""
    blocks: gl.constexpr = KEYS // BLOCK_SIZE
    parts: gl.constexpr = D_PAD // COLUMNS
    last_block = (end - 1) // BLOCK_SIZE
    lacking = (last_block + 1) * BLOCK_SIZE - end
    for turn in range(last - first + 1):
        stage = turn % STAGES
        first_block = (last - turn) * blocks
        entries = ()
        shifts = ()
        for block in gl.static_range(blocks):
            index = first_block + block
            entry = gl.load(table + index, mask=index <= last_block, other=-1)
            entries += (entry * G + group,)  # type: ignore[assignment]
            shifts += (gl.where(index == last_block, -lacking, 0),)  # type: ignore[assignment]
        mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), KEYS * D_PAD * 2)
        for block in gl.static_range(blocks):
            for part in gl.static_range(parts):
                copy_to_shared(
                    cache, [entries[block], shifts[block], part * COLUMNS], ready.index(stage),
                    boxes.index((stage * parts + part) * blocks + block),
                )  # fmt: skip


@gluon.jit
def _weigh(
    products, highest, total, tile, whole_begin, whole_end, position, end, window, scale, softcap,
    KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr, SCORES: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The weights of a tile of keys in a running softmax, as in `attention_parts.absorb`. Only tiles that not all
    queries see as a whole are masked."""
    if HAS_CAP:
        products = softcap * (2.0 / (1.0 + gl.exp(-2.0 * (products * scale / softcap))) - 1.0)
        unit = LOG2_E
    else:
        unit = scale * LOG2_E
    if (tile >= whole_end) | (tile < whole_begin):
        at = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        last_start = (end - 1) // BLOCK_SIZE * BLOCK_SIZE
        shifted = at - (last_start + BLOCK_SIZE - end)
        at = gl.where(at >= last_start, gl.where(shifted >= last_start, shifted, NOWHERE), at)
        row = gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
        behind = gl.expand_dims(position + row // HEADS, 1) - gl.expand_dims(at, 0)
        visible = behind >= 0
        if HAS_WINDOW:
            visible = visible & (behind < window)
        products = gl.where(visible, products, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(products, axis=1) * unit)
    safe = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    decay = gl.exp2(highest - safe)
    weights = gl.exp2(products * unit - gl.expand_dims(safe, 1))
    return weights, decay, new_highest, total * decay + gl.sum(weights, axis=1)


@gluon.jit
def _rows_of(local, tile_start, q_start, q_count, first_head, H: gl.constexpr, HEADS: gl.constexpr):
    """The rows of [T, H, D] that a program holds, and whether each exists. The heads of a token are neighbours."""
    token = tile_start + local // HEADS
    return (q_start + token).to(gl.int64) * H + first_head + local % HEADS, token < q_count


@gluon.jit
def _multiply(
    shared, PART: gl.constexpr,
    H: gl.constexpr, D: gl.constexpr, D_PAD: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """One group of warps: attention of half the rows of a program."""
    (
        q, out, partials, sinks, q_tiles, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, turns,
        tile_start, q_start, q_count, first_head, first_row, split, splits,
        first, last, whole_begin, whole_end, first_position, end, window, scale, softcap,
    ) = shared  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D_PAD, D_PAD // 8], [4, 1], [1, 0])
    if last >= first:
        q_tile = q_tiles.index(PART)
        local = gl.arange(0, HALF, layout=gl.SliceLayout(1, COPY)) + PART * HALF
        row, is_row = _rows_of(local, tile_start, q_start, q_count, first_head, H, HEADS)
        dims = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, COPY))
        at = gl.expand_dims(row * D, 1) + gl.expand_dims(dims, 0)
        inside = gl.expand_dims(is_row, 1) & gl.expand_dims(dims < D, 0)
        q_tile.store(gl.load(q + at, mask=inside, other=0.0))
        fence_async_shared()

        position = first_position + PART * (HALF // HEADS)
        highest = gl.full((HALF,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.zeros((HALF,), gl.float32, layout=gl.SliceLayout(1, SCORES))
        weighted = gl.zeros((HALF, D_PAD), gl.float32, layout=SUMS)
        zeros = gl.zeros((HALF, KEYS), gl.float32, layout=SCORES)
        if PART == 1:
            mbarrier.arrive(turns.index(0))
        mbarrier.wait(k_ready.index(0), 0)
        mbarrier.wait(turns.index(PART), 0)
        products = warpgroup_mma(
            q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.arrive(turns.index(1 - PART))
        products = warpgroup_mma_wait(0, deps=(products,))
        mbarrier.arrive(k_free.index(0))
        new_weights, decay, highest, total = _weigh(
            products, highest, total, last, whole_begin, whole_end, position, end, window, scale, softcap,
            KEYS, BLOCK_SIZE, HEADS, SCORES, HAS_CAP, HAS_WINDOW,
        )  # fmt: skip
        weights = gl.convert_layout(new_weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
        for turn in range(1, last - first + 1):
            stage = turn % STAGES
            before = (turn - 1) % STAGES
            mbarrier.wait(k_ready.index(stage), (turn // STAGES) & 1)
            mbarrier.wait(turns.index(PART), turn & 1)
            products = warpgroup_mma(
                q_tile, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_ready.index(before), ((turn - 1) // STAGES) & 1)
            weighted = warpgroup_mma(weights, v_tiles.index(before), weighted, is_async=True)
            mbarrier.arrive(turns.index(1 - PART))
            products = warpgroup_mma_wait(1, deps=(products,))
            mbarrier.arrive(k_free.index(stage))
            new_weights, decay, highest, total = _weigh(
                products, highest, total, last - turn, whole_begin, whole_end, position, end, window, scale, softcap,
                KEYS, BLOCK_SIZE, HEADS, SCORES, HAS_CAP, HAS_WINDOW,
            )  # fmt: skip
            weighted, weights = warpgroup_mma_wait(0, deps=(weighted, weights))
            mbarrier.arrive(v_free.index(before))
            weighted = weighted * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
            weights = gl.convert_layout(new_weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
        before = (last - first) % STAGES
        mbarrier.wait(v_ready.index(before), ((last - first) // STAGES) & 1)
        weighted = warpgroup_mma(weights, v_tiles.index(before), weighted, is_async=True)
        weighted, weights = warpgroup_mma_wait(0, deps=(weighted, weights))

        if IS_SPLIT:
            partial_out, partial_max, partial_sum = partials
            local = gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES)) + PART * HALF
            row, is_row = _rows_of(local, tile_start, q_start, q_count, first_head, H, HEADS)
            gl.store(partial_max + (row - first_row) * splits + split, highest, mask=is_row)
            gl.store(partial_sum + (row - first_row) * splits + split, total, mask=is_row)
            local = gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS)) + PART * HALF
            row, is_row = _rows_of(local, tile_start, q_start, q_count, first_head, H, HEADS)
            dims = gl.arange(0, D_PAD, layout=gl.SliceLayout(0, SUMS))
            at = gl.expand_dims(((row - first_row) * splits + split) * D, 1) + gl.expand_dims(dims, 0)
            inside = gl.expand_dims(is_row, 1) & gl.expand_dims(dims < D, 0)
            gl.store(partial_out + at, weighted, mask=inside)
        else:
            if HAS_SINKS:
                local = gl.arange(0, HALF, layout=gl.SliceLayout(1, SCORES))
                sink = gl.load(sinks + first_head + local % HEADS)
                total += gl.exp2(sink * LOG2_E - gl.where(highest == float("-inf"), 0.0, highest))
            total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, SUMS))
            q_tile.store((weighted / gl.expand_dims(total, 1)).to(q_tile.dtype))
            gl.store(out + at, q_tile.load(COPY), mask=inside)


@gluon.jit
def _request_of(tile, query_starts, first_request, num_requests, tokens: gl.constexpr):
    """The request of a tile, counted from `first_request`. The tiles of request r begin with tile number (tokens
    before the request) // tokens + r, so that some tiles have no rows."""
    request = gl.to_tensor(0)
    beyond = num_requests
    while beyond - request > 1:
        middle = (request + beyond) // 2
        begin = (gl.load(query_starts + first_request + middle) - first_request) // tokens + middle
        request = gl.where(begin <= tile, middle, request)
        beyond = gl.where(begin <= tile, beyond, middle)
    return request


@gluon.jit(
    do_not_specialize=[
        "table_stride", "first_request", "num_requests", "first_row", "window", "split_keys", "splits"
    ],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)  # fmt: skip
def _hopper_kernel(
    q, k_cache, v_cache, sinks, out, partial_out, partial_max, partial_sum,
    block_tables, query_starts, context_lens, table_stride, first_request, num_requests, first_row,
    scale, softcap, window, split_keys, splits,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, D_PAD: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEADS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr, HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    tokens: gl.constexpr = 2 * HALF // HEADS
    first_head = gl.program_id(0) % (H // HEADS) * HEADS
    split = gl.program_id(0) // (H // HEADS)
    group = first_head // (H // G)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)  # the last of a request see most keys: they go first
    index = _request_of(tile, query_starts, first_request, num_requests, tokens)
    request = first_request + index
    q_start = gl.load(query_starts + request)
    q_count = gl.load(query_starts + request + 1) - q_start
    length = gl.load(context_lens + request)
    tile_start = (tile - (q_start - first_request) // tokens - index) * tokens
    table = block_tables + request.to(gl.int64) * table_stride
    first_position = length - q_count + tile_start
    end = gl.minimum(first_position + tokens, length)
    if IS_SPLIT:
        # Positions count from where the split begins. It has no window.
        table += split * split_keys // BLOCK_SIZE
        first_position -= split * split_keys
        end = gl.minimum(end - split * split_keys, split_keys)
    first = gl.to_tensor(0)  # tiles of keys
    last = (end + KEYS - 1) // KEYS - 1
    whole_begin = gl.to_tensor(0)  # from here on no query's window begins ...
    whole_end = (
        gl.maximum(first_position + 1, 0) // KEYS
    )  # ... and every query attends to all keys up to here
    if HAS_WINDOW:
        first = gl.maximum(first_position - window + 1, 0) // KEYS
        whole_begin = (gl.maximum(end - window, 0) + KEYS - 1) // KEYS
    if IS_SPLIT:
        last = gl.where(end <= 0, -1, last)
        if end <= 0:
            local = gl.arange(0, 2 * HALF, layout=gl.BlockedLayout([1], [32], [4], [0]))
            row, is_row = _rows_of(local, tile_start, q_start, q_count, first_head, H, HEADS)
            gl.store(partial_max + (row - first_row) * splits + split, float("-inf"), mask=is_row)
    last = gl.where(tile_start >= q_count, first - 1, last)

    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    boxes: gl.constexpr = STAGES * (D_PAD // COLUMNS) * (KEYS // BLOCK_SIZE)
    dtype: gl.constexpr = q.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, HALF, D_PAD], TILES)
    k_boxes = gl.allocate_shared_memory(dtype, [boxes, 1, BLOCK_SIZE, COLUMNS], k_cache.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [boxes, 1, BLOCK_SIZE, COLUMNS], v_cache.layout)
    k_tiles = _as_tiles(k_boxes, [STAGES, KEYS, D_PAD], TILES)
    v_tiles = _as_tiles(v_boxes, [STAGES, KEYS, D_PAD], TILES)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()

    shared = (
        q, out, (partial_out, partial_max, partial_sum), sinks, q_tiles, k_tiles, v_tiles,
        k_ready, k_free, v_ready, v_free, turns,
        tile_start, q_start, q_count, first_head, first_row, split, splits,
        first, last, whole_begin, whole_end, first_position, end, window, scale, softcap,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                shared, gl.constexpr(0), H, D, D_PAD, BLOCK_SIZE, HEADS, KEYS, STAGES,
                IS_SPLIT, HAS_CAP, HAS_WINDOW, HAS_SINKS,
            )),
            (_multiply, (
                shared, gl.constexpr(1), H, D, D_PAD, BLOCK_SIZE, HEADS, KEYS, STAGES,
                IS_SPLIT, HAS_CAP, HAS_WINDOW, HAS_SINKS,
            )),
            (_copy_tiles, (
                k_cache, k_boxes, k_ready, k_free, table, group, first, last, end,
                G, BLOCK_SIZE, KEYS, D_PAD, STAGES,
            )),
            (_copy_tiles, (
                v_cache, v_boxes, v_ready, v_free, table, group, first, last, end,
                G, BLOCK_SIZE, KEYS, D_PAD, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def attends(q: Tensor, cache: PagedLayer) -> bool:
    """Return whether the kernel takes these types, and this head and block size."""
    size, block_size = q.shape[2], cache.block_size
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and cache.keys.dtype == q.dtype
        and size % 8 == 0
        and size <= 256
        and block_size.bit_count() == 1
        and SMALLEST_BLOCK <= block_size <= keys_of_tile(size)
    )


def keys_of_tile(head_size: int) -> int:
    return 128 if head_size <= 128 else 64


def hopper_attention(
    q: Tensor,
    cache: PagedLayer,
    out: Tensor,
    layer: AttentionLayer,
    batch: AttentionBatch,
    tile_heads: int,
    splits: int,
    split_keys: int,
) -> None:
    """Writes the rows of `out` after the first `batch.num_decodes`."""
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    num_requests = batch.num_requests - batch.num_decodes
    num_tokens = q.shape[0] - batch.num_decodes
    partials = Partials.for_rows(out, num_tokens * heads, splits, size)
    _hopper_kernel[(heads // tile_heads * splits, num_tokens // (ROWS // tile_heads) + num_requests)](
        q,
        _blocks(cache.keys),
        _blocks(cache.values),
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
        num_requests,
        batch.num_decodes * heads,
        layer.scale,
        layer.softcap or 1.0,
        layer.window or NO_WINDOW,
        split_keys,
        splits,
        H=heads,
        G=kv_heads,
        D=size,
        D_PAD=max(COLUMNS.value, next_power_of_2(size)),
        BLOCK_SIZE=cache.block_size,
        HEADS=tile_heads,
        KEYS=keys_of_tile(size),
        STAGES=2 if size > 64 else 4,
        IS_SPLIT=splits > 1,
        HAS_CAP=layer.softcap is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_SINKS=layer.sinks is not None,
        num_warps=4,
    )
    partials.merge_into(out[batch.num_decodes :], num_tokens * heads, heads, size, layer.sinks)


def _blocks(cached: Tensor) -> TensorDescriptor:
    """Describe keys or values to the copy engine: the blocks of every KV head, in boxes of one block and 64
    columns."""
    num_blocks, kv_heads, block_size, size = cached.shape
    layout = shared_layout(128, 16, 3)
    shape, strides = [num_blocks * kv_heads, block_size, size], [block_size * size, size, 1]
    return TensorDescriptor(cached, shape, strides, [1, block_size, COLUMNS.value], layout)
