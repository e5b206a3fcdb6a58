"""Matrix products with weights in every format, alone or fused with their neighbours in a decoder layer.

This module picks the kernel. Memory speed limits products of one or a few rows (`skinny`, `int4`, `int8`, one row of
`float8`), and arithmetic limits products of many rows (cuBLAS, `float8`, `int8_rows`). A product of few rows never
widens weights of eight or four bits in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import Activation
from penstock.kernels.reference import TorchLinear
from penstock.kernels.triton import float8, float8_blocks, int4, int4_few, int4_row, int8, int8_rows, skinny
from penstock.kernels.triton.elementwise import gated, rms_norm
from penstock.kernels.triton.float8 import Float8Linear
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int8 import Int8Linear
from penstock.kernels.triton.packing import Packed, ReorderedLinear, StackedLinear
from penstock.kernels.triton.skinny import RowProduct
from penstock.kernels.triton.targets import has_hopper_kernels

# Up to here, `int4_hopper` multiplies four-bit weights as they are: with 1,024 rows in the time of dense weights.
MAX_HOPPER_ROWS = 2048
# No product includes these; `gated` computes them.
UNFUSED_GATES: tuple[Activation, ...] = ("clamped_swiglu", "relu", "limited_silu")


def linear(
    x: Tensor, weight: Packed, out_dtype: torch.dtype | None = None, *, beside: bool = False
) -> Tensor:
    """x @ weight.T. `beside` is explained at `skinny.linear`."""
    out_dtype = out_dtype or x.dtype
    rows, x = x.shape[0], x.contiguous()  # kernels find a row by the width alone
    if whole := _with_surroundings(weight, rows):
        return whole(x, weight, RowProduct(out_dtype=out_dtype))
    match weight:
        case StackedLinear():
            return torch.cat([linear(x, part, out_dtype) for part in weight.parts], dim=1)
        case ReorderedLinear():
            return linear(x.index_select(1, weight.order), weight.inner, out_dtype)
        case Float8Linear():
            return float8.rows(x, weight, RowProduct(out_dtype=out_dtype))
        case Int8Linear() if float8_blocks.multiplies(weight, x):
            return float8_blocks.rows(x, weight, RowProduct(out_dtype=out_dtype))
        case Int8Linear() if rows <= int8.MAX_ROWS:
            return int8.few_rows(x, weight, out_dtype=out_dtype)
        case Int8Linear() if weight.row_scales is not None:
            return int8_rows.many_rows(x, weight, out_dtype)
        case Int8Linear():
            weight = TorchLinear(int8.unpack(weight, x.dtype), weight.bias)
        case Int4Linear():
            weight = TorchLinear(int4.unpack(weight, x.dtype), weight.bias)
    if _fits_few(x, weight):
        return _few_rows(x, weight, RowProduct(out_dtype=out_dtype), beside=beside)
    if out_dtype != x.dtype and weight.bias is None and x.is_cuda:
        return torch.mm(x, weight.weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight.weight, weight.bias).to(out_dtype)


def add_linear(x: Tensor, weight: Packed, residual: Tensor, *, beside: bool = False) -> None:
    """residual += linear(x, weight). `beside` is explained at `skinny.linear`."""
    rows = x.shape[0]
    if whole := _with_surroundings(weight, rows):
        whole(x, weight, RowProduct(residual=residual))
        return
    match weight:
        case ReorderedLinear():
            add_linear(x.index_select(1, weight.order), weight.inner, residual)
        case Float8Linear():
            float8.rows(x, weight, RowProduct(residual=residual))
        case Int8Linear() if float8_blocks.multiplies(weight, x):
            float8_blocks.rows(x, weight, RowProduct(residual=residual))
        case Int8Linear() if rows <= int8.MAX_ROWS:
            int8.few_rows(x, weight, residual=residual)
        case TorchLinear() if _fits_few(x, weight):
            _few_rows(x, weight, RowProduct(residual=residual), beside=beside)
        case TorchLinear(bias=None):
            residual.addmm_(x, weight.weight.t())
        case _:
            residual.add_(linear(x, weight))


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Packed) -> Tensor:
    """linear(rms_norm(x, norm, eps), weight)"""
    if whole := _with_surroundings(weight, x.shape[0]):
        return whole(x, weight, RowProduct(norm, eps))
    match weight:
        case TorchLinear() if _fits_few(x, weight):
            return _few_rows(x, weight, RowProduct(norm, eps))
        case Float8Linear():
            return float8.rows(x, weight, RowProduct(norm, eps))
        case _:
            return linear(rms_norm(x, norm, eps), weight)


def normed_gated(x: Tensor, norm: Tensor, eps: float, weight: Packed, activation: Activation) -> Tensor:
    """gated(linear(rms_norm(x, norm, eps), weight), activation)"""
    whole = _with_surroundings(weight, x.shape[0])
    match weight:
        case Int4Linear(bias=None) | Int8Linear(bias=None) | Float8Linear(bias=None) if whole:
            return whole(x, weight, RowProduct(norm, eps, activation))
        case TorchLinear(bias=None) if _fits_few(x, weight):
            return _few_rows(x, weight, RowProduct(norm, eps, activation))
        case _:
            return gated(normed_linear(x, norm, eps, weight), activation)


def add_mlp(
    residual: Tensor, norm: Tensor, eps: float, gate_up: Packed, down: Packed, activation: Activation
) -> None:
    """residual += linear(normed_gated(residual, norm, eps, gate_up, activation), down)"""
    rows = residual.shape[0]
    match gate_up, down:
        case Float8Linear(), Float8Linear() if rows > float8.MAX_ROWS:
            hidden = normed_linear(residual, norm, eps, gate_up)
            float8.rows(hidden, down, RowProduct(residual=residual), input_gate=activation)
        case Int4Linear(bias=None), Int4Linear() if _is_for_hopper(gate_up, rows) and _is_for_hopper(
            down, rows
        ):
            from penstock.kernels.triton import int4_hopper  # in Gluon, which not every version of Triton has

            int4_hopper.add_mlp(residual, norm, eps, gate_up, down, activation)
        case _:
            add_linear(normed_gated(residual, norm, eps, gate_up, activation), down, residual)


def _fits_few(x: Tensor, weight: TorchLinear) -> bool:
    return skinny.fits(x, weight.weight) or _fits_hopper(x, weight)


def _fits_hopper(x: Tensor, weight: TorchLinear) -> bool:
    if not has_hopper_kernels() or x.dtype == torch.float32:
        return False
    from penstock.kernels.triton import few_hopper  # in Gluon, which not every version of Triton has

    return few_hopper.fits(x, weight.weight)


def _few_rows(x: Tensor, weight: TorchLinear, product: RowProduct, *, beside: bool = False) -> Tensor:
    """Return a product of plain weights with one row or a few."""
    if not _fits_hopper(x, weight):
        return skinny.linear(x, weight.weight, weight.bias, product, beside=beside)
    from penstock.kernels.triton import few_hopper

    if product.norm is not None:
        assert not beside, "the kernel in front writes the norm"
        x = rms_norm(x, product.norm, product.eps)
    return few_hopper.rows(x, weight.weight, weight.bias, product, beside=beside)


def _with_surroundings(weight: Packed, rows: int) -> Callable[[Tensor, Any, RowProduct], Tensor] | None:
    """Return the kernel for this many rows and weights of this format, with the norm, the gate and the sum fused
    in."""
    match weight:
        case Float8Linear() if rows == 1:
            return float8.one_row
        case Float8Linear() if float8.gates(rows, weight):
            return float8.rows
        case Int8Linear() if rows == 1:
            return int8.one_row
        case Int4Linear() if 1 <= rows <= int4_row.MAX_ROWS and weight.factors.dtype != torch.float32:
            return int4_row.rows
        case Int4Linear() if _is_for_hopper(weight, rows):
            from penstock.kernels.triton import int4_hopper

            return int4_hopper.rows
        case Int4Linear() if 1 <= rows <= int4_few.MAX_ROWS:
            return int4_few.few_rows
    return None


def _is_for_hopper(weight: Int4Linear, rows: int) -> bool:
    is_between = int4_row.MAX_ROWS < rows <= MAX_HOPPER_ROWS
    return is_between and has_hopper_kernels() and weight.factors.dtype != torch.float32
