"""The operands of products with four-bit weights on Hopper (`int4_hopper`, `int4_even`).

Codes become numbers in the registers of the threads whose tensor product takes them, and the input is put into the
order in which codes arrive, so that no number moves between threads. The kernels are in Gluon, which has no
interpreter, except the kernel that arranges the input.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from penstock.kernels.triton.device import cdiv, empty_rows, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.skinny import RowProduct


def _ptx(type: str, base: str, one: str, minus: str) -> str:
    """Eight codes of two words of 16 bits. The bits of `base` + code are a number, from which the base is subtracted;
    then code × scale + offset."""
    numbers = "".join(
        f"shr.u32 c, $4, {4 * index}; lop3.b32 c, c, 0x000f000f, {base}, 0xea;"
        f"fma.rn.{type} c, c, one, minus; fma.rn.{type} ${index}, c, $5, $6;"
        for index in range(4)
    )
    return f"{{ .reg .b32 c, one, minus; mov.b32 one, {one}; mov.b32 minus, {minus}; {numbers} }}"


# 0x4300 + code is 128 + code in bfloat16, and 0x6400 + code is 1024 + code in float16.
AS_BFLOAT16 = gl.constexpr(_ptx("bf16x2", "0x43004300", "0x3f803f80", "0xc300c300"))
AS_FLOAT16 = gl.constexpr(_ptx("f16x2", "0x64006400", "0x3c003c00", "0xe400e400"))


@constexpr_function
def _bits(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]


@constexpr_function
def words_layout(outputs, groups, quads):
    """Of words [outputs, groups, quads of a group, 8]: where the left operand of a product has their numbers."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0]]
    registers += [[0, 0, bit, 0] for bit in _bits(quads)] + [[0, bit, 0, 0] for bit in _bits(groups)]
    registers += [[64 * bit, 0, 0, 0] for bit in _bits(outputs // 64)]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, groups, quads, 8])


@constexpr_function
def flat_layout(outputs, quads):
    """The same of words [outputs, 8 × quads]."""
    registers = [[0, 1], [8, 0]] + [[0, 8 * bit] for bit in _bits(quads)]
    registers += [[64 * bit, 0] for bit in _bits(outputs // 64)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [outputs, 8 * quads])


@gluon.jit
def step_factors(pairs_at, step, K, GROUP: gl.constexpr, WIDTH: gl.constexpr, WORDS: gl.constexpr):
    """The words that hold scales and offsets of a step's groups: [outputs, groups]."""
    groups: gl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    group = gl.minimum(step * WIDTH // GROUP + group, K // GROUP - 1)
    return gl.load(gl.expand_dims(pairs_at, 1) + gl.expand_dims(group, 0))


@gluon.jit
def numbers_of(words, factors, type: gl.constexpr, WORDS: gl.constexpr, OPERAND: gl.constexpr):
    """The weights of words [outputs, 8 × quads], as the left operand [outputs, 32 × quads] of a product."""
    outputs: gl.constexpr = WORDS.shape[0]
    groups: gl.constexpr = WORDS.shape[1]
    quads: gl.constexpr = WORDS.shape[2]
    words = gl.convert_layout(words.reshape([outputs, groups, quads, 8]), WORDS)
    scale = factors.to(gl.int16).to(type, bitcast=True)
    offset = (factors >> 16).to(gl.int16).to(type, bitcast=True)
    scale, words = gl.broadcast(gl.expand_dims(gl.expand_dims(scale, 2), 3), words)
    offset, words = gl.broadcast(gl.expand_dims(gl.expand_dims(offset, 2), 3), words)
    if type == gl.bfloat16:
        a, b, c, d = gl.inline_asm_elementwise(
            AS_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, offset],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            AS_FLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, offset],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    both = gl.join(gl.join(a, b), gl.join(c, d))  # [outputs, groups, quads, 8, 2, 2]
    return gl.convert_layout(
        both.permute((0, 1, 2, 5, 4, 3)).reshape([outputs, 32 * groups * quads]), OPERAND
    )


@triton.jit
def _arrange_kernel(
    x, norm, out, flags, K, eps, NORM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FLAGS: tl.constexpr
):  # fmt: skip
    """Norm a row, and put its columns into the order in which `numbers_of` makes weights: word c of a group of codes
    has columns 2 c, 2 c + GROUP / 2, 2 c + 1 and 2 c + 1 + GROUP / 2, and eight words make 32 neighbours.
    Also clear the flags of the products that follow (`int4_even`)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < K
    plane, word = place % 32 // 8, place % GROUP // 32 * 8 + place % 8
    column = place // GROUP * GROUP + word * 2 + plane // 2 + plane % 2 * (GROUP // 2)
    weight = 1.0
    let_next_start()
    if NORM:
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    if FLAGS > 0 and tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(flags + tl.arange(0, FLAGS), 0)
    values = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) / K + eps) * weight
    tl.store(out + row * K + place, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def place_of(column, GROUP: gl.constexpr):
    """Where `_arrange_kernel` puts a column."""
    own = column % GROUP
    half, word = own // (GROUP // 2), own % (GROUP // 2) // 2
    plane = own % 2 * 2 + half
    return column - own + word // 8 * 32 + plane * 8 + word % 8


ARRANGED_BLOCK = 4096  # columns of a program where there is no norm


def arranged(x: Tensor, group: int, product: RowProduct, flags: Tensor | None = None) -> Tensor:
    """Return the rows, normed if the product says so, in the order of codes in groups of this size."""
    num_rows, width = x.shape
    out = empty_rows(num_rows, width, x.dtype, x.device)
    block = next_power_of_2(width)
    if product.norm is None:
        block = min(block, ARRANGED_BLOCK)
    _arrange_kernel[(num_rows, cdiv(width, block))](
        x,
        product.norm if product.norm is not None else x,
        out,
        flags if flags is not None else x,
        width,
        product.eps,
        NORM=product.norm is not None,
        GROUP=group,
        BLOCK=block,
        FLAGS=0 if flags is None else flags.numel(),
        num_warps=min(16, max(4, block // 512)),
        **launch_options(),
    )
    return out
