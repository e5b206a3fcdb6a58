"""Matrix products with weights of four bits, kept packed in memory and unpacked in registers.

weight[n, k] = code × scale + offset, with a scale and an offset for each `group` neighbours of a row. Byte j of a
group holds the codes of its columns j (low bits) and j + group / 2 (high bits), so that a load of bytes meets two
plain loads of the input.

A code becomes a float by its bits alone: 0x4300 + code is 128 + code in bfloat16, and the same with 16 zero bits
below is that in float32. The 128 goes out through the sum of the group's inputs, as the offset comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import Activation, GroupQuantWeight
from penstock.kernels.triton.overlap import wait_for_previous
from penstock.kernels.triton.skinny import gate_with

MAX_ROWS = 128
SMALLEST_GROUP = 32  # half of it is the least that a tensor core multiplies at once
BASE = tl.constexpr(128.0)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    codes: Tensor  # uint8 [out, in / 2]
    scales: Tensor  # [out, in / group] in the compute type
    offsets: Tensor  # likewise
    group: int
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, index: Tensor) -> Int4Linear:
        return Int4Linear(self.codes[index], self.scales[index], self.offsets[index], self.group, None)


def pack(
    parts: list[GroupQuantWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Int4Linear:
    """All parts have four bits and the same group."""
    group = parts[0].group
    codes = torch.cat([part.codes for part in parts]).to(device)
    outputs, width = codes.shape
    halves = codes.view(outputs, width // group, 2, group // 2)
    packed = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(outputs, width // 2)
    scales = torch.cat([part.scales for part in parts])
    offsets = torch.cat(
        [part.offsets if part.offsets is not None else torch.zeros_like(part.scales) for part in parts]
    )
    return Int4Linear(
        packed.contiguous(),
        scales.to(device, dtype),
        offsets.to(device, dtype),
        group,
        None if bias is None else bias.to(device, dtype),
    )


if triton.knobs.runtime.interpret:

    @triton.jit
    def _wide_codes(packed):
        """Low and high codes plus 128, as float32."""
        return (packed & 15).to(tl.float32) + 128.0, (packed >> 4).to(tl.float32) + 128.0

    @triton.jit
    def _narrow_codes(packed):
        """Low and high codes plus 128, as bfloat16."""
        low, high = _wide_codes(packed)
        return low.to(tl.bfloat16), high.to(tl.bfloat16)

else:

    @triton.jit
    def _wide_codes(packed):
        """Low and high codes plus 128, as float32: one byte permutation for each."""
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $8, 0x0f0f0f0f;
            shr.u32 high, $8, 4;
            and.b32 high, high, 0x0f0f0f0f;
            prmt.b32 $0, low, 0x43000000, 0x7044;
            prmt.b32 $1, low, 0x43000000, 0x7144;
            prmt.b32 $2, low, 0x43000000, 0x7244;
            prmt.b32 $3, low, 0x43000000, 0x7344;
            prmt.b32 $4, high, 0x43000000, 0x7044;
            prmt.b32 $5, high, 0x43000000, 0x7144;
            prmt.b32 $6, high, 0x43000000, 0x7244;
            prmt.b32 $7, high, 0x43000000, 0x7344;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)

    @triton.jit
    def _narrow_codes(packed):
        """Low and high codes plus 128, as bfloat16: one byte permutation for two."""
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $4, 0x0f0f0f0f;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0f0f0f0f;
            prmt.b32 $0, low, 0x43000000, 0x7170;
            prmt.b32 $1, low, 0x43000000, 0x7372;
            prmt.b32 $2, high, 0x43000000, 0x7170;
            prmt.b32 $3, high, 0x43000000, 0x7372;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
        return low, high


@triton.jit
def _row_part(codes, scales, offsets, outputs, group, low_x, high_x, K, GROUP: tl.constexpr):
    """What some groups of one row of x add to some outputs: [outputs, groups, GROUP / 2]."""
    columns = tl.arange(0, GROUP // 2)
    bytes_at = (
        outputs[:, None, None] * (K // 2) + group[None, :, None] * (GROUP // 2) + columns[None, None, :]
    )
    low, high = _wide_codes(tl.load(codes + bytes_at))
    at = outputs[:, None] * (K // GROUP) + group[None, :]
    scale = tl.load(scales + at).to(tl.float32)
    offset = tl.load(offsets + at).to(tl.float32)
    part = (low * low_x[None] + high * high_x[None]) * scale[:, :, None]
    return part + (low_x + high_x)[None] * (offset - BASE * scale)[:, :, None]


@triton.jit
def _one_row_kernel(
    x, codes, scales, offsets, bias, norm, residual, out, N, K, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < N
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    columns = tl.arange(0, GROUP // 2)
    total = tl.zeros((OUTPUTS, GROUPS, GROUP // 2), tl.float32)
    total_up = tl.zeros((OUTPUTS, GROUPS, GROUP // 2), tl.float32)
    squares = tl.zeros((GROUPS, GROUP // 2), tl.float32)
    wait_for_previous()
    for first in range(0, K // GROUP, GROUPS):
        group = first + tl.arange(0, GROUPS)
        at = group[:, None] * GROUP + columns[None, :]
        low = tl.load(x + at).to(tl.float32)
        high = tl.load(x + at + GROUP // 2).to(tl.float32)
        if NORM:
            squares += low * low + high * high
            low = low * tl.load(norm + at).to(tl.float32)
            high = high * tl.load(norm + at + GROUP // 2).to(tl.float32)
        total += _row_part(codes, scales, offsets, own, group, low, high, K, GROUP)
        if GATED:
            total_up += _row_part(codes, scales, offsets, own + N, group, low, high, K, GROUP)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)
    result = tl.sum(tl.sum(total, axis=2), axis=1) * factor
    if GATED:
        up = tl.sum(tl.sum(total_up, axis=2), axis=1) * factor
        result = gate_with(result, up, out.dtype.element_ty, IS_SILU)
    if BIAS:
        result += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        result += tl.load(residual + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile_part(codes, scales, offsets, outputs, group, low_x, high_x, sum_x, K, GROUP: tl.constexpr):
    """What one group adds for several rows of x: [outputs, rows]."""
    columns = tl.arange(0, GROUP // 2)
    packed = tl.load(codes + outputs[:, None] * (K // 2) + group * (GROUP // 2) + columns[None, :])
    low, high = _narrow_codes(packed)
    made = tl.dot(low.to(low_x.dtype), low_x)
    made = tl.dot(high.to(low_x.dtype), high_x, made)
    at = outputs * (K // GROUP) + group
    scale = tl.load(scales + at).to(tl.float32)
    offset = tl.load(offsets + at).to(tl.float32)
    return made * scale[:, None] + (offset - BASE * scale)[:, None] * sum_x[None, :]


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, sums, codes, scales, offsets, bias, residual, out, M, N, K,
    ADD: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = rows < M
    columns = tl.arange(0, GROUP // 2)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    wait_for_previous()
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    for group in range(K // GROUP):
        low = tl.load(x_at + group * GROUP)
        high = tl.load(x_at + group * GROUP + GROUP // 2)
        sum_x = tl.load(sums + rows * (K // GROUP) + group, mask=present, other=0.0)
        total += _tile_part(codes, scales, offsets, own, group, low, high, sum_x, K, GROUP)
    inside = (outputs < N)[:, None] & present[None, :]
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    target = rows[None, :] * N + outputs[:, None]
    if ADD:
        total += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _group_sums_kernel(x, sums, K, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = group < K // GROUP
    wait_for_previous()
    at = row * K + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(sums + row * (K // GROUP) + group, tl.sum(values, axis=1), mask=inside)


@triton.jit
def _unpack_kernel(codes, scales, offsets, out, K, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, GROUP // 2)
    inside = (group * GROUP < K)[:, None]
    wait_for_previous()
    at = output * (K // 2) + group[:, None] * (GROUP // 2) + columns[None, :]
    packed = tl.load(codes + at, mask=inside, other=0)
    scale = tl.load(scales + output * (K // GROUP) + group, mask=group * GROUP < K, other=0.0).to(tl.float32)[
        :, None
    ]
    offset = tl.load(offsets + output * (K // GROUP) + group, mask=group * GROUP < K, other=0.0).to(
        tl.float32
    )
    low = (packed & 15).to(tl.float32) * scale + offset[:, None]
    high = (packed >> 4).to(tl.float32) * scale + offset[:, None]
    target = out + output * K + group[:, None] * GROUP + columns[None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    tl.store(target + GROUP // 2, high.to(out.dtype.element_ty), mask=inside)


def one_row(
    x: Tensor,
    weight: Int4Linear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Activation | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `skinny.linear`, for a single row."""
    width = x.shape[1]
    outputs = weight.out_features // (2 if gate else 1)
    out = residual
    if out is None:
        out = torch.empty(1, outputs, dtype=out_dtype or x.dtype, device=x.device)
    num_groups = width // weight.group
    groups = min(num_groups & -num_groups, max(1, 1024 // weight.group))
    per_program = 2
    absent = x  # any pointer will do
    parts = (part if part is not None else absent for part in (weight.bias, norm, residual))
    _one_row_kernel[(triton.cdiv(outputs, per_program),)](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        *parts,
        out,
        outputs,
        width,
        eps,
        NORM=norm is not None,
        GATED=gate is not None,
        IS_SILU=gate == "silu",
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        OUTPUTS=per_program,
        GROUPS=groups,
        GROUP=weight.group,
        num_warps=2,
        launch_pdl=True,
    )
    return out


def few_rows(
    x: Tensor, weight: Int4Linear, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    rows, width = x.shape
    outputs = weight.out_features
    out = residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    tile_rows = min(64, max(16, triton.next_power_of_2(rows)))
    num_groups = width // weight.group
    sums = torch.empty(rows, num_groups, dtype=torch.float32, device=x.device)
    _group_sums_kernel[(rows,)](
        x,
        sums,
        width,
        GROUP=weight.group,
        GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8,
        launch_pdl=True,
    )
    absent = x
    parts = (part if part is not None else absent for part in (weight.bias, residual))
    _few_rows_kernel[(triton.cdiv(outputs, 64), triton.cdiv(rows, tile_rows))](
        x,
        sums,
        weight.codes,
        weight.scales,
        weight.offsets,
        *parts,
        out,
        rows,
        outputs,
        width,
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        OUTPUTS=64,
        GROUP=weight.group,
        ROWS=tile_rows,
        num_warps=4,
        num_stages=4,
        launch_pdl=True,
    )
    return out


def unpack(weight: Int4Linear, dtype: torch.dtype) -> Tensor:
    """[out, in], for products of many rows, which repay it."""
    outputs, width = weight.out_features, weight.in_features
    out = torch.empty(outputs, width, dtype=dtype, device=weight.codes.device)
    groups = max(1, min(16, triton.next_power_of_2(width // weight.group)))
    _unpack_kernel[(outputs, triton.cdiv(width // weight.group, groups))](
        weight.codes, weight.scales, weight.offsets, out, width, GROUP=weight.group, GROUPS=groups, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out
