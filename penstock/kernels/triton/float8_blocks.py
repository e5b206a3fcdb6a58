"""Products of several rows with weights in float8 and a scale for each 128 inputs, as DeepSeek publishes them.

Rows are rounded to float8 too, with a scale for each 128 inputs, which is what such checkpoints are made for. Float8
tensor cores multiply 128 inputs, and the sums are scaled in float32. The weights are kept in the form of `int8`,
which multiplies a single row, and everything on GPUs without float8 tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.expert_numbers import float8_dot, rounded
from penstock.kernels.triton.int4_few import add_shares
from penstock.kernels.triton.int8 import FLOAT8_BLOCK, Int8Linear
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct
from penstock.kernels.triton.targets import current, tile

MAX_ROWS = 64  # of the kernel here
MAX_ROWS_BESIDE_CUBLAS = 32  # the same, where cuBLAS takes blocks
CUBLAS_ROWS = 16  # cuBLAS refuses odd numbers of rows: this many at a time
SHORTEST_SHARE = 8  # blocks
BLOCK = tl.constexpr(FLOAT8_BLOCK)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, x_scales, weight, scales, bias, residual, out, M, N, K,
    SPLIT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program multiplies some of the blocks. With SPLIT (split-K), `out` has a plane for each part."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1)
    columns = tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    present = rows < M
    blocks = K // BLOCK
    first = tl.program_id(1) * blocks // tl.num_programs(1)
    last = (tl.program_id(1) + 1) * blocks // tl.num_programs(1)
    at = weight + own[:, None].to(tl.int64) * K + columns[None, :]
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    scale_at = scales + own.to(tl.int64) * blocks
    x_scale_at = x_scales + tl.where(present, rows, 0) * blocks
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    let_next_start()
    next_scale = tl.load(scale_at + first)
    wait_for_previous()
    next_x_scale = tl.load(x_scale_at + first)
    for block in range(first, last):
        scale, x_scale = next_scale, next_x_scale
        following = tl.minimum(block + 1, blocks - 1)
        next_scale = tl.load(scale_at + following)
        next_x_scale = tl.load(x_scale_at + following)
        made = float8_dot(tl.load(at + block * BLOCK), tl.load(x_at + block * BLOCK))
        total += made * (scale[:, None] * x_scale[None, :])
    inside = (outputs < N)[:, None] & present[None, :]
    target = rows[None, :] * N + outputs[:, None]
    if SPLIT:
        target += tl.program_id(1).to(tl.int64) * M * N
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
    if ADD:
        total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


def multiplies(weight: Int8Linear, x: Tensor) -> bool:
    """Return whether the product is for the kernels here."""
    is_float8 = weight.codes.dtype == torch.float8_e4m3fn and weight.group == FLOAT8_BLOCK
    if not is_float8 or x.dtype == torch.float32 or x.shape[0] < 2 or not current().has_float8:
        return False
    return x.shape[0] <= MAX_ROWS or weight.block_scales is not None


def rows(x: Tensor, weight: Int8Linear, product: RowProduct) -> Tensor:
    """Multiply two rows or more."""
    num_rows, width = x.shape
    if weight.block_scales is not None and num_rows > MAX_ROWS_BESIDE_CUBLAS:
        return _many_rows(x, weight, product)
    outputs = weight.out_features
    out = product.residual
    if out is None:
        out = torch.empty(num_rows, outputs, dtype=product.out_dtype or x.dtype, device=x.device)
    values, x_scales = rounded(x, FLOAT8_BLOCK)
    padded = max(16, next_power_of_2(num_rows))
    shape = tile("float8 blocks")
    shape = shape.fitted(width, shape.outputs + padded)
    tiles = cdiv(outputs, shape.outputs)
    # Tiles that leave the chip half empty are cut into parts of the width (split-K).
    most = num_processors(x.device.index or 0) // tiles
    shares = max(1, min(width // FLOAT8_BLOCK // SHORTEST_SHARE, most))
    is_whole = shares == 1
    made = out
    if not is_whole:
        made = torch.empty(shares, num_rows, outputs, dtype=torch.float32, device=x.device)
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, product.residual))
    _few_rows_kernel[(tiles, shares)](
        values,
        x_scales,
        weight.codes,
        weight.scales,
        *parts,
        made,
        num_rows,
        outputs,
        width,
        SPLIT=not is_whole,
        ADD=is_whole and product.residual is not None,
        BIAS=is_whole and weight.bias is not None,
        OUTPUTS=shape.outputs,
        ROWS=padded,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    if not is_whole:
        add_shares(made, weight.bias, product, out)
    return out


def _many_rows(x: Tensor, weight: Int8Linear, product: RowProduct) -> Tensor:
    assert weight.block_scales is not None
    num_rows = x.shape[0]
    values, x_scales = rounded(x, FLOAT8_BLOCK, for_rows=cdiv(num_rows, CUBLAS_ROWS) * CUBLAS_ROWS)
    made = torch._scaled_mm(
        values, weight.codes.t(), scale_a=x_scales, scale_b=weight.block_scales.t(), out_dtype=torch.bfloat16
    )
    made = made[:num_rows].to(product.out_dtype or x.dtype)
    if weight.bias is not None:
        made = made + weight.bias.to(made.dtype)
    return made if product.residual is None else product.residual.add_(made)
