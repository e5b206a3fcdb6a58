"""One row, or a few, times weights of four bits (`int4`): the main cost of a decode step of so few requests.

The instructions around such a product cost more than its bytes, so the kernel uses integer dot products of four codes
with four inputs at once. For that the inputs become numbers in fixed point of 16 bits, in two planes of a byte each,
with a unit of their own for every 32 inputs. This is finer than the rounding of the inputs before.

Each program holds the whole input in registers, prepares it once, and loops over outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.int4 import Int4Linear, load_factors
from penstock.kernels.triton.overlap import let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct, finish_row, load_added
from penstock.kernels.triton.words import dot_codes, in_fours_of_rows, two_planes

MAX_ROWS = 2  # From the third on, tensor cores are faster.
MANY_WORDS = 1024
LARGEST_STEP = tl.constexpr(32767.0)
SMALLEST_UNIT = tl.constexpr(1e-30)
# 1.5 × 2^23: the lowest bits of the sum with a small float are that float as an integer.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _planes(values, inverse, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Inputs in steps of their quad's unit, four to a word: the coarse bytes, then the fine ones, of a quad's first,
    second, third and fourth word. A step is 256 × coarse + fine."""
    steps = tl.reshape(values, (ROWS, WORDS // 4, 16)) * inverse[:, :, None] + ROUNDER
    bits = tl.reshape(steps, (ROWS, 4 * WORDS)).to(tl.int32, bitcast=True)
    a, b, c, d = in_fours_of_rows(bits, ROWS, WORDS)
    coarse, fine = two_planes(a, b, c, d)
    c0, c1, c2, c3 = in_fours_of_rows(coarse, ROWS, WORDS // 4)
    f0, f1, f2, f3 = in_fours_of_rows(fine, ROWS, WORDS // 4)
    return c0[None], c1[None], c2[None], c3[None], f0[None], f1[None], f2[None], f3[None]


@triton.jit
def _unpacked(words):
    return words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F


@triton.jit
def _products(weights, low, high, unit, sums, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return the products of each output's weights with the rows: [outputs, rows]."""
    words, scale, offset = weights
    first, second, third, fourth = in_fours_of_rows(words, OUTPUTS, WORDS // 4)
    coarse = tl.zeros((OUTPUTS, ROWS, WORDS // 4), tl.int32)
    fine = coarse
    lower, upper = _unpacked(first[:, None, :])
    coarse, fine = dot_codes(lower, upper, low[0], low[4], high[0], high[4], coarse, fine)
    lower, upper = _unpacked(second[:, None, :])
    coarse, fine = dot_codes(lower, upper, low[1], low[5], high[1], high[5], coarse, fine)
    lower, upper = _unpacked(third[:, None, :])
    coarse, fine = dot_codes(lower, upper, low[2], low[6], high[2], high[6], coarse, fine)
    lower, upper = _unpacked(fourth[:, None, :])
    coarse, fine = dot_codes(lower, upper, low[3], low[7], high[3], high[7], coarse, fine)
    made = (coarse * 256 + fine).to(tl.float32) * (unit[None] * scale[:, None, :])
    return tl.sum(made + sums[None] * offset[:, None, :], axis=2)


@triton.jit
def _load(
    codes, pairs, outputs, type: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr
):
    """The words of these outputs, with a scale and an offset for four words each."""
    own = outputs.to(tl.int64)
    index = tl.arange(0, WORDS)[None, :]
    words = tl.load(codes + own[:, None] * (WIDTH // 8) + index, mask=index < WIDTH // 8, other=0)
    # The compiler spreads a load along its first dimension where none is contiguous: then no thread has to pass on to
    # another what it loaded.
    group = tl.minimum(tl.arange(0, WORDS // 4) * 32 // GROUP, WIDTH // GROUP - 1)
    scale, offset = load_factors(pairs, own[None, :] * (WIDTH // GROUP) + group[:, None], type)
    return words, tl.trans(scale), tl.trans(offset)


@triton.jit
def _rows_kernel(
    x, codes, pairs, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """WORDS is the least power of two that covers WIDTH. The weights of the next outputs are loaded while these are
    multiplied."""
    type: tl.constexpr = x.dtype.element_ty
    tiles = tl.cdiv(N, OUTPUTS)
    let_next_start()
    own = tl.minimum(tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), N - 1)
    following = _load(codes, pairs, own, type, WIDTH, WORDS, GROUP)
    following_up = following
    if GATED:
        following_up = _load(codes, pairs, own + N, type, WIDTH, WORDS, GROUP)
    row = tl.arange(0, ROWS)
    byte = tl.arange(0, 4 * WORDS)
    columns = (byte // (GROUP // 2) * GROUP + byte % (GROUP // 2))[None, :]  # what meets the low codes
    real = (byte < WIDTH // 2)[None, :]
    if NORM:
        low_norm = tl.load(norm + columns, mask=real, other=0.0).to(tl.float32)
        high_norm = tl.load(norm + columns + GROUP // 2, mask=real, other=0.0).to(tl.float32)
    wait_for_previous()
    x_at = x + row[:, None] * K + columns
    low = tl.load(x_at, mask=real, other=0.0).to(tl.float32)
    high = tl.load(x_at + GROUP // 2, mask=real, other=0.0).to(tl.float32)
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / K + eps)
        low = low * low_norm
        high = high * high_norm
    sums = tl.sum(tl.reshape(low + high, (ROWS, WORDS // 4, 16)), axis=2)
    largest = tl.max(tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), (ROWS, WORDS // 4, 16)), axis=2)
    unit = tl.maximum(largest, SMALLEST_UNIT) / LARGEST_STEP
    low_planes = _planes(low, 1.0 / unit, ROWS, WORDS)
    high_planes = _planes(high, 1.0 / unit, ROWS, WORDS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        outputs = (tile * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
        target = row[None, :] * N + outputs
        inside = (outputs < N) & (row >= 0)[None, :]
        added = load_added(outputs, target, inside, bias, residual, BIAS, ADD)
        weights, weights_up = following, following_up
        own = tl.minimum(tile + tl.num_programs(0), tiles - 1) * OUTPUTS + tl.arange(0, OUTPUTS)
        own = tl.minimum(own, N - 1)
        following = _load(codes, pairs, own, type, WIDTH, WORDS, GROUP)
        made = _products(weights, low_planes, high_planes, unit, sums, OUTPUTS, ROWS, WORDS)
        result = made * factor[None, :]
        up = result
        if GATED:
            following_up = _load(codes, pairs, own + N, type, WIDTH, WORDS, GROUP)
            made = _products(weights_up, low_planes, high_planes, unit, sums, OUTPUTS, ROWS, WORDS)
            up = made * factor[None, :]
        finish_row(result, up, added, target, inside, out, GATED, IS_SILU)


@dataclass(frozen=True, slots=True)
class HeldTile:
    """The number of outputs that a program covers at a time, and of programs that share a processor."""

    outputs: int
    num_warps: int
    per_processor: int


def rows(x: Tensor, weight: Int4Linear, product: RowProduct) -> Tensor:
    """Multiply up to MAX_ROWS rows."""
    num_rows, width = x.shape
    outputs = product.num_outputs(weight.out_features)
    tile = _tile(num_rows, width, product.gate is not None)
    programs = min(cdiv(outputs, tile.outputs), tile.per_processor * num_processors(x.device.index or 0))
    return product.launch(
        _rows_kernel,
        programs,
        x,
        (weight.codes.view(torch.int32), weight.pairs),
        weight.bias,
        outputs,
        OUTPUTS=tile.outputs,
        ROWS=num_rows,
        WIDTH=width,
        WORDS=next_power_of_2(width // 8),
        GROUP=weight.group,
        num_warps=tile.num_warps,
    )


def _tile(num_rows: int, width: int, gated: bool) -> HeldTile:
    """Measured on an H200 over the shapes of 8 billion parameters."""
    words = next_power_of_2(width // 8)
    num_warps = min(8, max(1, words // 128))  # four words for each thread, or more
    is_wide = words > MANY_WORDS
    if num_rows > 1:
        return HeldTile(outputs=4, num_warps=num_warps, per_processor=1 if is_wide else 3)
    if gated or is_wide:
        return HeldTile(outputs=4, num_warps=num_warps, per_processor=2 if is_wide else 4)
    return HeldTile(outputs=8, num_warps=2 * num_warps, per_processor=2)
