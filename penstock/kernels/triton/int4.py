"""Matrix products with weights of four bits, kept packed in memory and unpacked in registers.

weight[n, k] = code × scale + offset, with a scale and an offset for each `group` neighbours of a row. Byte j of a
group holds the codes of its columns j (low bits) and j + group / 2 (high bits), so that a load of bytes meets two
plain loads of the input.

A code becomes a float by its bits alone: 0x4300 + code is 128 + code in bfloat16. The 128 goes out through the sum of
the group's inputs, as the offset comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import GroupQuantWeight
from penstock.kernels.triton.device import num_processors
from penstock.kernels.triton.overlap import let_next_start, wait_for_previous
from penstock.kernels.triton.words import CODE_BASE

MAX_ROWS = 128
TILE_OUTPUTS = 64
PROGRAMS_PER_PROCESSOR = 8
SUM_BLOCK = 1024
SMALLEST_GROUP = 32  # half of it is the least that a tensor core multiplies at once


@dataclass(frozen=True, slots=True)
class Int4Linear:
    codes: Tensor  # uint8 [out, in / 2]
    factors: (
        Tensor  # [out, in / group, 2] in the compute type: scale and offset, which are always needed together
    )
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
        return self.codes.nbytes + self.factors.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def rows(self, index: Tensor) -> Int4Linear:
        return Int4Linear(self.codes[index], self.factors[index], self.group, None)


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
        torch.stack((scales, offsets), dim=2).to(device, dtype),
        group,
        None if bias is None else bias.to(device, dtype),
    )


if triton.knobs.runtime.interpret:

    @triton.jit
    def _narrow_codes(packed):
        """Low and high codes plus 128, as bfloat16."""
        low = (packed & 15).to(tl.float32) + 128.0
        high = (packed >> 4).to(tl.float32) + 128.0
        return low.to(tl.bfloat16), high.to(tl.bfloat16)

else:

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
def load_factors(factors, at):
    """Scales and offsets of the groups `at`, [a, b], as float32. They lie beside each other: one load brings both."""
    both = tl.load(factors + at[:, :, None] * 2 + tl.arange(0, 2)[None, None, :])
    scale, offset = tl.split(both.to(tl.float32))
    return scale, offset


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, sums, codes, factors, partial, M, N, K,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program multiplies a share of the groups; `_add_shares_kernel` adds up what they made."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = rows < M
    columns = tl.arange(0, GROUP // 2)
    groups = K // GROUP
    share = tl.cdiv(groups, tl.num_programs(2))
    first_group = tl.program_id(2) * share
    last_group = tl.minimum(first_group + share, groups)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    codes_at = codes + own[:, None] * (K // 2) + columns[None, :]
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    let_next_start()
    # The compiler fetches what it multiplies ahead of time; what the products are scaled with is up to us.
    first = tl.arange(0, 1)
    next_scale, next_offset = load_factors(factors, own[:, None] * groups + first_group + first[None, :])
    wait_for_previous()
    next_sum = tl.load(sums + rows * groups + first_group, mask=present, other=0.0)
    for group in range(first_group, last_group):
        scale, offset, sum_x = next_scale, next_offset, next_sum
        following = tl.minimum(group + 1, groups - 1)
        next_scale, next_offset = load_factors(factors, own[:, None] * groups + following + first[None, :])
        next_sum = tl.load(sums + rows * groups + following, mask=present, other=0.0)
        low_x = tl.load(x_at + group * GROUP)
        high_x = tl.load(x_at + group * GROUP + GROUP // 2)
        low, high = _narrow_codes(tl.load(codes_at + group * (GROUP // 2)))
        made = tl.dot(low.to(low_x.dtype), low_x)
        made = tl.dot(high.to(low_x.dtype), high_x, made)
        total += made * scale + (offset - CODE_BASE * scale) * sum_x[None, :]
    inside = (outputs < N)[:, None] & present[None, :]
    target = partial + tl.program_id(2).to(tl.int64) * M * N
    tl.store(target + rows[None, :] * N + outputs[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["shares"])
def _add_shares_kernel(
    partial, bias, residual, out, N, shares, ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < N
    total = tl.zeros((BLOCK,), tl.float32)
    wait_for_previous()
    for share in range(shares):
        at = partial + (share * tl.num_programs(0) + row) * N + outputs
        total += tl.load(at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * N + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + outputs, total.to(out.dtype.element_ty), mask=inside)


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
def _unpack_kernel(codes, factors, out, K, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, GROUP // 2)
    inside = (group * GROUP < K)[:, None]
    wait_for_previous()
    at = output * (K // 2) + group[:, None] * (GROUP // 2) + columns[None, :]
    packed = tl.load(codes + at, mask=inside, other=0)
    own_group = tl.minimum(group, K // GROUP - 1)
    scale, offset = load_factors(factors, (output * (K // GROUP) + own_group)[:, None])
    low = (packed & 15).to(tl.float32) * scale + offset
    high = (packed >> 4).to(tl.float32) * scale + offset
    target = out + output * K + group[:, None] * GROUP + columns[None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=inside)
    tl.store(target + GROUP // 2, high.to(out.dtype.element_ty), mask=inside)


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
    tiles = triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(rows, tile_rows)
    # A program walks over its groups one after the other, and waits for each: many short walks are faster.
    programs = PROGRAMS_PER_PROCESSOR * num_processors(x.device.index or 0)
    shares = max(1, min(num_groups // 4, programs // (tiles[0] * tiles[1])))
    partial = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device)
    _few_rows_kernel[(*tiles, shares)](
        x,
        sums,
        weight.codes,
        weight.factors,
        partial,
        rows,
        outputs,
        width,
        OUTPUTS=TILE_OUTPUTS,
        GROUP=weight.group,
        ROWS=tile_rows,
        num_warps=4,
        num_stages=4,
        launch_pdl=True,
    )
    absent = x
    parts = (part if part is not None else absent for part in (weight.bias, residual))
    _add_shares_kernel[(rows, triton.cdiv(outputs, SUM_BLOCK))](
        partial,
        *parts,
        out,
        outputs,
        shares,
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        launch_pdl=True,
    )
    return out


def unpack(weight: Int4Linear, dtype: torch.dtype) -> Tensor:
    """[out, in], for products of many rows, which repay it."""
    outputs, width = weight.out_features, weight.in_features
    out = torch.empty(outputs, width, dtype=dtype, device=weight.codes.device)
    groups = max(1, min(16, triton.next_power_of_2(width // weight.group)))
    _unpack_kernel[(outputs, triton.cdiv(width // weight.group, groups))](
        weight.codes, weight.factors, out, width, GROUP=weight.group, GROUPS=groups, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
    return out
