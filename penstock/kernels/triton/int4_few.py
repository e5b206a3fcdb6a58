"""A few rows times weights of four bits (`int4`), on tensor cores.

A code becomes a float by its bits alone: 0x4300 + code is 128 + code in bfloat16. The sum of each group's inputs
corrects the product for the 128, as it does for the offset. Inputs in float32 meet the codes themselves, as float32.

Codes are taken from words of 16 bits: two neighbouring words become four pairs of numbers in seven instructions. The
kernel that sums the groups of the input also puts the input into the order of these numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import cdiv, next_power_of_2, num_processors
from penstock.kernels.triton.int4 import Int4Linear, load_factors
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct, gate_with
from penstock.kernels.triton.targets import has_ptx, stages, tile

MAX_ROWS = 128
SUM_BLOCK = 1024
SHARES_AT_ONCE = 8
CODE_BASE = tl.constexpr(128.0)  # what planes in bfloat16 add to every code
SMALLEST_PRODUCT = 16  # columns that a tensor core multiplies at once


@triton.jit
def _plane(packed, SHIFT: tl.constexpr, type: tl.constexpr):
    code = ((packed >> SHIFT) & 15).to(tl.float32)
    return code if type == tl.float32 else (code + 128.0).to(tl.bfloat16)


@triton.jit
def _two_planes(packed, type: tl.constexpr):
    """The lower and the upper codes of bytes, plus 128, as bfloat16: one byte permutation for two. For inputs in
    float32, the codes as float32."""
    if type == tl.float32 or not has_ptx():
        planes = _plane(packed, 0, type), _plane(packed, 4, type)
    else:
        planes = tl.inline_asm_elementwise(
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
    return planes


@triton.jit
def _four_planes(packed, type: tl.constexpr):
    """The four codes of each word of 16 bits, lowest first, plus 128, as bfloat16: two words at a time. For inputs in
    float32, the codes as float32."""
    if type == tl.float32 or not has_ptx():
        planes = (
            _plane(packed, 0, type),
            _plane(packed, 4, type),
            _plane(packed, 8, type),
            _plane(packed, 12, type),
        )
    else:
        planes = tl.inline_asm_elementwise(
            """{
            .reg .b32 second, third, fourth;
            shr.u32 second, $4, 4;
            shr.u32 third, $4, 8;
            shr.u32 fourth, $4, 12;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, third, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, fourth, 0x000f000f, 0x43004300, 0xea;
            }""",
            "=&r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return planes


@triton.jit
def _prepare_kernel(
    x, norm, prepared, sums, K, eps,
    NORM: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Norm a row, put it into the order of the planes of codes, and sum its groups."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = (group < K // GROUP)[:, None]
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    weight = 1.0
    let_next_start()
    if NORM:
        weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    values = tl.load(x + row * K + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(values * values, axis=1), axis=0) / K + eps)
        values = values * scale * weight
    kept = values.to(x.dtype.element_ty)
    tl.store(sums + row * (K // GROUP) + group, tl.sum(kept.to(tl.float32), axis=1), mask=group < K // GROUP)
    if PLANES == 4:
        # Of each half the even ones, then of each half the odd ones.
        half = tl.arange(0, 2)[None, :, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, None, :]
        target = prepared + row * K + group[:, None, None] * GROUP + half
        even, odd = tl.split(tl.reshape(kept, (GROUPS, 2, GROUP // 4, 2)))
        tl.store(target, even, mask=inside[:, :, None])
        tl.store(target + GROUP // 2, odd, mask=inside[:, :, None])
    else:
        tl.store(prepared + row * K + at, kept, mask=inside)


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, sums, codes, pairs, partial, M, N, K,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Each program multiplies some of the groups (split-K). `_add_shares_kernel` adds up the results."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = tl.minimum(outputs, N - 1).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = rows < M
    length: tl.constexpr = GROUP // PLANES  # of a plane
    columns = tl.arange(0, length)
    groups = K // GROUP
    share = tl.cdiv(groups, tl.num_programs(2))
    first_group = tl.program_id(2) * share
    last_group = tl.minimum(first_group + share, groups)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    codes_at = codes + own[:, None] * (K // PLANES) + columns[None, :]
    x_at = x + tl.where(present, rows, 0)[None, :] * K + columns[:, None]
    let_next_start()
    # The compiler fetches what it multiplies ahead of time; the scales are loaded ahead of time here.
    type: tl.constexpr = x.dtype.element_ty
    base: tl.constexpr = 0.0 if type == tl.float32 else CODE_BASE
    next_scale, next_offset = load_factors(pairs, own * groups + first_group, type)
    wait_for_previous()
    next_sum = tl.load(sums + rows * groups + first_group, mask=present, other=0.0)
    for group in range(first_group, last_group):
        scale, offset, sum_x = next_scale, next_offset, next_sum
        following = tl.minimum(group + 1, groups - 1)
        next_scale, next_offset = load_factors(pairs, own * groups + following, type)
        next_sum = tl.load(sums + rows * groups + following, mask=present, other=0.0)
        packed = tl.load(codes_at + group * length)
        first_x = tl.load(x_at + group * GROUP)
        second_x = tl.load(x_at + group * GROUP + length)
        if PLANES == 4:
            third_x = tl.load(x_at + group * GROUP + 2 * length)
            fourth_x = tl.load(x_at + group * GROUP + 3 * length)
            a, b, c, d = _four_planes(packed, type)
            made = tl.dot(a.to(type), first_x, input_precision="ieee")
            made = tl.dot(b.to(type), second_x, made, input_precision="ieee")
            made = tl.dot(c.to(type), third_x, made, input_precision="ieee")
            made = tl.dot(d.to(type), fourth_x, made, input_precision="ieee")
        else:
            a, b = _two_planes(packed, type)
            made = tl.dot(a.to(type), first_x, input_precision="ieee")
            made = tl.dot(b.to(type), second_x, made, input_precision="ieee")
        total += made * scale[:, None] + (offset - base * scale)[:, None] * sum_x[None, :]
    inside = (outputs < N)[:, None] & present[None, :]
    target = partial + tl.program_id(2).to(tl.int64) * M * N
    tl.store(target + rows[None, :] * N + outputs[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["shares"])
def _add_shares_kernel(
    partial, bias, residual, out, N, shares,
    GATED: tl.constexpr, IS_SILU: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up the split-K parts. With GATED, the second half of a row gates the first half, and N is the length of a
    half."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < N
    made = 2 * N if GATED else N
    total = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    wait_for_previous()
    for first in range(0, shares, AT_ONCE):  # one after the other, each would wait for memory anew
        share = first + tl.arange(0, AT_ONCE)[:, None]
        at = partial + (share * tl.num_programs(0) + row) * made + outputs[None, :]
        is_share = (share < shares) & inside[None, :]
        total += tl.sum(tl.load(at, mask=is_share, other=0.0), axis=0)
        if GATED:
            up += tl.sum(tl.load(at + N, mask=is_share, other=0.0), axis=0)
    if GATED:
        total = gate_with(total, up, out.dtype.element_ty, IS_SILU)
    if BIAS:
        total += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * N + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + outputs, total.to(out.dtype.element_ty), mask=inside)


def few_rows(x: Tensor, weight: Int4Linear, product: RowProduct) -> Tensor:
    rows, width = x.shape
    num_made = weight.out_features
    outputs = product.num_outputs(num_made)
    out = product.residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=product.out_dtype or x.dtype, device=x.device)
    absent = x  # any pointer will do
    planes = 4 if weight.group >= 4 * SMALLEST_PRODUCT else 2
    num_groups = width // weight.group
    prepared = torch.empty_like(x)
    sums = torch.empty(rows, num_groups, dtype=torch.float32, device=x.device)
    _prepare_kernel[(rows,)](
        x,
        product.norm if product.norm is not None else absent,
        prepared,
        sums,
        width,
        product.eps,
        NORM=product.norm is not None,
        GROUP=weight.group,
        GROUPS=next_power_of_2(num_groups),
        PLANES=planes,
        num_warps=8,
        **launch_options(),
    )
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    shape = tile(f"int4, {tile_rows} rows")
    # Codes in float32 are put into shared memory before they are multiplied.
    code_bytes = 4.0 if x.dtype == torch.float32 else 0.5
    num_stages = stages(
        shape.num_stages, weight.group * int(code_bytes * shape.outputs + x.element_size() * tile_rows)
    )
    tiles = cdiv(num_made, shape.outputs), cdiv(rows, tile_rows)
    # A program loops over its groups one after the other, and waits for each: many short loops are faster.
    programs = (4 if tile_rows == 16 else 2) * num_processors(x.device.index or 0)
    shares = max(1, min(num_groups // 4, programs // (tiles[0] * tiles[1])))
    partial = torch.empty(shares, rows, num_made, dtype=torch.float32, device=x.device)
    _few_rows_kernel[(*tiles, shares)](
        prepared,
        sums,
        weight.codes.view(torch.int16) if planes == 4 else weight.codes,
        weight.pairs,
        partial,
        rows,
        num_made,
        width,
        OUTPUTS=shape.outputs,
        GROUP=weight.group,
        ROWS=tile_rows,
        PLANES=planes,
        num_warps=shape.num_warps,
        num_stages=num_stages,
        **launch_options(),
    )
    add_shares(partial, weight.bias, product, out)
    return out


def add_shares(partial: Tensor, bias: Tensor | None, product: RowProduct, out: Tensor) -> None:
    """Add up partial sums [parts, rows, outputs]; then gate, bias and residual."""
    shares, rows, _ = partial.shape
    outputs = out.shape[1]
    absent = out  # any pointer will do
    parts = (part if part is not None else absent for part in (bias, product.residual))
    _add_shares_kernel[(rows, cdiv(outputs, SUM_BLOCK))](
        partial,
        *parts,
        out,
        outputs,
        shares,
        GATED=product.gate is not None,
        IS_SILU=product.gate == "silu",
        ADD=product.residual is not None,
        BIAS=bias is not None,
        BLOCK=SUM_BLOCK,
        AT_ONCE=SHARES_AT_ONCE,
        num_warps=4,
        **launch_options(),
    )
