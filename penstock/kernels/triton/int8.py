"""Matrix products with weights of eight bits in groups, packed in memory and converted in registers.

weight[n, k] = code × scale + offset, with a scale and maybe an offset for each `group` neighbours of a row. A code is
an int8 (GGUF's Q8_0, Q5 and Q6_K; GPTQ) or a float8 (block scales, as DeepSeek publishes them; any float8 where there
are no float8 tensor cores): both are exact in bfloat16, and the kernels are the same. Inputs are not rounded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpus import HOPPER
from penstock.kernels.interface import Float8Weight, GroupQuantWeight
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct, finish_row, load_added
from penstock.kernels.triton.targets import current, tile
from penstock.kernels.triton.words import float8_from_bits

MAX_ROWS = 64
ROW_OUTPUTS = 2  # for one program of a one-row kernel
SMALLEST_GROUP = 16
FLOAT8_BLOCK = 128  # inputs of one scale in `float8_blocks`


@dataclass(frozen=True, slots=True)
class Int8Linear:
    codes: Tensor  # int8 or float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, in / group]
    offsets: Tensor | None  # likewise
    group: int  # a power of two
    bias: Tensor | None
    # float32 [out], where many rows are multiplied in integers (`int8_rows`).
    row_scales: Tensor | None = None
    # float32 [out / 128, in / 128], where that many rows have the same scales and cuBLAS takes such blocks
    block_scales: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets, self.bias, self.row_scales, self.block_scales)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def readable_codes(self) -> Tensor:
        """Return the codes as this GPU's kernels read them."""
        is_float8 = self.codes.dtype == torch.float8_e4m3fn
        return self.codes.view(torch.uint8) if is_float8 and not current().has_float8 else self.codes

    def rows(self, index: Tensor) -> Int8Linear:
        offsets = None if self.offsets is None else self.offsets[index]
        # Not every device indexes float8; bytes are bytes.
        codes = self.codes.view(torch.int8)[index].view(self.codes.dtype)
        return replace(
            self,
            codes=codes,
            scales=self.scales[index],
            offsets=offsets,
            bias=None,
            row_scales=None,
            block_scales=None,
        )


def pack(
    parts: list[GroupQuantWeight | Float8Weight],
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Int8Linear:
    """Pack stacked parts. All parts have codes of one type and the same group, and agree on the rounding of
    inputs."""
    group = parts[0].group
    assert group is not None
    codes, scales, offsets = [], [], []
    for part in parts:
        scales.append(part.scales.to(device))
        if isinstance(part, Float8Weight):
            codes.append(part.values.to(device))
            continue
        codes.append(part.codes.to(device))
        if part.offsets is not None:
            offsets.append(part.offsets.to(device))
        else:
            offsets.append(torch.zeros_like(scales[-1]))
    has_offsets = any(isinstance(part, GroupQuantWeight) and part.offsets is not None for part in parts)
    stacked = torch.cat(scales)
    rounds_inputs = isinstance(parts[0], GroupQuantWeight) and parts[0].rounds_inputs
    return Int8Linear(
        torch.cat(codes),
        stacked,
        torch.cat(offsets) if has_offsets else None,
        group,
        None if bias is None else bias.to(device, dtype),
        stacked[:, 0].contiguous() if rounds_inputs else None,
        _block_scales(stacked) if isinstance(parts[0], Float8Weight) and group == FLOAT8_BLOCK else None,
    )


def _block_scales(scales: Tensor) -> Tensor | None:
    """Return the scales of square blocks, if all are whole and have one scale each, and if cuBLAS takes them."""
    outputs, blocks = scales.shape
    if not scales.is_cuda or outputs % FLOAT8_BLOCK or not _cublas_takes_blocks():
        return None
    each = scales.view(-1, FLOAT8_BLOCK, blocks)
    return each[:, 0].contiguous() if bool((each == each[:, :1]).all()) else None


@functools.cache
def _cublas_takes_blocks() -> bool:
    """Return whether torch's cuBLAS multiplies float8 with scales for blocks on this GPU, which a small product
    tells."""
    if current().arch != HOPPER.arch:
        return False
    side = 4 * FLOAT8_BLOCK
    values = torch.zeros(side, side, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scales, x_scales = (torch.ones(4, size, device="cuda").t() for size in (4, side))
    try:
        torch._scaled_mm(values, values.t(), scale_a=x_scales, scale_b=scales, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


@triton.jit
def _numbers(codes):
    """Codes as float32: int8 or float8, or float8 in bytes on a GPU that does not convert float8."""
    if codes.dtype == tl.uint8:
        numbers = float8_from_bits(codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _row_part(
    codes, scales, offsets, outputs, group, row, K, OFFSETS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return the products of some groups of one row of x with some outputs: [outputs, groups, GROUP]."""
    columns = tl.arange(0, GROUP)
    at = outputs[:, None, None] * K + group[None, :, None] * GROUP + columns[None, None, :]
    scale_at = outputs[:, None] * (K // GROUP) + group[None, :]
    weight = _numbers(tl.load(codes + at)) * tl.load(scales + scale_at)[:, :, None]
    if OFFSETS:
        weight += tl.load(offsets + scale_at)[:, :, None]
    return weight * row[None]


@triton.jit
def _one_row_kernel(
    x, codes, scales, offsets, bias, norm, residual, out, N, K, eps,
    OFFSETS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < N
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    columns = tl.arange(0, GROUP)
    total = tl.zeros((OUTPUTS, GROUPS, GROUP), tl.float32)
    total_up = tl.zeros((OUTPUTS, GROUPS, GROUP), tl.float32)
    squares = tl.zeros((GROUPS, GROUP), tl.float32)
    wait_for_previous()
    added = load_added(outputs, outputs, inside, bias, residual, BIAS, ADD)
    for first in range(0, K // GROUP, GROUPS):
        group = first + tl.arange(0, GROUPS)
        at = group[:, None] * GROUP + columns[None, :]
        row = tl.load(x + at).to(tl.float32)
        if NORM:
            squares += row * row
            row = row * tl.load(norm + at).to(tl.float32)
        total += _row_part(codes, scales, offsets, own, group, row, K, OFFSETS, GROUP)
        if GATED:
            total_up += _row_part(codes, scales, offsets, own + N, group, row, K, OFFSETS, GROUP)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    result = tl.sum(tl.sum(total, axis=2), axis=1) * factor
    up = tl.sum(tl.sum(total_up, axis=2), axis=1) * factor
    finish_row(result, up, added, outputs, inside, out, GATED, IS_SILU)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, codes, scales, offsets, bias, residual, out, M, N, K,
    OFFSETS: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    present = rows < M
    columns = tl.arange(0, WIDTH)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    wait_for_previous()
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    for start in range(0, K, WIDTH):
        scale_at = own[:, None] * (K // GROUP) + ((start + columns) // GROUP)[None, :]
        weight = _numbers(tl.load(codes + own[:, None] * K + start + columns[None, :]))
        weight = weight * tl.load(scales + scale_at)
        if OFFSETS:
            weight += tl.load(offsets + scale_at)
        narrow = weight.to(x.dtype.element_ty)
        total = tl.dot(narrow, tl.load(x_at + start), total, input_precision="ieee")
    inside = (outputs < N)[:, None] & present[None, :]
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    target = rows[None, :] * N + outputs[:, None]
    if ADD:
        total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_kernel(
    codes, scales, offsets, out, K, OFFSETS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr
):
    output = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < K
    wait_for_previous()
    scale_at = output * (K // GROUP) + column // GROUP
    weight = _numbers(tl.load(codes + output * K + column, mask=inside))
    weight = weight * tl.load(scales + scale_at, mask=inside, other=0.0)
    if OFFSETS:
        weight += tl.load(offsets + scale_at, mask=inside, other=0.0)
    tl.store(out + output * K + column, weight.to(out.dtype.element_ty), mask=inside)


def one_row(x: Tensor, weight: Int8Linear, product: RowProduct) -> Tensor:
    outputs = product.num_outputs(weight.out_features)
    num_groups = x.shape[1] // weight.group
    return product.launch(
        _one_row_kernel,
        cdiv(outputs, ROW_OUTPUTS),
        x,
        (weight.readable_codes, weight.scales, x if weight.offsets is None else weight.offsets),
        weight.bias,
        outputs,
        OFFSETS=weight.offsets is not None,
        OUTPUTS=ROW_OUTPUTS,
        GROUPS=min(num_groups & -num_groups, max(1, 1024 // weight.group)),
        GROUP=weight.group,
        num_warps=2,
    )


def few_rows(
    x: Tensor, weight: Int8Linear, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows, width = x.shape
    outputs = weight.out_features
    out = residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    absent = x
    parts = (part if part is not None else absent for part in (weight.offsets, weight.bias, residual))
    padded = max(16, next_power_of_2(rows))
    shape = tile("int8")
    factors = 4 if weight.offsets is None else 8  # bytes of a scale and an offset, for every code
    shape = shape.fitted(width, (1 + factors) * shape.outputs + x.element_size() * padded)
    _few_rows_kernel[(cdiv(outputs, shape.outputs),)](
        x,
        weight.readable_codes,
        weight.scales,
        *parts,
        out,
        rows,
        outputs,
        width,
        OFFSETS=weight.offsets is not None,
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        OUTPUTS=shape.outputs,
        WIDTH=shape.width,
        GROUP=weight.group,
        ROWS=padded,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )
    return out


def unpack(weight: Int8Linear, dtype: torch.dtype) -> Tensor:
    """Return the dense matrix [out, in]. Unpacking pays off for products of many rows."""
    outputs, width = weight.out_features, weight.in_features
    out = torch.empty(outputs, width, dtype=dtype, device=weight.codes.device)
    block = min(1024, next_power_of_2(width))
    offsets = weight.scales if weight.offsets is None else weight.offsets
    _unpack_kernel[(outputs, cdiv(width, block))](
        weight.readable_codes, weight.scales, offsets, out, width,
        OFFSETS=weight.offsets is not None, GROUP=weight.group, WIDTH=block, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out
