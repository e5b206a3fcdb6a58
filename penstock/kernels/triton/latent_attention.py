"""Paged attention over latents (`kernels/latent.py` defines it): all heads of a token read the same entries.

A row is one head of one query token, and a tile holds neighbouring rows of a request, so that an entry is loaded once
for all of them: as the key whole, as the value without its rotated part. One kernel serves prompts and single tokens.
Long contexts are cut into splits, which are merged as in `decode_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tensor_kv
from penstock.kernels.interface import AttentionBatch, LatentLayer
from penstock.kernels.latent import absorbed, split_query, values_of
from penstock.kernels.tensor_kv import TorchKVPart
from penstock.kernels.triton.attention_parts import Partials, finish
from penstock.kernels.triton.decode_attention import split_length
from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.targets import current

KEYS = 32  # of a tile, several of which make a split
SMALL_TILE, LARGE_TILE = 16, 64
# For requests with one token each. All heads read the same entries, so that a request has few programs, and short
# splits pay. The shortest ones are read at once.
SHORT_SPLIT, FEW_SPLITS = 64, 32
HEADS_AT_ONCE = 8
FEW_TOKENS = 4  # of which each reads the matrices of all heads by itself
HEAD_NUMBERS = 8192  # of a matrix that one program reads
LARGEST_CODE = tl.constexpr(float(tensor_kv.LARGEST_CODE))


@triton.jit
def _head_kernel(
    x, weight, out, N, C, x_stride, x_head_stride, out_stride, out_head_stride,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A head's row of N numbers times the head's matrix, [N, C]."""
    head = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, WIDTH)
    columns = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    let_next_start()
    inside = (rows < N)[:, None] & (columns < C)[None, :]
    at = weight + (head * N + rows[:, None]).to(tl.int64) * C + columns[None, :]
    tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    own = tl.load(x + token * x_stride + head * x_head_stride + rows, mask=rows < N, other=0.0).to(tl.float32)
    made = tl.sum(tile * own[:, None], axis=0).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + head * out_head_stride + columns, made, mask=columns < C)


def by_head(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """[T, H, N] × [H, N, C] → `out`, [T, H, C]. The last numbers lie side by side."""
    (tokens, heads, width), outputs = x.shape, weight.shape[2]
    padded = next_power_of_2(width)
    own = min(next_power_of_2(outputs), max(16, HEAD_NUMBERS // padded))
    _head_kernel[(cdiv(outputs, own), heads, tokens)](
        x,
        weight,
        out,
        width,
        outputs,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        WIDTH=padded,
        OUTPUTS=own,
        num_warps=4,
        **launch_options(),
    )
    return out


def latent_values(weighted: Tensor, layer: LatentLayer) -> Tensor:
    """Turn weighted sums of latents into values: [T, H, C] → [T, H × V]."""
    if weighted.shape[0] > FEW_TOKENS:
        return values_of(weighted, layer)
    out = weighted.new_empty(*weighted.shape[:2], layer.value_up.shape[2])
    return by_head(weighted, layer.value_up, out).flatten(1)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _write_kernel(
    latent, query, queries, cache, scales, rope, norm, positions, slots, eps,
    latent_stride, query_stride, head_stride, WIDTH: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, C_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    HAS_SCALES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The first program of a token writes its entry; each other one rotates some heads of its query."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = R // 2
    pairs = tl.arange(0, HALF_PAD)
    is_pair = pairs < half
    let_next_start()
    angles = rope + tl.load(positions + token).to(tl.int64) * R + pairs
    cosine = tl.load(angles, mask=is_pair, other=0.0)
    sine = tl.load(angles + half, mask=is_pair, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    wait_for_previous()
    if tl.program_id(1) > 0:
        heads = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        inside = (heads < H)[:, None] & is_pair[None, :]
        source = query + token * query_stride + heads[:, None] * head_stride + pairs[None, :]
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        target = queries + (token * H + heads[:, None]) * (C + R) + C + pairs[None, :]
        rotated = a * cosine[None, :] - b * sine[None, :]
        tl.store(target, rotated.to(queries.dtype.element_ty), mask=inside)
        rotated = b * cosine[None, :] + a * sine[None, :]
        tl.store(target + half, rotated.to(queries.dtype.element_ty), mask=inside)
        return
    columns = tl.arange(0, C_PAD)
    is_column = columns < C
    row = latent + token * latent_stride
    content = tl.load(row + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(content * content, axis=0) / C + eps)
    content = content * scale * tl.load(norm + columns, mask=is_column, other=0.0)
    a = tl.load(row + C + pairs, mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(row + C + half + pairs, mask=is_pair, other=0.0).to(tl.float32)
    content = content.to(latent.dtype.element_ty).to(tl.float32)
    first = (a * cosine - b * sine).to(latent.dtype.element_ty).to(tl.float32)
    second = (b * cosine + a * sine).to(latent.dtype.element_ty).to(tl.float32)
    if HAS_SCALES:
        largest = tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(second), axis=0))
        largest = tl.maximum(largest, tl.max(tl.abs(content), axis=0))
        unit = tl.maximum(largest, 1e-12) / LARGEST_CODE
        tl.store(scales + slot, unit)
        content = tl.floor(content / unit + 0.5)
        first = tl.floor(first / unit + 0.5)
        second = tl.floor(second / unit + 0.5)
    entry = cache + slot * WIDTH
    tl.store(entry + columns, content.to(cache.dtype.element_ty), mask=is_column)
    tl.store(entry + C + pairs, first.to(cache.dtype.element_ty), mask=is_pair)
    tl.store(entry + C + half + pairs, second.to(cache.dtype.element_ty), mask=is_pair)


@triton.jit(
    do_not_specialize=["table_stride", "split_keys", "splits"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def _attend_kernel(
    queries, cache, scales, out, partial_out, partial_max, partial_sum, block_tables, query_starts, context_lens,
    table_stride, scale, split_keys, splits, WIDTH: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, C_PAD: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    let_next_start()
    q_start = tl.load(query_starts + request).to(tl.int64)
    q_count = tl.load(query_starts + request + 1) - q_start
    first_row = tl.program_id(0) * ROWS
    if first_row >= q_count * H:
        return
    length = tl.load(context_lens + request)
    wait_for_previous()
    own = first_row + tl.arange(0, ROWS)
    is_row = own < q_count * H
    row = q_start * H + own
    skipped = split * split_keys  # Positions count from where the split begins.
    position = length - q_count + own // H - skipped
    last = tl.minimum((first_row + ROWS - 1) // H, q_count - 1)
    end = tl.minimum(length - q_count + last + 1 - skipped, split_keys)
    part = row * splits + split
    if IS_SPLIT:  # noqa: SIM102 (decided when compiled, unlike what follows)
        if end <= 0:
            tl.store(partial_max + part, float("-inf"), mask=is_row)
            return

    columns = tl.arange(0, C_PAD)
    turned = tl.arange(0, R_PAD)
    at_row = queries + row[:, None] * (C + R)
    q_plain = tl.load(at_row + columns[None, :], mask=is_row[:, None] & (columns < C)[None, :], other=0.0)
    q_turned = tl.load(at_row + C + turned[None, :], mask=is_row[:, None] & (turned < R)[None, :], other=0.0)
    table = block_tables + request * table_stride + skipped // BLOCK_SIZE
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, C_PAD), tl.float32)
    unit = scale * 1.4426950408889634
    for index in tl.range(0, tl.cdiv(end, KEYS), num_stages=STAGES):
        at = index * KEYS + tl.arange(0, KEYS)
        present = at < end
        block = tl.load(table + at // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + at % BLOCK_SIZE
        entry = cache + slot[:, None] * WIDTH
        plain = tl.load(entry + columns[None, :], mask=present[:, None] & (columns < C)[None, :], other=0.0)
        key = tl.load(entry + C + turned[None, :], mask=present[:, None] & (turned < R)[None, :], other=0.0)
        plain = plain.to(q_plain.dtype)
        products = tl.dot(q_plain, tl.trans(plain), input_precision="ieee")
        products = tl.dot(q_turned, tl.trans(key.to(q_turned.dtype)), products, input_precision="ieee")
        if HAS_SCALES:
            units = tl.load(scales + slot, mask=present, other=0.0)[None, :]
            products *= units
        visible = present[None, :] & (at[None, :] <= position[:, None])
        products = tl.where(visible, products * unit, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(products, axis=1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        weights = tl.exp2(products - safe[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        if HAS_SCALES:
            weights *= units
        weighted = tl.dot(weights.to(plain.dtype), plain, weighted * decay[:, None], input_precision="ieee")
        highest = new_highest
    partials = (partial_out, partial_max, partial_sum)
    finish(highest, total, weighted, row, is_row, part, out, partials, out, H, C, IS_SPLIT, False)


def write_latents(
    query: Tensor,
    latent: Tensor,
    layer: LatentLayer,
    cache: TorchKVPart,
    batch: AttentionBatch,
    queries: Tensor | None = None,
) -> Tensor:
    """Write the entries of a step to their slots. Returns queries in the space of latents, [T, H, C + R], in
    `queries` if that is given."""
    tokens, heads, size, rotated = latent.shape[0], layer.num_heads, layer.latent_dim, layer.rope_dim
    if queries is None:
        queries = torch.empty(tokens, heads, size + rotated, dtype=query.dtype, device=query.device)
    plain, turned = split_query(query, layer)
    if tokens <= FEW_TOKENS:
        by_head(plain, layer.key_up, queries[:, :, :size])
    else:
        absorbed(plain, layer, queries[:, :, :size])
    _write_kernel[(tokens, 1 + cdiv(heads, HEADS_AT_ONCE))](
        latent,
        turned,
        queries,
        cache.entries,
        cache.entries if cache.scales is None else cache.scales,
        layer.rope,
        layer.norm,
        batch.positions,
        batch.slots,
        layer.norm_eps,
        latent.stride(0),
        turned.stride(0),
        turned.stride(1),
        WIDTH=cache.entries.shape[-1],
        H=heads,
        C=size,
        R=rotated,
        C_PAD=next_power_of_2(size),
        HALF_PAD=next_power_of_2(rotated // 2),
        HAS_SCALES=cache.scales is not None,
        HEADS=HEADS_AT_ONCE,
        num_warps=4,
        **launch_options(),
    )
    return queries


def tile_of(rows: int, row_bytes: int, keys: int = KEYS) -> tuple[int, int]:
    """Return the rows and the keys of a program, `keys` at most: as many as fit into shared memory together."""
    tile = LARGE_TILE if rows >= LARGE_TILE else max(SMALL_TILE, next_power_of_2(rows))
    while (tile + keys) * row_bytes > current().shared_bytes and (tile, keys) != (SMALL_TILE, SMALL_TILE):
        if tile > SMALL_TILE:
            tile //= 2
        else:
            keys //= 2
    return tile, keys


def latent_attention(
    queries: Tensor, cache: TorchKVPart, out: Tensor, layer: LatentLayer, batch: AttentionBatch
) -> None:
    """[T, H, C + R] → `out`, [T, H, C]."""
    heads, size, rotated = layer.num_heads, layer.latent_dim, layer.rope_dim
    rows = batch.max_query_len * heads
    padded = max(16, next_power_of_2(size)), max(16, next_power_of_2(rotated))
    row_bytes = sum(padded) * queries.element_size()
    tile, keys = tile_of(rows, row_bytes)
    tiles = cdiv(rows, tile)
    span = batch.max_context_len
    processors = num_processors(queries.device.index or 0)
    programs, is_short = batch.num_requests * tiles, False
    if batch.max_query_len > 1:
        split_keys = split_length(programs, span, processors)
    else:
        split_keys = split_length(programs, span, processors, SHORT_SPLIT, FEW_SPLITS)
        is_short = split_keys == SHORT_SPLIT and tile_of(rows, row_bytes, SHORT_SPLIT) == (tile, SHORT_SPLIT)
        keys = SHORT_SPLIT if is_short else keys
    splits = cdiv(span, split_keys)
    partials = Partials.for_rows(out, queries.shape[0] * heads, splits, size)
    _attend_kernel[(tiles, batch.num_requests, splits)](
        queries,
        cache.entries,
        cache.entries if cache.scales is None else cache.scales,
        out,
        partials.out,
        partials.highest,
        partials.total,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables.stride(0),
        layer.scale,
        split_keys,
        splits,
        WIDTH=cache.entries.shape[-1],
        H=heads,
        C=size,
        R=rotated,
        C_PAD=padded[0],
        R_PAD=padded[1],
        BLOCK_SIZE=cache.entries.shape[1],
        ROWS=tile,
        KEYS=keys,
        STAGES=1 if is_short or queries.dtype == torch.float32 else 2,
        IS_SPLIT=splits > 1,
        HAS_SCALES=cache.scales is not None,
        num_warps=8 if is_short or tile == LARGE_TILE else 4,
        **launch_options(),
    )
    partials.merge_into(out, queries.shape[0] * heads, heads, size)
