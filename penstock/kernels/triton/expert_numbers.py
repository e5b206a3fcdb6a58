"""Numbers of packed experts (`expert_weights`) in registers, and inputs in float8 for experts in float8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import next_power_of_2
from penstock.kernels.triton.expert_weights import EXPONENTS, FLOAT4, INT4
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.targets import has_ptx
from penstock.kernels.triton.words import float8_from_bits

LARGEST_FLOAT8 = tl.constexpr(448.0)


@triton.jit
def load_scale(table, at, SCALES: tl.constexpr):
    """Scales at these places, as float32."""
    scale = tl.load(table + at)
    if SCALES == EXPONENTS:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def factor(FORM: tl.constexpr, type: tl.constexpr):
    """What the scales of numbers from `four_bits` are multiplied by."""
    if FORM != FLOAT4 or not has_ptx():
        times = 1.0
    elif type == tl.bfloat16:
        times = 2.0**126
    elif type == tl.float16:
        times = 2.0**14
    else:
        times = 1.0
    return times


if triton.knobs.runtime.interpret:

    @triton.jit
    def float8_dot(a, b):
        return tl.dot(a.to(tl.float16), b.to(tl.float16))

else:

    @triton.jit
    def float8_dot(a, b):
        return tl.dot(a, b)


@triton.jit
def _float8_inputs_kernel(
    x, out, scales, K, row_stride, group_stride, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """Round a row to float8, each group with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = group < K // GROUP
    at = row * K + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    wait_for_previous()
    values = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12) / LARGEST_FLOAT8
    tl.store(scales + row * row_stride + group * group_stride, scale, mask=inside)
    tl.store(out + at, (values / scale[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def rounded(x: Tensor, group: int, *, for_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows in float8, and the scales of their groups: float32 [rows, width / group]. With `for_rows`, as
    cuBLAS takes them: that many rows, of which further ones may hold anything, and the scales of a group together."""
    rows, width = x.shape
    out = torch.empty(for_rows or rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    if for_rows is not None:
        scales = torch.empty(width // group, for_rows, dtype=torch.float32, device=x.device).t()
    else:
        scales = torch.empty(rows, width // group, dtype=torch.float32, device=x.device)
    groups = next_power_of_2(width // group)
    _float8_inputs_kernel[(rows,)](
        x, out, scales, width, *scales.stride(), GROUPS=groups, GROUP=group, num_warps=4, **launch_options()
    )
    return out, scales


@triton.jit
def eight_bits(codes, type: tl.constexpr):
    """Numbers of eight bits in this type."""
    if codes.dtype == tl.uint8:
        numbers = float8_from_bits(codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float32)
    return numbers.to(type)


@triton.jit
def _half_byte(packed, SHIFT: tl.constexpr, FORM: tl.constexpr):
    code = (packed >> SHIFT) & 15
    if FORM == INT4:
        number = code.to(tl.float32) - 8.0
    else:
        # The bits of a four-bit float are also a float16 that is 2^14 times smaller.
        bits = ((code & 8).to(tl.uint16) << 12) | ((code & 7).to(tl.uint16) << 9)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return number


def _int4_ptx(type: str, base: str, one: str, minus: str) -> str:
    """Eight codes of four bytes: the bits of `base` + code are a number, from which base and zero are subtracted."""
    numbers = "".join(
        f"prmt.b32 ${index}, {half}, {base}000000, {order}; fma.rn.{type} ${index}, ${index}, one, minus;"
        for index, (half, order) in enumerate(
            (("low", "0x7170"), ("low", "0x7372"), ("high", "0x7170"), ("high", "0x7372"))
        )
    )
    return f"""{{
        .reg .b32 low, high, one, minus;
        and.b32 low, $4, 0x0f0f0f0f; shr.u32 high, $4, 4; and.b32 high, high, 0x0f0f0f0f;
        mov.b32 one, {one}; mov.b32 minus, {minus}; {numbers}
        }}"""


def _float4_ptx(shift: int, mask: str) -> str:
    """Eight numbers of four bytes: the bits after the sign are shifted to where the type has exponent and
    mantissa."""
    numbers = "".join(
        f"shl.b32 c, {pair}, {shift - 4 * high}; shl.b32 d, {pair}, {12 - 4 * high};"
        f"and.b32 c, c, {mask}; lop3.b32 ${2 * high + index}, d, 0x80008000, c, 0xea;"
        for high in range(2)
        for index, pair in enumerate("ab")
    )
    return f"""{{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; {numbers}
        }}"""


# 0x4300 + code is 128 + code in bfloat16, and 0x6400 + code is 1024 + code in float16.
INT4_AS_BFLOAT16 = tl.constexpr(_int4_ptx("bf16x2", "0x43", "0x3f803f80", "0xc308c308"))
INT4_AS_FLOAT16 = tl.constexpr(_int4_ptx("f16x2", "0x64", "0x3c003c00", "0xe408e408"))
# The bits of a four-bit float are also a bfloat16 that is 2^126 times smaller, and a float16 2^14 times smaller.
FLOAT4_AS_BFLOAT16 = tl.constexpr(_float4_ptx(6, "0x01c001c0"))
FLOAT4_AS_FLOAT16 = tl.constexpr(_float4_ptx(9, "0x0e000e00"))


@triton.jit
def _as_bfloat16(packed, ptx: tl.constexpr):
    return tl.inline_asm_elementwise(
        ptx, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def _as_float16(packed, ptx: tl.constexpr):
    return tl.inline_asm_elementwise(
        ptx, "=&r,=&r,=&r,=&r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def four_bits(packed, FORM: tl.constexpr, type: tl.constexpr):
    """The numbers of the lower and of the upper halves of bytes, in this type: four bytes at a time in PTX. They have
    to be multiplied by scales with this `factor`."""
    if type == tl.float32 or not has_ptx():
        numbers = _half_byte(packed, 0, FORM).to(type), _half_byte(packed, 4, FORM).to(type)
    elif type == tl.bfloat16:
        numbers = _as_bfloat16(packed, INT4_AS_BFLOAT16 if FORM == INT4 else FLOAT4_AS_BFLOAT16)
    else:
        numbers = _as_float16(packed, INT4_AS_FLOAT16 if FORM == INT4 else FLOAT4_AS_FLOAT16)
    return numbers
