"""A mixture's experts for a single token, or a few: every token reads the weights of its own experts.

Three kernels, which need no groups of tokens and no tensor cores: the router with the norm in front, gate and up
with the activation, and down with the sum over a token's experts and the residual. A program reads some outputs of a
matrix over its whole width, and asks for as much of the width at once as registers hold. A program of the last kernel
asks for the matrices of all of a token's experts at once, because one after the other each would wait for memory
anew. The program does so while gate and up are still being read: the choice of experts is known before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation, Routing
from penstock.kernels.reference import TorchLinear
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.elementwise import KINDS, gate_up_product
from penstock.kernels.triton.expert_groups import groups_tokens
from penstock.kernels.triton.expert_numbers import eight_bits, factor, four_bits, load_scale
from penstock.kernels.triton.expert_weights import DENSE, FLOAT8, NO_SCALES, ExpertStack
from penstock.kernels.triton.overlap import (
    launch_options,
    let_next_run_beside,
    let_next_start,
    wait_for_previous,
)
from penstock.kernels.triton.targets import MOST_PAIRED, row_tile


@triton.jit
def _dense_part(x, codes, first, second, K, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr):
    """The products of a row of x with the rows at `first` and at `second`: float32 [OUTPUTS] each."""
    total = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    total_up = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    for start in range(0, K, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        inside = columns < K
        row = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        at = codes + columns[None, :]
        total += tl.load(at + first[:, None] * K, mask=inside[None, :], other=0.0).to(tl.float32) * row
        total_up += tl.load(at + second[:, None] * K, mask=inside[None, :], other=0.0).to(tl.float32) * row
    return tl.sum(total, axis=1), tl.sum(total_up, axis=1)


@triton.jit
def _load_pairs(at, present, start, K, WIDTH: tl.constexpr):
    """Some columns of the rows at `at`, [pairs, outputs, WIDTH]: zero for pairs that are not present."""
    columns = start + tl.arange(0, WIDTH)
    inside = present[:, None] & (columns < K)[None, :]
    return tl.load(at[:, :, None] + columns[None, None, :], mask=inside[:, None, :], other=0.0)


@triton.jit
def _multiply_pairs(total, tile, x_at, present, start, K, WIDTH: tl.constexpr):
    columns = start + tl.arange(0, WIDTH)
    inside = present[:, None] & (columns < K)[None, :]
    row = tl.load(x_at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return total + tl.sum(tile.to(tl.float32) * row[:, None, :], axis=2)


@triton.jit
def _chunk_part(
    codes, scales, offsets, chunk, own, low_x, high_x, height, num_groups, expert, chunks,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """The products of some chunks of x, each with its expert, with some outputs: float32 [chunks, outputs]."""
    columns = tl.arange(0, LENGTH)
    at = ((expert * chunks + chunk)[:, None, None] * height + own[None, :, None]) * LENGTH
    packed = tl.load(codes + at + columns[None, None, :])
    table = expert[:, None] * num_groups * height + own[None, :]
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
    x, row, codes, scales, offsets, input_order, expert, place, present, first, second, height, K,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The products of rows of x with packed weights of experts. `row`, `expert`, `place` and `present` have an entry
    for each of CHUNKS chunks of each row: where the row begins, its expert, the number of the chunk, and whether
    there is such a row. `first` and `second` are outputs of the expert. Returns float32 [entries, OUTPUTS]; a row's
    product is the sum over its chunks."""
    length: tl.constexpr = CHUNK if FORM <= FLOAT8 else CHUNK // 2
    total = tl.zeros((place.shape[0], OUTPUTS), tl.float32)
    total_up = tl.zeros((place.shape[0], OUTPUTS), tl.float32)
    chunks = K // CHUNK
    for start in range(0, chunks, CHUNKS):
        inside = present & (start + place < chunks)  # inputs outside are zero
        chunk = tl.minimum(start + place, chunks - 1)
        low = chunk[:, None] * CHUNK + tl.arange(0, length)[None, :]
        high = low + (CHUNK - length)
        if ORDERED:
            low = tl.load(input_order + expert[:, None] * K + low, mask=inside[:, None], other=0)
            high = tl.load(input_order + expert[:, None] * K + high, mask=inside[:, None], other=0)
        low_x = tl.load(x + row[:, None] + low, mask=inside[:, None], other=0.0).to(tl.float32)
        high_x = low_x
        if length < CHUNK:
            high_x = tl.load(x + row[:, None] + high, mask=inside[:, None], other=0.0).to(tl.float32)
        total += _chunk_part(
            codes, scales, offsets, chunk, first, low_x, high_x, height, K // GROUP, expert, chunks,
            FORM, SCALES, OFFSETS, GROUP, CHUNK, length,
        )  # fmt: skip
        if GATED:
            total_up += _chunk_part(
                codes, scales, offsets, chunk, second, low_x, high_x, height, K // GROUP, expert, chunks,
                FORM, SCALES, OFFSETS, GROUP, CHUNK, length,
            )  # fmt: skip
    return total, total_up


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
    let_next_run_beside()
    expert = tl.load(chosen + pair).to(tl.int64)
    row = (pair // TOP_K).to(tl.int64) * K
    place = expert * 2 * N + own
    if FORM == DENSE:
        gate, up = _dense_part(x + row, codes, place, place + N, K, SPAN, OUTPUTS)
    else:
        chunk = tl.arange(0, SPAN)
        gates, ups = _packed_part(
            x, row + chunk * 0, codes, scales, offsets, input_order, expert + chunk * 0, chunk, chunk < SPAN,
            own, own + N, 2 * N, K, FORM, SCALES, OFFSETS, ORDERED, GROUP, CHUNK, SPAN, OUTPUTS, True,
        )  # fmt: skip
        gate, up = tl.sum(gates, axis=0), tl.sum(ups, axis=0)
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
    WHOLE: tl.constexpr,
):  # fmt: skip
    """x is [pairs, K]. Adds the products of a token's pairs to its row of `residual`. With WHOLE, SPAN is not less
    than K. The kernel runs beside the one for gate and up: all but x is complete when it starts."""
    PAIRS: tl.constexpr = triton.next_power_of_2(TOP_K)
    token = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1)
    index = tl.arange(0, PAIRS)
    present = index < TOP_K
    pair = token.to(tl.int64) * TOP_K + tl.where(present, index, 0)
    let_next_start()
    expert = tl.load(chosen + pair, cache_modifier=".cg").to(tl.int64)
    place = expert[:, None] * N + own[None, :]
    target = residual + token.to(tl.int64) * N + outputs
    before = tl.load(target, mask=outputs < N, other=0.0, cache_modifier=".cg").to(tl.float32)
    if WEIGHS:
        share = tl.load(pair_weights + pair, cache_modifier=".cg")[:, None]
    if FORM == DENSE:
        at = codes + place * K
        x_at = x + pair * K
        tile = _load_pairs(at, present, 0, K, SPAN)
        later = tile
        if not WHOLE:
            later = _load_pairs(at, present, SPAN, K, SPAN)
        wait_for_previous()
        made = _multiply_pairs(tl.zeros((PAIRS, OUTPUTS), tl.float32), tile, x_at, present, 0, K, SPAN)
        if not WHOLE:
            for start in range(SPAN, K, SPAN):
                tile = later
                later = _load_pairs(at, present, start + SPAN, K, SPAN)
                made = _multiply_pairs(made, tile, x_at, present, start, K, SPAN)
    else:
        wait_for_previous()
        entry = tl.arange(0, PAIRS * SPAN)
        is_entry = entry // SPAN < TOP_K
        of_entry = token.to(tl.int64) * TOP_K + tl.where(is_entry, entry // SPAN, 0)
        entries, _ = _packed_part(
            x, of_entry * K, codes, scales, offsets, input_order, tl.load(chosen + of_entry).to(tl.int64),
            entry % SPAN, is_entry, own, own, N, K,
            FORM, SCALES, OFFSETS, ORDERED, GROUP, CHUNK, SPAN, OUTPUTS, False,
        )  # fmt: skip
        made = tl.sum(tl.reshape(entries, (PAIRS, SPAN, OUTPUTS)), axis=1)
    if ROW_SCALES:
        made *= tl.load(row_scales + place)
    if BIAS:
        made += tl.load(bias + place)
    if WEIGHS:
        made *= share
    # As a product of its own would be rounded.
    made = tl.where(present[:, None], made.to(residual.dtype.element_ty).to(tl.float32), 0.0)
    total = before + tl.sum(made, axis=0)
    tl.store(target, total.to(residual.dtype.element_ty), mask=outputs < N)


@triton.jit
def _router_kernel(
    x, norm, weight, bias, normed, logits, N, K, eps,
    BIAS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every program of a token computes the norm, and the first one writes it."""
    token = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    inside = columns < K
    let_next_start()
    at = weight + tl.minimum(outputs, N - 1)[:, None] * K + columns[None, :]
    tile = tl.load(at, mask=inside[None, :], other=0.0)
    factors = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    row = tl.load(x + token * K + columns, mask=inside, other=0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, axis=0) / K + eps) * factors
    row = row.to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + token * K + columns, row, mask=inside)
    total = tl.sum(tile.to(tl.float32) * row.to(tl.float32)[None, :], axis=1)
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    tl.store(logits + token * N + outputs, total, mask=outputs < N)


def routes_rows(x: Tensor, router: object, routing: Routing) -> bool:
    """Return whether `normed_router` takes this step's rows."""
    tokens, width = x.shape
    is_few = (
        tokens > 0 and x.is_contiguous() and not groups_tokens(tokens, routing.top_k, routing.num_experts)
    )
    return is_few and isinstance(router, TorchLinear) and width <= row_tile("router").width


def normed_router(x: Tensor, norm: Tensor, eps: float, router: TorchLinear) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x, and the logits of its product with the router: float32 [T, E]."""
    (tokens, width), experts = x.shape, router.weight.shape[0]
    normed = torch.empty_like(x)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    shape = row_tile("router")
    _router_kernel[(cdiv(experts, shape.outputs), tokens)](
        x,
        norm,
        router.weight,
        x if router.bias is None else router.bias,  # any pointer will do
        normed,
        logits,
        experts,
        width,
        eps,
        BIAS=router.bias is not None,
        OUTPUTS=shape.outputs,
        WIDTH=next_power_of_2(width),
        num_warps=shape.num_warps,
        **launch_options(),
    )
    return normed, logits


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
    at_once = 1 if gated else next_power_of_2(pairs.top_k)
    if is_dense:
        span, chunk = min(shape.width, next_power_of_2(weight.width)), 0
        num_outputs = shape.outputs
        if not gated:
            num_outputs = min(MOST_PAIRED, max(1, num_outputs * shape.width // (span * at_once)))
    else:
        chunk, num_outputs = weight.chunk, shape.outputs
        bytes_each = num_outputs * weight.codes.shape[3]
        span = next_power_of_2(max(1, shape.width // (bytes_each * at_once)))
        span = min(span, next_power_of_2(weight.width // chunk))
    absent = x  # any pointer will do
    tables = weight.scales, weight.offsets, weight.row_scales, weight.order, bias
    kernel[(cdiv(outputs, num_outputs), rows)](
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
        OUTPUTS=num_outputs,
        **({} if gated else {"WHOLE": span >= weight.width}),
        num_warps=shape.num_warps,
        **options,
        **launch_options(),
    )
