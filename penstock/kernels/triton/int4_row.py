"""A single row times weights of four bits (`int4`): what a decode step of one request spends its time on.

Two kernels, as the instructions around a product weigh more here than its bytes. Where a program can hold the whole
input in registers, it prepares that once and then walks over many outputs; else it owns a few outputs and walks over
the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import num_processors
from penstock.kernels.triton.int4 import Int4Linear, load_factors
from penstock.kernels.triton.overlap import let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct, RowTile, finish_row
from penstock.kernels.triton.words import CODE_BASE, eight_codes, in_fours

MOST_WORDS = 512  # of an input that is held in registers


@triton.jit
def _columns(WORDS: tl.constexpr, GROUP: tl.constexpr):
    """Where the inputs are that meet the low codes of so many words; those of the high ones are half a group on."""
    byte = tl.arange(0, 4 * WORDS)
    return byte // (GROUP // 2) * GROUP + byte % (GROUP // 2)


@triton.jit
def _quad_sums(x0, x1, x2, x3, x4, x5, x6, x7, WORDS: tl.constexpr):
    """Of the inputs that meet four neighbouring words, which never belong to two groups."""
    sums = x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7
    return tl.sum(tl.reshape(sums, (WORDS // 4, 4)), axis=1)


@triton.jit
def _products(
    words, scale, offset, sums, x0, x1, x2, x3, x4, x5, x6, x7, OUTPUTS: tl.constexpr, WORDS: tl.constexpr
):
    """What each output's words make of the inputs, four words at a time: [outputs, words / 4]."""
    c0, c1, c2, c3, c4, c5, c6, c7 = eight_codes(words)
    made = c0 * x0[None, :]
    made += c1 * x1[None, :]
    made += c2 * x2[None, :]
    made += c3 * x3[None, :]
    made += c4 * x4[None, :]
    made += c5 * x5[None, :]
    made += c6 * x6[None, :]
    made += c7 * x7[None, :]
    made = tl.sum(tl.reshape(made, (OUTPUTS, WORDS // 4, 4)), axis=2)
    return made * scale + sums[None, :] * (offset - CODE_BASE * scale)


@triton.jit
def _held_kernel(
    x, codes, factors, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """WORDS make up the whole width. The weights of the next outputs are on their way while these are multiplied."""
    index = tl.arange(0, WORDS)
    columns = _columns(WORDS, GROUP)
    group_of_quad = tl.arange(0, WORDS // 4) * 32 // GROUP
    tiles = tl.cdiv(N, OUTPUTS)
    second = N.to(tl.int64)  # from an output's gate to its up
    let_next_start()
    own = tl.minimum(tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), N - 1).to(tl.int64)
    next_words = tl.load(codes + own[:, None] * WORDS + index[None, :])
    next_scale, next_offset = load_factors(factors, own[:, None] * (K // GROUP) + group_of_quad[None, :])
    if GATED:
        own += second
        next_up = tl.load(codes + own[:, None] * WORDS + index[None, :])
        up_scale, up_offset = load_factors(factors, own[:, None] * (K // GROUP) + group_of_quad[None, :])
    wait_for_previous()
    low = tl.load(x + columns).to(tl.float32)
    high = tl.load(x + columns + GROUP // 2).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / K + eps)
        low = low * tl.load(norm + columns).to(tl.float32)
        high = high * tl.load(norm + columns + GROUP // 2).to(tl.float32)
    x0, x1, x2, x3 = in_fours(low, WORDS)
    x4, x5, x6, x7 = in_fours(high, WORDS)
    sums = _quad_sums(x0, x1, x2, x3, x4, x5, x6, x7, WORDS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        words, scale, offset = next_words, next_scale, next_offset
        following = tl.minimum(tile + tl.num_programs(0), tiles - 1) * OUTPUTS + tl.arange(0, OUTPUTS)
        own = tl.minimum(following, N - 1).to(tl.int64)
        next_words = tl.load(codes + own[:, None] * WORDS + index[None, :])
        next_scale, next_offset = load_factors(factors, own[:, None] * (K // GROUP) + group_of_quad[None, :])
        made = _products(words, scale, offset, sums, x0, x1, x2, x3, x4, x5, x6, x7, OUTPUTS, WORDS)
        result = tl.sum(made, axis=1) * factor
        up = result
        if GATED:
            words, scale, offset = next_up, up_scale, up_offset
            own += second
            next_up = tl.load(codes + own[:, None] * WORDS + index[None, :])
            up_scale, up_offset = load_factors(factors, own[:, None] * (K // GROUP) + group_of_quad[None, :])
            made = _products(words, scale, offset, sums, x0, x1, x2, x3, x4, x5, x6, x7, OUTPUTS, WORDS)
            up = tl.sum(made, axis=1) * factor
        outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = outputs < N
        finish_row(result, up, outputs, inside, bias, residual, out, GATED, IS_SILU, BIAS, ADD)


@triton.jit
def _walking_kernel(
    x, codes, factors, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The next words are on their way while these are multiplied, the first ones before the previous kernel ends."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < N
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    index = tl.arange(0, WORDS)
    columns = _columns(WORDS, GROUP)
    words_at = codes + own[:, None] * (K // 8) + index[None, :]
    group_at = own[:, None] * (K // GROUP) + (tl.arange(0, WORDS // 4) * 32 // GROUP)[None, :]
    second = N.to(tl.int64) * (K // 8)  # from an output's gate to its up
    second_group = N.to(tl.int64) * (K // GROUP)
    total = tl.zeros((OUTPUTS, WORDS // 4), tl.float32)
    total_up = tl.zeros((OUTPUTS, WORDS // 4), tl.float32)
    squares = tl.zeros((4 * WORDS,), tl.float32)
    let_next_start()
    next_words = tl.load(words_at)
    if GATED:
        next_up = tl.load(words_at + second)
    wait_for_previous()
    for start in range(0, K // 8, WORDS):
        words = next_words
        more = (start + WORDS + index < K // 8)[None, :]
        next_words = tl.load(words_at + start + WORDS, mask=more, other=0)
        if GATED:
            up_words = next_up
            next_up = tl.load(words_at + second + start + WORDS, mask=more, other=0)
        at = start * 8 + columns
        low = tl.load(x + at).to(tl.float32)
        high = tl.load(x + at + GROUP // 2).to(tl.float32)
        if NORM:
            squares += low * low + high * high
            low = low * tl.load(norm + at).to(tl.float32)
            high = high * tl.load(norm + at + GROUP // 2).to(tl.float32)
        x0, x1, x2, x3 = in_fours(low, WORDS)
        x4, x5, x6, x7 = in_fours(high, WORDS)
        sums = _quad_sums(x0, x1, x2, x3, x4, x5, x6, x7, WORDS)
        group = group_at + start * 8 // GROUP
        scale, offset = load_factors(factors, group)
        total += _products(words, scale, offset, sums, x0, x1, x2, x3, x4, x5, x6, x7, OUTPUTS, WORDS)
        if GATED:
            scale, offset = load_factors(factors, group + second_group)
            total_up += _products(
                up_words, scale, offset, sums, x0, x1, x2, x3, x4, x5, x6, x7, OUTPUTS, WORDS
            )
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    result = tl.sum(total, axis=1) * factor
    up = tl.sum(total_up, axis=1) * factor
    finish_row(result, up, outputs, inside, bias, residual, out, GATED, IS_SILU, BIAS, ADD)


@dataclass(frozen=True, slots=True)
class HeldTile:
    """What one program that holds the input covers at a time, and how many of them share a processor."""

    outputs: int
    num_warps: int
    per_processor: int


def one_row(x: Tensor, weight: Int4Linear, product: RowProduct) -> Tensor:
    outputs = product.num_outputs(weight.out_features)
    tile = _tile(outputs, x.shape[1], product.gate is not None)
    programs = triton.cdiv(outputs, tile.outputs)
    if isinstance(tile, HeldTile):
        kernel, words = _held_kernel, x.shape[1] // 8
        programs = min(programs, tile.per_processor * num_processors(x.device.index or 0))
    else:
        kernel, words = _walking_kernel, tile.width
    return product.launch(
        kernel,
        programs,
        x,
        (weight.codes.view(torch.int32), weight.factors),
        weight.bias,
        outputs,
        OUTPUTS=tile.outputs,
        WORDS=words,
        GROUP=weight.group,
        num_warps=tile.num_warps,
    )


def _tile(outputs: int, width: int, gated: bool) -> HeldTile | RowTile:
    """Measured on an H200 over the shapes of 8 billion parameters; widths are in words."""
    words = width // 8
    largest = words & -words
    if largest == words <= MOST_WORDS and (gated or outputs > 4096):
        return HeldTile(outputs=4, num_warps=4, per_processor=3 if gated else 4)
    if gated:
        return RowTile(outputs=4, width=min(64, largest), num_warps=1, ahead=True)
    return RowTile(outputs=8, width=min(256, largest), num_warps=4, ahead=True)
