"""Norms and gated activations: one pass over the row, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import interface
from penstock.kernels.interface import Activation
from penstock.kernels.triton.device import cdiv, empty_rows, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

KINDS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu": 3, "limited_silu": 4}
SWIGLU_ALPHA = tl.constexpr(interface.SWIGLU_ALPHA)
SWIGLU_LIMIT = tl.constexpr(interface.SWIGLU_LIMIT)
SILU_LIMIT = tl.constexpr(interface.SILU_LIMIT)


@triton.jit
def activate(gate, IS_SILU: tl.constexpr):
    """SiLU, or GELU in its tanh form, of float32."""
    if IS_SILU:
        inner = gate
    else:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner))  # 0.5 (1 + tanh y) = 1 / (1 + exp(-2 y))


@triton.jit
def gate_up_product(gate, up, KIND: tl.constexpr):
    """The activation of the gate times up, of float32. KIND is one of `KINDS`."""
    if KIND == 2:
        gate = tl.minimum(gate, SWIGLU_LIMIT)
        active = gate / (1.0 + tl.exp(gate * -SWIGLU_ALPHA))
        up = tl.minimum(tl.maximum(up, -SWIGLU_LIMIT), SWIGLU_LIMIT) + 1.0
    elif KIND == 3:
        active = tl.maximum(gate, 0.0)
    elif KIND == 4:
        active = activate(tl.minimum(gate, SILU_LIMIT), True)
        up = tl.minimum(tl.maximum(up, -SILU_LIMIT), SILU_LIMIT)
    else:
        active = activate(gate, KIND == 0)
    return active * up


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, width, eps, x_stride, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * width + columns
        values += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        values = values.to(residual.dtype.element_ty)
        tl.store(at, values, mask=inside)
        values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    made = gate_up_product(gate, up, KIND)
    tl.store(out + row * width + columns, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _opened_kernel(x, gate, out, width, gate_stride, gate_step, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    opening = tl.load(gate + row * gate_stride + columns * gate_step, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    made = values / (1.0 + tl.exp(-opening))
    tl.store(out + row * width + columns, made.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute the RMS norm of x. With `residual`, add x to `residual` in place first, and compute the norm of the
    sum."""
    rows, width = x.shape
    out = empty_rows(rows, width, x.dtype, x.device)
    if rows:
        block = next_power_of_2(width)
        _rms_norm_kernel[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            out,
            width,
            eps,
            x.stride(0),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(),
        )
    return out


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    rows, both = gate_up.shape
    width = both // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, next_power_of_2(width))
        _gated_kernel[(rows, cdiv(width, block))](
            gate_up, out, width, KIND=KINDS[activation], BLOCK=block, num_warps=4, **launch_options()
        )
    return out


def opened(x: Tensor, gate: Tensor) -> Tensor:
    """x × sigmoid(gate). The gate has a number for each of x, or one for each row."""
    rows, width = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    if rows:
        block = min(1024, next_power_of_2(width))
        step = gate.stride(1) if gate.shape[1] == width else 0
        _opened_kernel[(rows, cdiv(width, block))](
            x, gate, out, width, gate.stride(0), step, BLOCK=block, num_warps=4, **launch_options()
        )
    return out
