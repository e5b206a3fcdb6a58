"""A mixture of experts: route, group the tokens by expert (`expert_groups`), multiply each group, and add up the
results. Weights are dense or packed (`expert_weights`), and few tokens go without groups (`expert_rows`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation, ExpertWeights, GroupQuantWeight, Routing
from penstock.kernels.operands import bytes_of
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.elementwise import KINDS, gate_up_product
from penstock.kernels.triton.expert_groups import LARGEST_ROWS, Groups, route_and_group
from penstock.kernels.triton.expert_numbers import (
    eight_bits,
    factor,
    float8_dot,
    four_bits,
    load_scale,
    rounded,
)
from penstock.kernels.triton.expert_rows import Pairs, add_down, gate_up
from penstock.kernels.triton.expert_weights import (
    DENSE,
    FLOAT8,
    INT4,
    NO_SCALES,
    ExpertStack,
    pack_matrix,
    stack,
)
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.targets import Tile, tile

SMALLEST_PRODUCT = 16  # columns that tl.dot takes at least


@dataclass(frozen=True, slots=True)
class StackedExperts:
    gate_up: ExpertStack  # 2 × inner outputs
    down: ExpertStack
    gate_up_bias: Tensor | None = None  # float32 [E, 2 × inner]
    down_bias: Tensor | None = None  # float32 [E, hidden]

    @property
    def num_bytes(self) -> int:
        biases = (bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.num_bytes + self.down.num_bytes + sum(biases)

    def memory(self, index: int) -> Sequence[tuple[str, Tensor]]:
        found = [
            (f"{stacked.form}, {stacked.group}: {kind}", held)
            for stacked in (self.gate_up, self.down)
            for kind, held in (bytes_of(table[index]) for table in stacked.tables())
        ]
        biases = (bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return [*found, *(bytes_of(bias[index]) for bias in biases)]


def pack_experts(
    experts: Iterable[ExpertWeights], dtype: torch.dtype, device: torch.device
) -> StackedExperts:
    """Pack one expert after the other. The columns of `down` are in the order of `gate` and `up`'s outputs: where
    `down` takes its inputs in another order, those outputs are put into it."""
    gate_ups: list[ExpertStack] = []
    downs: list[ExpertStack] = []
    biases: tuple[list[Tensor], list[Tensor]] = ([], [])
    for expert in experts:
        down, gate_up_bias = expert.down, expert.gate_up_bias
        order = down.input_order if isinstance(down, GroupQuantWeight) else None
        if isinstance(down, GroupQuantWeight) and order is not None:
            down = replace(down, input_order=None)
            if gate_up_bias is not None:
                places = order.to(gate_up_bias.device)
                gate_up_bias = gate_up_bias[torch.cat((places, places + places.shape[0]))]
        gate_ups.append(pack_matrix([expert.gate, expert.up], dtype, device, order))
        downs.append(pack_matrix([down], dtype, device))
        for bias, kept in zip((gate_up_bias, expert.down_bias), biases, strict=True):
            if bias is not None:
                kept.append(bias.to(device, torch.float32))
    gate_up_bias, down_bias = (torch.stack(kept) if kept else None for kept in biases)
    return StackedExperts(stack(gate_ups, dtype), stack(downs, dtype), gate_up_bias, down_bias)


@triton.jit
def _pairs(order, tile_pairs, tile, ROWS: tl.constexpr):
    """Return the pairs of a tile, and which of its rows there are."""
    rows = tl.arange(0, ROWS)
    present = rows < tl.load(tile_pairs + tile)
    return tl.load(order + tile * ROWS + rows, mask=present, other=0).to(tl.int64), present


@triton.jit
def _finish(
    total, total_up, expert, outputs, pair, present, row_scales, bias, pair_weights, out, N,
    GATED: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr, ROW_SCALES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scale the products of a tile, add biases, weigh, gate, and store."""
    own = tl.minimum(outputs, N - 1) + (expert * 2 * N if GATED else expert * N)
    if ROW_SCALES:
        total = total * tl.load(row_scales + own)[:, None]
        if GATED:
            total_up = total_up * tl.load(row_scales + own + N)[:, None]
    if BIAS:
        total += tl.load(bias + own)[:, None]
        if GATED:
            total_up += tl.load(bias + own + N)[:, None]
    if WEIGHS:
        share = tl.load(pair_weights + pair)[None, :]
        total = total * share
        total_up = total_up * share
    if GATED:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate_up_product(gate, total_up.to(out.dtype.element_ty).to(tl.float32), KIND)
    inside = (outputs < N)[:, None] & present[None, :]
    tl.store(out + pair[None, :] * N + outputs[:, None], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expert_kernel(
    x, weight, bias, order, tile_expert, tile_pairs, pair_weights, out, N, K,
    TOP_K: tl.constexpr, GATED: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With GATED: x is [tokens, K], and a pair's row is activation(gate) × up. Without: x is [pairs, K]. With WEIGHS,
    products are multiplied by the pair's weight. With WHOLE, WIDTH divides K."""
    tile = tl.program_id(1)
    wait_for_previous()
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    pair, present = _pairs(order, tile_pairs, tile, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    own = tl.minimum(outputs, N - 1) + (expert * 2 * N if GATED else expert * N)
    at = weight + own[:, None] * K + columns[None, :]
    source = pair // TOP_K if GATED else pair
    x_at = x + source[None, :] * K + columns[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, K, WIDTH):
        if WHOLE:
            part = tl.load(x_at + start, mask=present[None, :], other=0.0)
            own_tile = tl.load(at + start)
        else:
            inside = columns < K - start
            part = tl.load(x_at + start, mask=inside[:, None] & present[None, :], other=0.0)
            own_tile = tl.load(at + start, mask=inside[None, :], other=0.0)
        total = tl.dot(own_tile, part, total, input_precision="ieee")
        if GATED:
            up_at = at + tl.cast(N, tl.int64) * K + start
            up_tile = (
                tl.load(up_at) if WHOLE else tl.load(up_at, mask=(columns < K - start)[None, :], other=0.0)
            )
            total_up = tl.dot(up_tile, part, total_up, input_precision="ieee")
    _finish(
        total, total_up, expert, outputs, pair, present, bias, bias, pair_weights, out, N,
        GATED, WEIGHS, BIAS, False, KIND,
    )  # fmt: skip


@triton.jit
def _packed_part(
    total, codes_at, scales, offsets, scale_at, half_at, low_x, high_x,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add the product of a chunk of codes. `low_x` and `high_x` meet the halves of a chunk of four bits, whose scales
    are at `scale_at` and `half_at`; eight bits meet `low_x` alone."""
    type: tl.constexpr = low_x.dtype
    packed = tl.load(codes_at)
    if FORM <= FLOAT8:
        low = eight_bits(packed, type)
        high = low
    else:
        low, high = four_bits(packed, FORM, type)
    if SCALES != NO_SCALES:
        low *= (load_scale(scales, scale_at, SCALES) * factor(FORM, type)).to(type)[:, None]
        if OFFSETS:
            low += tl.load(offsets + scale_at).to(type)[:, None]
    total = tl.dot(low, low_x, total, input_precision="ieee")
    if FORM >= INT4:
        if SCALES != NO_SCALES:
            high *= (load_scale(scales, half_at, SCALES) * factor(FORM, type)).to(type)[:, None]
            if OFFSETS:
                high += tl.load(offsets + half_at).to(type)[:, None]
        total = tl.dot(high, high_x, total, input_precision="ieee")
    return total


@triton.jit
def _packed_kernel(
    x, codes, scales, offsets, row_scales, input_order, bias, order, tile_expert, tile_pairs, pair_weights, out,
    N, K,
    TOP_K: tl.constexpr, GATED: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr, ROW_SCALES: tl.constexpr,
    ORDERED: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same with packed weights (`expert_weights`), CHUNKS chunks at a time."""
    tile = tl.program_id(1)
    wait_for_previous()
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    pair, present = _pairs(order, tile_pairs, tile, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    length: tl.constexpr = CHUNK if FORM <= FLOAT8 else CHUNK // 2
    columns = tl.arange(0, length)
    height = 2 * N if GATED else N
    own = tl.minimum(outputs, N - 1)
    codes_at = codes + (expert * (K // CHUNK) * height + own)[:, None] * length + columns[None, :]
    table = expert * (K // GROUP) * height
    source = pair // TOP_K if GATED else pair
    x_at = x + source[None, :] * K
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, K // CHUNK, CHUNKS):
        for index in tl.static_range(CHUNKS):
            chunk = first + index
            low = chunk * CHUNK + columns
            high = low + length
            if ORDERED:
                low = tl.load(input_order + expert * K + low)
                high = tl.load(input_order + expert * K + high) if length < CHUNK else low
            low_x = tl.load(x_at + low[:, None], mask=present[None, :], other=0.0)
            high_x = low_x
            if length < CHUNK:
                high_x = tl.load(x_at + high[:, None], mask=present[None, :], other=0.0)
            at = codes_at + chunk * height * length
            scale_at = table + chunk * CHUNK // GROUP * height + own
            half_at = scale_at
            if GROUP < CHUNK:
                half_at = table + (chunk * CHUNK + length) // GROUP * height + own
            total = _packed_part(
                total, at, scales, offsets, scale_at, half_at, low_x, high_x, FORM, SCALES, OFFSETS
            )
            if GATED:
                total_up = _packed_part(
                    total_up, at + N * length, scales, offsets, scale_at + N, half_at + N, low_x, high_x,
                    FORM, SCALES, OFFSETS,
                )  # fmt: skip
    _finish(
        total, total_up, expert, outputs, pair, present, row_scales, bias, pair_weights, out, N,
        GATED, WEIGHS, BIAS, ROW_SCALES, KIND,
    )  # fmt: skip


@triton.jit
def _float8_kernel(
    x, x_scales, codes, scales, row_scales, bias, order, tile_expert, tile_pairs, pair_weights, out, N, K,
    TOP_K: tl.constexpr, GATED: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, SCALES: tl.constexpr, ROW_SCALES: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same with weights and inputs in float8, both with scales for a chunk or more."""
    tile = tl.program_id(1)
    wait_for_previous()
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    pair, present = _pairs(order, tile_pairs, tile, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, CHUNK)
    height = 2 * N if GATED else N
    own = tl.minimum(outputs, N - 1)
    codes_at = codes + (expert * (K // CHUNK) * height + own)[:, None] * CHUNK + columns[None, :]
    scale_at = scales + expert * (K // GROUP) * height + own
    source = pair // TOP_K if GATED else pair
    x_at = x + source[None, :] * K + columns[:, None]
    x_scale_at = x_scales + source * (K // CHUNK)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for chunk in range(K // CHUNK):
        x_scale = tl.load(x_scale_at + chunk)[None, :]
        part = tl.load(x_at + chunk * CHUNK, mask=present[None, :], other=0.0)
        at = codes_at + chunk * height * CHUNK
        made = float8_dot(tl.load(at), part) * x_scale
        if SCALES != NO_SCALES:
            made *= tl.load(scale_at + chunk * CHUNK // GROUP * height).to(tl.float32)[:, None]
        total += made
        if GATED:
            made = float8_dot(tl.load(at + N * CHUNK), part) * x_scale
            if SCALES != NO_SCALES:
                made *= tl.load(scale_at + chunk * CHUNK // GROUP * height + N).to(tl.float32)[:, None]
            total_up += made
    _finish(
        total, total_up, expert, outputs, pair, present, row_scales, bias, pair_weights, out, N,
        GATED, WEIGHS, BIAS, ROW_SCALES, KIND,
    )  # fmt: skip


@triton.jit
def _add_up_kernel(made, residual, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    total = tl.load(residual + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(TOP_K):
        at = made + (token * TOP_K + rank) * width + columns
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + token * width + columns, total.to(residual.dtype.element_ty), mask=inside)


def add_experts(
    normed: Tensor,
    logits: Tensor,
    experts: StackedExperts,
    routing: Routing,
    activation: Activation,
    residual: Tensor,
) -> None:
    """Add to each token's row of `residual` the weighted sum of its experts' outputs for its row of `normed`."""
    tokens, hidden = normed.shape
    if not tokens:
        return
    weights, groups = route_and_group(logits, routing)
    if isinstance(groups, Tensor):
        pairs = Pairs(groups, weights, routing.top_k)
        active = gate_up(
            normed, experts.gate_up, experts.gate_up_bias, pairs, activation, weighs=routing.weighs_input
        )
        add_down(active, experts.down, experts.down_bias, pairs, residual, weighs=not routing.weighs_input)
        return
    into, out_of = (weights, None) if routing.weighs_input else (None, weights)
    inner = experts.down.width
    active = torch.empty(tokens * routing.top_k, inner, dtype=normed.dtype, device=normed.device)
    multiply_groups(
        normed, experts.gate_up, experts.gate_up_bias, groups, into, active, routing.top_k, gate=activation
    )
    made = torch.empty(tokens * routing.top_k, hidden, dtype=normed.dtype, device=normed.device)
    multiply_groups(active, experts.down, experts.down_bias, groups, out_of, made, routing.top_k, gate=None)
    block = min(1024, next_power_of_2(hidden))
    _add_up_kernel[(tokens, cdiv(hidden, block))](
        made, residual, hidden, TOP_K=routing.top_k, BLOCK=block, num_warps=4, **launch_options()
    )


def multiply_groups(
    x: Tensor,
    weight: ExpertStack,
    bias: Tensor | None,
    groups: Groups,
    pair_weights: Tensor | None,
    out: Tensor,
    top_k: int,
    *,
    gate: Activation | None,
) -> None:
    """Multiply the rows of each group with its expert's weights. `gate` says that x has a row for each token."""
    outputs, absent = out.shape[1], x  # any pointer will do
    shape = _tile(groups.rows, weight, x.dtype, gate is not None)
    grid = cdiv(outputs, shape.outputs), groups.tile_expert.shape[0]
    around = (
        absent if bias is None else bias,
        groups.order,
        groups.tile_expert,
        groups.tile_pairs,
        absent if pair_weights is None else pair_weights,
        out,
        outputs,
        weight.width,
    )
    options: dict[str, Any] = {
        "TOP_K": top_k,
        "GATED": gate is not None,
        "WEIGHS": pair_weights is not None,
        "BIAS": bias is not None,
        "KIND": 0 if gate is None else KINDS[gate],
        "OUTPUTS": shape.outputs,
        "ROWS": groups.rows,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    } | launch_options()
    if weight.form == DENSE.value:
        whole = weight.width % shape.width == 0
        _expert_kernel[grid](x, weight.codes, *around, WIDTH=shape.width, WHOLE=whole, **options)
        return
    if weight.rounds_inputs(x.dtype):
        x, x_scales = rounded(x, weight.chunk)
        _float8_kernel[grid](
            x,
            x_scales,
            weight.codes,
            absent if weight.scales is None else weight.scales,
            absent if weight.row_scales is None else weight.row_scales,
            *around,
            SCALES=weight.scale_form,
            ROW_SCALES=weight.row_scales is not None,
            GROUP=weight.group,
            CHUNK=weight.chunk,
            **options,
        )
        return
    tables = weight.scales, weight.offsets, weight.row_scales, weight.order
    _packed_kernel[grid](
        x,
        weight.readable_codes,
        *(absent if table is None else table for table in tables),
        *around,
        FORM=weight.form,
        SCALES=weight.scale_form,
        OFFSETS=weight.offsets is not None,
        ROW_SCALES=weight.row_scales is not None,
        ORDERED=weight.order is not None,
        GROUP=weight.group,
        CHUNK=weight.chunk,
        CHUNKS=max(1, shape.width // weight.chunk),
        **options,
    )


def _tile(rows: int, weight: ExpertStack, dtype: torch.dtype, gated: bool) -> Tile:
    matrices = 2 if gated else 1
    case = f"{', gated' if gated else ''}{f', {rows} rows' if rows < 64 else ''}"
    if weight.form == DENSE.value:
        # Without tensor cores, in float32, larger tiles gain nothing.
        is_large = gated and rows == LARGEST_ROWS and dtype.itemsize == 2
        shape = tile(f"experts{case}" if not is_large else f"experts{case}, {rows} rows")
        shape = shape.fitted(weight.width, dtype.itemsize * (matrices * shape.outputs + rows))
        return replace(shape, width=max(shape.width, SMALLEST_PRODUCT))
    if weight.rounds_inputs(dtype):
        shape = replace(tile(f"float8 experts{case}"), width=weight.chunk)
        return shape.fitted(weight.width, matrices * shape.outputs + rows)
    shape = tile(f"packed experts{case}")
    shape = replace(shape, width=max(shape.width, weight.chunk))
    # Numbers may be put into shared memory before they are multiplied.
    return shape.fitted(weight.width, dtype.itemsize * (matrices * shape.outputs + rows))
