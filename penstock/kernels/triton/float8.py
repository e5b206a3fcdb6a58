"""Matrix products with weights in float8 (e4m3) and a scale for each output.

A single row reads the weights as they are and is not rounded; several rows are rounded to float8 themselves, each
with a scale of its own, and go through float8 tensor cores. On GPUs without such tensor cores, and in models that
compute in float32, `packing` keeps these weights in the form of `int8`, which rounds no inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation, Float8Weight
from penstock.kernels.triton.device import cdiv, empty_rows, next_power_of_2
from penstock.kernels.triton.elementwise import activate
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct, finish_row, load_added
from penstock.kernels.triton.targets import RowTile, Tile, has_hopper_kernels, row_tile, tile
from penstock.kernels.triton.words import four_float8, in_fours

MAX_ROWS = 64
MANY_OUTPUTS = 16384
SUM_BLOCK = 2048
LARGEST = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    weight: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out]
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def pack(
    parts: list[Float8Weight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Float8Linear:
    return Float8Linear(
        torch.cat([part.values.to(device) for part in parts]),
        torch.cat([part.scales.to(device) for part in parts]),
        None if bias is None else bias.to(device, dtype),
    )


@triton.jit
def _row_part(words, x0, x1, x2, x3):
    """Return the products of some words of each output's weights with their inputs: [outputs, words]."""
    w0, w1, w2, w3 = four_float8(words)
    made = w0 * x0[None, :]
    made += w1 * x1[None, :]
    made += w2 * x2[None, :]
    made += w3 * x3[None, :]
    return made


@triton.jit
def _one_row_kernel(
    x, weight, scales, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`weight` is read as words of 32 bits. With AHEAD, the next words are loaded while these are multiplied, and the
    first words are loaded before the previous kernel has ended."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < N
    index = tl.arange(0, WORDS)
    columns = tl.arange(0, 4 * WORDS)
    at = weight + tl.minimum(outputs, N - 1)[:, None].to(tl.int64) * (K // 4) + index[None, :]
    second = tl.cast(N, tl.int64) * (K // 4)  # from an output's gate to its up
    total = tl.zeros((OUTPUTS, WORDS), tl.float32)
    total_up = tl.zeros((OUTPUTS, WORDS), tl.float32)
    squares = tl.zeros((4 * WORDS,), tl.float32)
    let_next_start()
    if AHEAD:
        next_words = tl.load(at)
        if GATED:
            next_up = tl.load(at + second)
    wait_for_previous()
    added = load_added(outputs, outputs, inside, bias, residual, BIAS, ADD)
    for start in range(0, K // 4, WORDS):
        if AHEAD:
            words = next_words
            more = (start + WORDS + index < K // 4)[None, :]
            next_words = tl.load(at + start + WORDS, mask=more, other=0)
            if GATED:
                up_words = next_up
                next_up = tl.load(at + second + start + WORDS, mask=more, other=0)
        else:
            words = tl.load(at + start)
            if GATED:
                up_words = tl.load(at + second + start)
        row = tl.load(x + start * 4 + columns).to(tl.float32)
        if NORM:
            squares += row * row
            row = row * tl.load(norm + start * 4 + columns).to(tl.float32)
        x0, x1, x2, x3 = in_fours(row, WORDS)
        total += _row_part(words, x0, x1, x2, x3)
        if GATED:
            total_up += _row_part(up_words, x0, x1, x2, x3)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    result = tl.sum(total, axis=1) * factor * tl.load(scales + outputs, mask=inside, other=0.0)
    up = result
    if GATED:
        up = tl.sum(total_up, axis=1) * factor * tl.load(scales + N + outputs, mask=inside, other=0.0)
    finish_row(result, up, added, outputs, inside, out, GATED, IS_SILU)


def one_row(x: Tensor, weight: Float8Linear, product: RowProduct) -> Tensor:
    """Multiply a single row, which is not rounded."""
    outputs = product.num_outputs(weight.out_features)
    row_shape = _row_tile(outputs, x.shape[1], product.gate is not None)
    return product.launch(
        _one_row_kernel,
        cdiv(outputs, row_shape.outputs),
        x,
        (weight.weight.view(torch.int32), weight.scales),
        weight.bias,
        outputs,
        OUTPUTS=row_shape.outputs,
        WORDS=row_shape.width,
        AHEAD=row_shape.ahead,
        num_warps=row_shape.num_warps,
    )


def _row_tile(outputs: int, width: int, gated: bool) -> RowTile:
    case = "gated" if gated else "many outputs" if outputs > 4096 else "some outputs"
    return row_tile(f"float8, {case}").fitted(width // 4)


@triton.jit
def _round_kernel(
    x, norm, out, scales, width, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round a row to float8, or with NORM its RMS norm, or with GATED its first half gated by its second half. Both
    are rounded to the type of x first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    at = x + row * (2 * width if GATED else width) + columns
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        values = values * factor * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        values = activate(values, IS_SILU) * tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if NORM or GATED:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / LARGEST
    tl.store(scales + row, scale)
    tl.store(out + row * width + columns, (values / scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    made, bias, residual, out, size, width, ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = made + bias + residual, which may be `out`, in the type of `out`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_previous()
    values = tl.load(made + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


if triton.knobs.runtime.interpret:

    @triton.jit
    def _float8_dot(a, b, total):
        return total + tl.dot(a.to(tl.float16), b.to(tl.float16))

else:

    @triton.jit
    def _float8_dot(a, b, total):
        return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, x_scales, weight, scales, bias, residual, out, M, N, K,
    ADD: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1)
    columns = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)
    present = rows < M
    at = weight + own[:, None].to(tl.int64) * K + columns[None, :]
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    wait_for_previous()
    for start in range(0, K, WIDTH):
        total = _float8_dot(tl.load(at + start), tl.load(x_at + start), total)
    inside = (outputs < N)[:, None] & present[None, :]
    total *= tl.load(scales + own)[:, None] * tl.load(x_scales + rows, mask=present, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
    target = rows[None, :] * N + outputs[:, None]
    if ADD:
        total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


def gates(num_rows: int, weight: Float8Linear) -> bool:
    """Return whether `rows` gates the product of this many rows."""
    return num_rows <= MAX_ROWS and _is_for_hopper(num_rows, weight)


def _is_for_hopper(num_rows: int, weight: Float8Linear) -> bool:
    """Return whether `few_hopper` multiplies this many rows. cuBLAS leaves the chip idle where outputs are few."""
    if num_rows < 2 or not has_hopper_kernels() or weight.in_features % 128:
        return False
    from penstock.kernels.triton import few_hopper  # in Gluon, which not every version of Triton has

    return num_rows <= MAX_ROWS or few_hopper.fills_once(num_rows, weight.out_features, weight.weight.device)


def rows(
    x: Tensor, weight: Float8Linear, product: RowProduct, input_gate: Activation | None = None
) -> Tensor:
    """Multiply several rows, their RMS norms, or with `input_gate` their first halves gated by their second halves.
    The product may have a residual, and a gate where `gates` says so."""
    num_rows = x.shape[0]
    rounded, scales = _rounded(x, product, input_gate)
    if _is_for_hopper(num_rows, weight):
        from penstock.kernels.triton import few_hopper

        product = replace(product, out_dtype=product.out_dtype or x.dtype)
        return few_hopper.rows(rounded, weight.weight, weight.bias, product, (scales, weight.scales))
    if num_rows <= MAX_ROWS:
        return _few_rows(x, rounded, scales, weight, product)
    # The kernels for few rows let the tensor cores add up all products, too.
    made = torch._scaled_mm(
        rounded,
        weight.weight.t(),
        scale_a=scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return _finished(made, weight.bias, product, product.out_dtype or x.dtype)


def _finished(made: Tensor, bias: Tensor | None, product: RowProduct, dtype: torch.dtype) -> Tensor:
    """Add the bias and the residual to a product, in this type."""
    out = product.residual
    if out is None:
        if bias is None and made.dtype == dtype:
            return made
        out = torch.empty(made.shape, dtype=dtype, device=made.device)
    absent = made  # any pointer will do
    _add_kernel[(cdiv(made.numel(), SUM_BLOCK),)](
        made,
        bias if bias is not None else absent,
        product.residual if product.residual is not None else absent,
        out,
        made.numel(),
        made.shape[1],
        ADD=product.residual is not None,
        BIAS=bias is not None,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        **launch_options(),
    )
    return out


def _few_rows(
    x: Tensor, rounded: Tensor, x_scales: Tensor, weight: Float8Linear, product: RowProduct
) -> Tensor:
    num_rows, width = x.shape
    outputs = weight.out_features
    residual = product.residual
    out = residual
    if out is None:
        out = torch.empty(num_rows, outputs, dtype=product.out_dtype or x.dtype, device=x.device)
    padded = max(16, next_power_of_2(num_rows))
    shape = _tile(outputs, width, padded)
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, residual))
    _few_rows_kernel[(cdiv(outputs, shape.outputs),)](
        rounded,
        x_scales,
        weight.weight,
        weight.scales,
        *parts,
        out,
        num_rows,
        outputs,
        width,
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        OUTPUTS=shape.outputs,
        WIDTH=shape.width,
        ROWS=padded,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out


def _tile(outputs: int, width: int, rows: int) -> Tile:
    case = "float8, 64 rows" if rows > 32 else "float8, many outputs" if outputs > MANY_OUTPUTS else "float8"
    shape = tile(case)
    return shape.fitted(width, shape.outputs + rows)


def _rounded(x: Tensor, product: RowProduct, gate: Activation | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows, their norms or their gated halves in float8, and the scale of each row: float32 [rows, 1]."""
    rows = x.shape[0]
    width = x.shape[1] // (2 if gate else 1)
    rounded = empty_rows(rows, width, torch.float8_e4m3fn, x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _round_kernel[(rows,)](
        x,
        product.norm if product.norm is not None else x,
        rounded,
        scales,
        width,
        product.eps,
        NORM=product.norm is not None,
        GATED=gate is not None,
        IS_SILU=gate == "silu",
        BLOCK=next_power_of_2(width),
        num_warps=8,
        **launch_options(),
    )
    return rounded, scales
