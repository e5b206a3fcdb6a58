"""Products of many rows with int8 weights that were made for int8 inputs (SmoothQuant): both sides are integers.

Each row of the input is rounded with its own scale, each output's weights have one scale, and the integer product is
scaled when it leaves the tensor cores. `rounded_product` is the definition. Products of few rows are limited by
reading the weights; `int8` computes them without rounding inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tensor_kv
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.int8 import Int8Linear
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.targets import tile

LARGEST_CODE = tl.constexpr(float(tensor_kv.LARGEST_CODE))
ROWS = 128  # of a tile
TILES_TOGETHER = 8  # of rows, that share the weights they read
# Up to here cuBLAS and a pass over its integers take less time; beyond, that pass costs more than cuBLAS gains.
# Measured on an H200 over the shapes of 8 billion parameters.
MAX_CUBLAS_ROWS = 1024
CUBLAS_UNIT = 8  # it wants both sides of the weights to be multiples


def rounded_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """[T, in], int8 [out, in], [out] → float32 [T, out]"""
    x_codes, x_scales = tensor_kv.to_codes(x)
    return (x_codes.float() @ codes.float().T) * x_scales.unsqueeze(1) * scales


@triton.jit
def _round_kernel(x, out, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / LARGEST_CODE
    tl.store(scales + row, scale)
    tl.store(out + row * width + columns, tl.floor(values / scale + 0.5).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, weight, x_scales, scales, bias, out, M, N, K,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time form a block of tiles, not a line: what they read stays in the cache.
    row_tiles = tl.cdiv(M, ROWS)
    per_block = TOGETHER * tl.cdiv(N, OUTPUTS)
    first_tile = tl.program_id(0) // per_block * TOGETHER
    height = tl.minimum(row_tiles - first_tile, TOGETHER)
    within = tl.program_id(0) % per_block
    rows = (first_tile + within % height) * ROWS + tl.arange(0, ROWS)
    outputs = within // height * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    x_at = x + tl.minimum(rows, M - 1)[:, None].to(tl.int64) * K + columns[None, :]
    weight_at = weight + tl.minimum(outputs, N - 1)[None, :].to(tl.int64) * K + columns[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.int32)
    wait_for_previous()
    for start in range(0, K, WIDTH):
        total = tl.dot(tl.load(x_at + start), tl.load(weight_at + start), total, out_dtype=tl.int32)
    row_inside, inside = rows < M, outputs < N
    result = total.to(tl.float32)
    result *= tl.load(x_scales + rows, mask=row_inside, other=0.0)[:, None]
    result *= tl.load(scales + outputs, mask=inside, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=row_inside[:, None] & inside[None, :])


@triton.jit
def _scale_kernel(made, x_scales, scales, bias, out, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < outputs
    wait_for_previous()
    result = tl.load(made + row * outputs + columns, mask=inside, other=0).to(tl.float32)
    result = result * tl.load(x_scales + row) * tl.load(scales + columns, mask=inside, other=0.0)
    if BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + columns, result.to(out.dtype.element_ty), mask=inside)


def many_rows(x: Tensor, weight: Int8Linear, out_dtype: torch.dtype) -> Tensor:
    assert weight.row_scales is not None
    rows, width = x.shape
    outputs = weight.out_features
    codes = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    x_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    block = next_power_of_2(width)
    _round_kernel[(rows,)](x, codes, x_scales, width, BLOCK=block, num_warps=8, **launch_options())
    bias = x if weight.bias is None else weight.bias
    if rows <= MAX_CUBLAS_ROWS and outputs % CUBLAS_UNIT == 0 and width % CUBLAS_UNIT == 0:
        made = torch._int_mm(codes, weight.codes.t())
        _scale_kernel[(rows, cdiv(outputs, 1024))](
            made,
            x_scales,
            weight.row_scales,
            bias,
            out,
            outputs,
            BIAS=weight.bias is not None,
            BLOCK=1024,
            num_warps=4,
            **launch_options(),
        )
        return out
    shape = tile("int8, many rows")
    shape = shape.fitted(width, ROWS + shape.outputs)
    _product_kernel[(cdiv(rows, ROWS) * cdiv(outputs, shape.outputs),)](
        codes,
        weight.codes,
        x_scales,
        weight.row_scales,
        bias,
        out,
        rows,
        outputs,
        width,
        BIAS=weight.bias is not None,
        ROWS=ROWS,
        OUTPUTS=shape.outputs,
        WIDTH=shape.width,
        TOGETHER=TILES_TOGETHER,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out
