"""The code that both paged attention kernels share: absorbing a tile of keys, and merging contexts that were
split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

# Splits that are merged at once, and numbers of a head for each warp: of many rows, warps of a program would wait for
# each other. Latents are wide, and a token has few rows of them.
MERGED_AT_ONCE, MERGED_BY_A_WARP = 8, 128
WIDE_HEAD = 512
WIDE_MERGED_AT_ONCE, WIDE_MERGED_BY_A_WARP = 16, 64


@triton.jit
def _widened(cached, type: tl.constexpr):
    """Return keys or values in the type in which they are multiplied: the queries' type, or float16, to which the
    hardware converts float8."""
    if cached.dtype == tl.float8e4nv and type != tl.float32:
        wide = cached.to(tl.float16)
    else:
        wide = cached.to(type)
    return wide


@triton.jit
def load_tile(
    cache,
    table,
    at,
    present,
    group,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Keys [D, n] and values [n, D] at the positions `at` of a request, and their scales [1, n]; with MASKED, only
    those that are `present` are read. `cache` are keys, values and the scales of both."""
    k_cache, v_cache, k_scales, v_scales = cache
    dims = tl.arange(0, D_PAD)
    if MASKED:
        block = tl.load(table + at // BLOCK_SIZE, mask=present, other=0)
    else:
        block = tl.load(table + at // BLOCK_SIZE)
    offset = (block.to(tl.int64) * G + group) * (BLOCK_SIZE * D) + at % BLOCK_SIZE * D
    k_at = k_cache + offset[None, :] + dims[:, None]
    v_at = v_cache + offset[:, None] + dims[None, :]
    if D_PAD != D:
        inside = dims < D
        k = tl.load(k_at, mask=present[None, :] & inside[:, None], other=0.0)
        v = tl.load(v_at, mask=present[:, None] & inside[None, :], other=0.0)
    elif MASKED:
        k = tl.load(k_at, mask=present[None, :], other=0.0)
        v = tl.load(v_at, mask=present[:, None], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    k_scale = 1.0
    v_scale = 1.0
    if HAS_SCALES:
        k_scale = tl.load(k_scales + offset // D, mask=present, other=0.0)[None, :]
        v_scale = tl.load(v_scales + offset // D, mask=present, other=0.0)[None, :]
    return k, v, k_scale, v_scale


@triton.jit
def absorb(
    highest,
    total,
    weighted,
    queries,
    tile,
    visible,
    scale,
    softcap,
    MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Take a tile of keys into a running softmax: the highest score so far, in units of log2, and the sums of weights
    and of weighted values that belong to it. With MASKED, keys not `visible` to a query do not count for it."""
    k, v, k_scale, v_scale = tile
    k = _widened(k, queries.dtype)
    v = _widened(v, queries.dtype)
    products = tl.dot(queries.to(k.dtype), k, input_precision="ieee")
    if HAS_SCALES:
        products *= k_scale
    if HAS_CAP:
        products = softcap * (2.0 / (1.0 + tl.exp(-2.0 * (products * scale / softcap))) - 1.0)
        unit = 1.4426950408889634
    else:
        unit = scale * 1.4426950408889634
    if MASKED:
        products = tl.where(visible, products, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(products, axis=1) * unit)
    safe = new_highest
    if MASKED:
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    decay = tl.exp2(highest - safe)
    weights = tl.exp2(products * unit - safe[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    if HAS_SCALES:
        weights *= v_scale
    weighted = tl.dot(weights.to(v.dtype), v, weighted * decay[:, None], input_precision="ieee")
    return new_highest, total, weighted


@triton.jit
def with_sink(highest, total, sink):
    """Return the sum of weights with that of a sink, a logit without a value."""
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    return total + tl.exp2(sink * 1.4426950408889634 - safe)


@triton.jit
def finish(
    highest, total, weighted, row, is_row, part, out, partials, sinks,
    H: tl.constexpr, D: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the rows that exist: to `out`, or, where the context is split, to this split's part of `partials`."""
    partial_out, partial_max, partial_sum = partials
    dims = tl.arange(0, weighted.shape[1])
    inside = is_row[:, None] & (dims < D)[None, :]
    if IS_SPLIT:
        tl.store(partial_max + part, highest, mask=is_row)
        tl.store(partial_sum + part, total, mask=is_row)
        tl.store(partial_out + part[:, None] * D + dims[None, :], weighted, mask=inside)
    else:
        if HAS_SINKS:
            total = with_sink(highest, total, tl.load(sinks + row % H))
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out,
    partial_max,
    partial_sum,
    out,
    sinks,
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    dims = tl.arange(0, D_PAD)
    inside = dims < D
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((D_PAD,), tl.float32)
    wait_for_previous()
    for start in range(0, splits, TILE):
        at = row * splits + start + tile
        present = start + tile < splits
        # All at once. A split without a share, empty or far below the peak, may hold anything: an empty one wrote
        # nothing but its peak.
        peaks = tl.load(partial_max + at, mask=present, other=float("-inf"))
        sums = tl.load(partial_sum + at, mask=present, other=0.0)
        parts_at = partial_out + at[:, None] * D + dims[None, :]
        parts = tl.load(parts_at, mask=present[:, None] & inside[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(peaks, axis=0))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        decay = tl.exp2(highest - safe)
        shares = tl.exp2(peaks - safe)
        has_share = shares > 0
        total = total * decay + tl.sum(tl.where(has_share, sums * shares, 0.0), axis=0)
        weighted_parts = tl.where(has_share[:, None], parts * shares[:, None], 0.0)
        weighted = weighted * decay + tl.sum(weighted_parts, axis=0)
        highest = new_highest
    if HAS_SINKS:
        total = with_sink(highest, total, tl.load(sinks + row % H))
    result = weighted / tl.where(total > 0, total, 1.0)
    tl.store(out + row * D + dims, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Partials:
    """The results of each split of the context, for each row (one head of one token): [rows, splits, D] and [rows,
    splits]."""

    out: Tensor
    highest: Tensor
    total: Tensor
    splits: int

    @classmethod
    def for_rows(cls, out: Tensor, rows: int, splits: int, head_dim: int) -> Partials:
        """With a single split there is nothing to merge, and kernels write to `out` itself."""
        if splits == 1:
            return cls(out, out, out, 1)
        highest = torch.empty(rows * splits, dtype=torch.float32, device=out.device)
        weighted = torch.empty(rows * splits * head_dim, dtype=torch.float32, device=out.device)
        return cls(weighted, highest, torch.empty_like(highest), splits)

    def merge_into(
        self, out: Tensor, rows: int, num_heads: int, head_dim: int, sinks: Tensor | None = None
    ) -> None:
        """Merge the splits of rows that are the heads of tokens, one token after the other."""
        if self.splits == 1:
            return
        at_once, by_a_warp = MERGED_AT_ONCE, MERGED_BY_A_WARP
        if head_dim >= WIDE_HEAD:
            at_once, by_a_warp = WIDE_MERGED_AT_ONCE, WIDE_MERGED_BY_A_WARP
        _merge_kernel[(rows,)](
            self.out,
            self.highest,
            self.total,
            out,
            out if sinks is None else sinks,
            self.splits,
            H=num_heads,
            D=head_dim,
            D_PAD=next_power_of_2(head_dim),
            TILE=at_once,
            HAS_SINKS=sinks is not None,
            num_warps=max(1, next_power_of_2(head_dim) // by_a_warp),
            **launch_options(),
        )
