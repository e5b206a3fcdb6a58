"""A mixture's experts for a single token, or a few: every token reads the weights of its own experts.

Two kernels, which need no groups of tokens and no tensor cores: gate and up with the activation, and down with the
sum over a token's experts and the residual. A program reads some outputs of a matrix over its whole width, and asks
for as much of the width at once as registers hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation
from penstock.kernels.triton.elementwise import KINDS, gate_up_product
from penstock.kernels.triton.expert_numbers import eight_bits, factor, four_bits, load_scale
from penstock.kernels.triton.expert_weights import DENSE, FLOAT8, NO_SCALES, ExpertStack
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.targets import row_tile


@triton.jit
def _dense_part(x, codes, first, second, K, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """The products of a row of x with the rows at `first`, and at `second` with GATED: float32 [OUTPUTS]."""
    total = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    total_up = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    for start in range(0, K, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = columns < K
        row = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        at = codes + columns[None, :]
        total += tl.load(at + first[:, None] * K, mask=inside[None, :], other=0.0).to(tl.float32) * row
        if GATED:
            total_up += (
                tl.load(at + second[:, None] * K, mask=inside[None, :], other=0.0).to(tl.float32) * row
            )
    return tl.sum(total, axis=1), tl.sum(total_up, axis=1)


@triton.jit
def _chunk_part(
    codes, scales, offsets, chunk, own, low_x, high_x, height, num_groups, expert, chunks,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """The products of some chunks of x with some outputs: float32 [chunks, outputs]."""
    columns = tl.arange(0, LENGTH)
    at = ((expert * chunks + chunk)[:, None, None] * height + own[None, :, None]) * LENGTH
    packed = tl.load(codes + at + columns[None, None, :])
    table = expert * num_groups * height + own[None, :]
    if FORM <= FLOAT8:
        made = tl.sum(eight_bits(packed, tl.float32) * low_x[:, None, :], axis=2)
        sums = low_x
    else:
        low, high = four_bits(packed, FORM, tl.float16)
        made = low.to(tl.float32) * low_x[:, None, :]
        other = high.to(tl.float32) * high_x[:, None, :]
        if GROUP < CHUNK:  # the halves have different scales
            half_at = table + ((chunk * CHUNK + LENGTH) // GROUP * height)[:, None]
            own_scale = load_scale(scales, table + (chunk * CHUNK // GROUP * height)[:, None], SCALES)
            made = tl.sum(made, axis=2) * own_scale
            made += tl.sum(other, axis=2) * load_scale(scales, half_at, SCALES)
            if OFFSETS:
                own_at = table + (chunk * CHUNK // GROUP * height)[:, None]
                own_offset = tl.load(offsets + own_at).to(tl.float32)
                half_offset = tl.load(offsets + half_at).to(tl.float32)
                made += (
                    tl.sum(low_x, axis=1)[:, None] * own_offset
                    + tl.sum(high_x, axis=1)[:, None] * half_offset
                )
            made *= factor(FORM, tl.float16)
        else:
            made = tl.sum(made + other, axis=2) * factor(FORM, tl.float16)
        sums = low_x + high_x
    if SCALES != NO_SCALES and (FORM <= FLOAT8 or GROUP >= CHUNK):
        scale_at = table + (chunk * CHUNK // GROUP * height)[:, None]
        made *= load_scale(scales, scale_at, SCALES)
        if OFFSETS:
            offset = tl.load(offsets + scale_at).to(tl.float32)
            made += tl.sum(sums, axis=1)[:, None] * offset
    return made


@triton.jit
def _packed_part(
    x, codes, scales, offsets, input_order, expert, first, second, height, K,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """As `_dense_part`, with packed weights of an expert. `first` and `second` are outputs of the expert."""
    length: tl.constexpr = CHUNK if FORM <= FLOAT8 else CHUNK // 2
    total = tl.zeros((CHUNKS, OUTPUTS), tl.float32)
    total_up = tl.zeros((CHUNKS, OUTPUTS), tl.float32)
    chunks = K // CHUNK
    for start in range(0, chunks, CHUNKS):
        inside = start + tl.arange(0, CHUNKS) < chunks  # inputs outside are zero
        chunk = tl.minimum(start + tl.arange(0, CHUNKS), chunks - 1)
        low = chunk[:, None] * CHUNK + tl.arange(0, length)[None, :]
        high = low + (CHUNK - length)
        if ORDERED:
            low = tl.load(input_order + expert * K + low, mask=inside[:, None], other=0)
            high = tl.load(input_order + expert * K + high, mask=inside[:, None], other=0)
        low_x = tl.load(x + low, mask=inside[:, None], other=0.0).to(tl.float32)
        high_x = low_x
        if length < CHUNK:
            high_x = tl.load(x + high, mask=inside[:, None], other=0.0).to(tl.float32)
        total += _chunk_part(
            codes, scales, offsets, chunk, first, low_x, high_x, height, K // GROUP, expert, chunks,
            FORM, SCALES, OFFSETS, GROUP, CHUNK, length,
        )  # fmt: skip
        if GATED:
            total_up += _chunk_part(
                codes, scales, offsets, chunk, second, low_x, high_x, height, K // GROUP, expert, chunks,
                FORM, SCALES, OFFSETS, GROUP, CHUNK, length,
            )  # fmt: skip
    return tl.sum(total, axis=0), tl.sum(total_up, axis=0)


@triton.jit
def _gate_up_kernel(
    x, codes, scales, offsets, row_scales, input_order, bias, chosen, pair_weights, out, N, K,
    TOP_K: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ROW_SCALES: tl.constexpr,
    ORDERED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """x is [tokens, K]; a pair's row is activation(gate) × up. SPAN is the columns, or the chunks, of a step."""
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1)
    wait_for_previous()
    expert = tl.load(chosen + pair).to(tl.int64)
    row = x + (pair // TOP_K).to(tl.int64) * K
    place = expert * 2 * N + own
    if FORM == DENSE:
        gate, up = _dense_part(row, codes, place, place + N, K, SPAN, OUTPUTS, True)
    else:
        gate, up = _packed_part(
            row, codes, scales, offsets, input_order, expert, own, own + N, 2 * N, K,
            FORM, SCALES, OFFSETS, ORDERED, GROUP, CHUNK, SPAN, OUTPUTS, True,
        )  # fmt: skip
    if ROW_SCALES:
        gate *= tl.load(row_scales + place)
        up *= tl.load(row_scales + place + N)
    if BIAS:
        gate += tl.load(bias + place)
        up += tl.load(bias + place + N)
    if WEIGHS:
        share = tl.load(pair_weights + pair)
        gate *= share
        up *= share
    type: tl.constexpr = out.dtype.element_ty
    made = gate_up_product(gate.to(type).to(tl.float32), up.to(type).to(tl.float32), KIND)
    tl.store(out + pair.to(tl.int64) * N + outputs, made.to(type), mask=outputs < N)


@triton.jit
def _down_kernel(
    x, codes, scales, offsets, row_scales, input_order, bias, chosen, pair_weights, residual, N, K,
    TOP_K: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ROW_SCALES: tl.constexpr,
    ORDERED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """x is [pairs, K]. Adds the products of a token's pairs to its row of `residual`."""
    token = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1)
    wait_for_previous()
    at = residual + token.to(tl.int64) * N + outputs
    total = tl.load(at, mask=outputs < N, other=0.0).to(tl.float32)
    for pair in range(token * TOP_K, (token + 1) * TOP_K):
        expert = tl.load(chosen + pair).to(tl.int64)
        row = x + pair * K
        place = expert * N + own
        if FORM == DENSE:
            made, _ = _dense_part(row, codes, place, place, K, SPAN, OUTPUTS, False)
        else:
            made, _ = _packed_part(
                row, codes, scales, offsets, input_order, expert, own, own, N, K,
                FORM, SCALES, OFFSETS, ORDERED, GROUP, CHUNK, SPAN, OUTPUTS, False,
            )  # fmt: skip
        if ROW_SCALES:
            made *= tl.load(row_scales + place)
        if BIAS:
            made += tl.load(bias + place)
        if WEIGHS:
            made *= tl.load(pair_weights + pair)
        # As a product of its own would be rounded.
        total += made.to(residual.dtype.element_ty).to(tl.float32)
    tl.store(at, total.to(residual.dtype.element_ty), mask=outputs < N)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of tokens and experts, token after token."""

    chosen: Tensor  # int32 [T × K]: their experts
    weights: Tensor  # float32 [T × K]
    top_k: int


def gate_up(
    x: Tensor,
    weight: ExpertStack,
    bias: Tensor | None,
    pairs: Pairs,
    activation: Activation,
    *,
    weighs: bool,
) -> Tensor:
    """[T, hidden] → [T × K, inner]"""
    count, inner = pairs.chosen.shape[0], weight.outputs // 2
    out = torch.empty(count, inner, dtype=x.dtype, device=x.device)
    _launch(
        _gate_up_kernel, count, x, weight, bias, pairs, out, gated=True, WEIGHS=weighs, KIND=KINDS[activation]
    )
    return out


def add_down(
    x: Tensor, weight: ExpertStack, bias: Tensor | None, pairs: Pairs, residual: Tensor, *, weighs: bool
) -> None:
    """Add to each row of `residual`, [T, hidden], the sum over the token's pairs of `x`, [T × K, inner]."""
    tokens = residual.shape[0]
    _launch(_down_kernel, tokens, x, weight, bias, pairs, residual, gated=False, WEIGHS=weighs, KIND=0)


def _launch(
    kernel: Any,
    rows: int,
    x: Tensor,
    weight: ExpertStack,
    bias: Tensor | None,
    pairs: Pairs,
    out: Tensor,
    *,
    gated: bool,
    **options: Any,
) -> None:
    is_dense = weight.form == DENSE.value
    shape = row_tile(f"{'' if is_dense else 'packed '}experts{', gated' if gated else ''}")
    outputs = out.shape[1]
    if is_dense:
        span, chunk = min(shape.width, triton.next_power_of_2(weight.width)), 0
    else:
        chunk = weight.chunk
        bytes_each = shape.outputs * weight.codes.shape[3]
        span = triton.next_power_of_2(max(1, shape.width // bytes_each))
        span = min(span, triton.next_power_of_2(weight.width // chunk))
    absent = x  # any pointer will do
    tables = weight.scales, weight.offsets, weight.row_scales, weight.order, bias
    kernel[(triton.cdiv(outputs, shape.outputs), rows)](
        x,
        weight.readable_codes,
        *(absent if table is None else table for table in tables),
        pairs.chosen,
        pairs.weights,
        out,
        outputs,
        weight.width,
        TOP_K=pairs.top_k,
        BIAS=bias is not None,
        FORM=weight.form,
        SCALES=weight.scale_form,
        OFFSETS=weight.offsets is not None,
        ROW_SCALES=weight.row_scales is not None,
        ORDERED=weight.order is not None,
        GROUP=weight.group,
        CHUNK=chunk,
        SPAN=span,
        OUTPUTS=shape.outputs,
        num_warps=shape.num_warps,
        **options,
        **launch_options(),
    )
