"""Matrix products of a few rows: the main cost of a decode step of a small batch.

With few rows a product is a read of the weights, so the kernels aim at memory speed and include what would otherwise
be kernels of their own: the RMS norm before the product, the gate, and the residual sum after it. Each program
computes a few outputs over the whole width, in the same order for any number of rows.

Every kernel may start while the kernel before it still drains (programmatic dependent launch), and waits for that
kernel's results before it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.elementwise import activate
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.targets import RowTile, Tile, row_tile, tile

MAX_ROWS = 32
SMALLEST_PART = 128  # columns of one row: where they do not divide the width, the last part has fewer columns


@triton.jit
def gate_with(gate, up, dtype: tl.constexpr, IS_SILU: tl.constexpr):
    """Round where a separate product would round, so that products of few and of many rows agree."""
    return activate(gate.to(dtype).to(tl.float32), IS_SILU) * up.to(dtype).to(tl.float32)


@triton.jit
def load_added(outputs, at, inside, bias, residual, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Load what is added to a product: the bias of these outputs, and the residual at the same places. Call this long
    before `finish_row` needs the values."""
    added = tl.zeros(at.shape, tl.float32)
    if BIAS:
        added += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return added


@triton.jit
def finish_row(result, up, added, at, inside, out, GATED: tl.constexpr, IS_SILU: tl.constexpr):
    """Finish the product of a single row in every format: gate, bias, residual sum and store."""
    if GATED:
        result = gate_with(result, up, out.dtype.element_ty, IS_SILU)
    tl.store(out + at, (result + added).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _columns(at, columns, left, WHOLE: tl.constexpr):
    """Load the columns at `at`: zero for those past the last, of which there are none with WHOLE."""
    if WHOLE:
        values = tl.load(at)
    elif len(at.shape) == 2:
        values = tl.load(at, mask=(columns < left)[None, :], other=0.0)
    else:
        values = tl.load(at, mask=columns < left, other=0.0)
    return values


@triton.jit
def _one_row_kernel(
    x, weight, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """With AHEAD, two tiles of weights are being loaded before the previous kernel has ended, and from then on. With
    WHOLE, WIDTH divides K."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    inside = outputs < N
    at = weight + tl.minimum(outputs, N - 1)[:, None].to(tl.int64) * K + columns[None, :]
    second = tl.cast(N, tl.int64) * K  # from an output's gate to its up
    total = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    total_up = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    squares = tl.zeros((WIDTH,), tl.float32)
    let_next_start()
    if AHEAD:
        more = (WIDTH + columns < K)[None, :]
        next_tile = _columns(at, columns, K, WHOLE)
        later_tile = tl.load(at + WIDTH, mask=more, other=0.0)
        if GATED:
            next_up = _columns(at + second, columns, K, WHOLE)
            later_up = tl.load(at + second + WIDTH, mask=more, other=0.0)
    wait_for_previous()
    added = load_added(outputs, outputs, inside, bias, residual, BIAS, ADD)
    for start in range(0, K, WIDTH):
        if AHEAD:
            more = (start + 2 * WIDTH + columns < K)[None, :]
            tile = next_tile
            next_tile = later_tile
            later_tile = tl.load(at + start + 2 * WIDTH, mask=more, other=0.0)
            if GATED:
                up_tile = next_up
                next_up = later_up
                later_up = tl.load(at + second + start + 2 * WIDTH, mask=more, other=0.0)
        else:
            tile = _columns(at + start, columns, K - start, WHOLE)
            if GATED:
                up_tile = _columns(at + second + start, columns, K - start, WHOLE)
        row = _columns(x + start + columns, columns, K - start, WHOLE).to(tl.float32)
        if NORM:
            squares += row * row
            row = row * _columns(norm + start + columns, columns, K - start, WHOLE).to(tl.float32)
        total += tile.to(tl.float32) * row[None, :]
        if GATED:
            total_up += up_tile.to(tl.float32) * row[None, :]
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    result = tl.sum(total, axis=1) * scale
    up = tl.sum(total_up, axis=1) * scale
    finish_row(result, up, added, outputs, inside, out, GATED, IS_SILU)


@triton.jit
def _whole_row_kernel(
    x, weight, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """All weights of a program are being loaded before the previous kernel has ended: WIDTH is not less than K, and
    with WHOLE the same. Behind attention, which leaves memory idle, most of a product's weights are there early."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    inside = outputs < N
    at = weight + tl.minimum(outputs, N - 1)[:, None].to(tl.int64) * K + columns[None, :]
    let_next_start()
    tile = _columns(at, columns, K, WHOLE)
    wait_for_previous()
    added = load_added(outputs, outputs, inside, bias, residual, BIAS, ADD)
    row = _columns(x + columns, columns, K, WHOLE).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(row * row, axis=0) / K + eps)
        row = row * _columns(norm + columns, columns, K, WHOLE).to(tl.float32)
    result = tl.sum(tile.to(tl.float32) * row[None, :], axis=1) * scale
    finish_row(result, result, added, outputs, inside, out, GATED, IS_SILU)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, weight, bias, norm, residual, out, M, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BESIDE: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With BESIDE, the kernel runs beside the previous one, which has called `let_next_run_beside`."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)
    present = rows < M
    inside = (outputs < N)[:, None] & present[None, :]
    at = weight + tl.minimum(outputs, N - 1)[:, None].to(tl.int64) * K + columns[None, :]
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    squares = tl.zeros((WIDTH, ROWS), tl.float32)
    if BESIDE:
        let_next_start()
    else:
        wait_for_previous()
    for start in range(0, K, WIDTH):
        if BESIDE:  # Without a wait, the first-level cache may hold what was there before.
            tile = tl.load(x_at + start, cache_modifier=".cg")
        else:
            tile = tl.load(x_at + start)
        if NORM:
            wide = tile.to(tl.float32)
            squares += wide * wide
            tile = (wide * tl.load(norm + start + columns).to(tl.float32)[:, None]).to(x.dtype.element_ty)
        total = tl.dot(tl.load(at + start), tile, total)
        if GATED:
            total_up = tl.dot(tl.load(at + tl.cast(N, tl.int64) * K + start), tile, total_up)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        total = total * scale[None, :]
        total_up = total_up * scale[None, :]
    if GATED:
        total = gate_with(total, total_up, out.dtype.element_ty, IS_SILU)
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    target = rows[None, :] * N + outputs[:, None]
    if BESIDE:
        wait_for_previous()
    if ADD:
        total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class RowProduct:
    """The operations around a product of rows, whatever the format of the weights. `norm` is the weight of an RMS
    norm of x in front; `gate` turns the two halves of the outputs into activation(first) × second; with `residual`
    the result is added to it, in place."""

    norm: Tensor | None = None
    eps: float = 0.0
    gate: Activation | None = None
    residual: Tensor | None = None
    out_dtype: torch.dtype | None = None

    def num_outputs(self, out_features: int) -> int:
        return out_features // (2 if self.gate else 1)

    def launch(
        self,
        kernel: Any,
        programs: int,
        x: Tensor,
        weight: tuple[Tensor, ...],
        bias: Tensor | None,
        outputs: int,
        **options: Any,
    ) -> Tensor:
        out = self.residual
        if out is None:
            out = torch.empty(x.shape[0], outputs, dtype=self.out_dtype or x.dtype, device=x.device)
        absent = x  # any pointer will do
        parts = (part if part is not None else absent for part in (bias, self.norm, self.residual))
        kernel[(programs,)](
            x,
            *weight,
            *parts,
            out,
            outputs,
            x.shape[1],
            self.eps,
            NORM=self.norm is not None,
            GATED=self.gate is not None,
            IS_SILU=self.gate == "silu",
            ADD=self.residual is not None,
            BIAS=bias is not None,
            **launch_options(),
            **options,
        )
        return out


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels here take this product."""
    unit = 16 if x.shape[0] == 1 else 128
    return 0 < x.shape[0] <= MAX_ROWS and x.dtype != torch.float32 and weight.shape[1] % unit == 0


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: RowProduct, *, beside: bool = False
) -> Tensor:
    """x @ weight.T for up to MAX_ROWS rows. With `beside`, the kernel launched before has read x and lets several
    rows be multiplied beside it."""
    rows, width = x.shape
    is_gated = product.gate is not None
    outputs = product.num_outputs(weight.shape[0])
    if rows == 1:
        row_shape = _row_tile(outputs, width, is_gated)
        is_whole = _loads_whole_rows(row_shape, width)
        columns = next_power_of_2(width) if is_whole else row_shape.width
        return product.launch(
            _whole_row_kernel if is_whole else _one_row_kernel,
            cdiv(outputs, row_shape.outputs),
            x,
            (weight,),
            bias,
            outputs,
            OUTPUTS=row_shape.outputs,
            WIDTH=columns,
            WHOLE=width % columns == 0,
            **({} if is_whole else {"AHEAD": row_shape.ahead}),
            num_warps=row_shape.num_warps,
        )
    out = product.residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=product.out_dtype or x.dtype, device=x.device)
    padded = max(16, next_power_of_2(rows))
    shape = _tile(padded, outputs, width, is_gated)
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (bias, product.norm, product.residual))
    _few_rows_kernel[(cdiv(outputs, shape.outputs),)](
        x,
        weight,
        *parts,
        out,
        rows,
        outputs,
        width,
        product.eps,
        NORM=product.norm is not None,
        GATED=is_gated,
        IS_SILU=product.gate == "silu",
        ADD=product.residual is not None,
        BIAS=bias is not None,
        BESIDE=beside,
        OUTPUTS=shape.outputs,
        WIDTH=shape.width,
        ROWS=padded,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out


def _row_tile(outputs: int, width: int, gated: bool) -> RowTile:
    if width < 2048:
        case = "narrow, gated" if gated else "narrow"
    elif gated:
        case = "gated, few outputs" if 2048 <= outputs <= 4096 else "gated"
    elif outputs <= 2048:
        case = "few outputs, whole" if width <= 4096 else "few outputs"
    else:
        case = "some outputs" if outputs <= 4096 else "many outputs"
    shape = row_tile(f"dense, {case}")
    if _loads_whole_rows(shape, width) or width % SMALLEST_PART:
        return shape
    return shape.fitted(width)


def _loads_whole_rows(shape: RowTile, width: int) -> bool:
    """Return whether all weights of a program are loaded ahead."""
    return shape.ahead and shape.width >= width


def _tile(rows: int, outputs: int, width: int, gated: bool) -> Tile:
    """Return the tile for several rows of a type of two bytes."""
    if gated:
        shape = tile("dense, gated")
    elif outputs > 2048:
        shape = tile("dense")
    else:
        shape = tile("dense, few outputs, 16 rows" if rows <= 16 else "dense, few outputs")
    matrices = 2 if gated else 1
    return shape.fitted(width, 2 * (matrices * shape.outputs + rows) + 4)  # and a norm's weight
