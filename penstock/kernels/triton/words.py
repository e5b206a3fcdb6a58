"""Words of 32 bits that hold several small weights, taken apart in registers.

A kernel that loads single bytes spends more on putting them in place than on the product. A kernel that loads words
takes each word apart in a few instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.targets import converts_float8, has_ptx


@triton.jit
def float8_from_bits(byte):
    """The float8 (e4m3) number of the lowest byte of an int32, as float32. Its bits are also a float16 that is 256
    times smaller."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def four_float8(word):
    """The float8 (e4m3) numbers of a word, lowest byte first, as float32."""
    if converts_float8():
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second, a, b, c, d;
            .reg .b32 low, high;
            mov.b32 {first, second}, $4;
            cvt.rn.f16x2.e4m3x2 low, first;
            cvt.rn.f16x2.e4m3x2 high, second;
            mov.b32 {a, b}, low;
            mov.b32 {c, d}, high;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        numbers = (
            float8_from_bits(word),
            float8_from_bits(word >> 8),
            float8_from_bits(word >> 16),
            float8_from_bits(word >> 24),
        )
    return numbers


@triton.jit
def _dot(codes, numbers):
    """With signed bytes."""
    total = (codes & 255) * ((numbers << 24) >> 24)
    total += ((codes >> 8) & 255) * ((numbers << 16) >> 24)
    total += ((codes >> 16) & 255) * ((numbers << 8) >> 24)
    return total + (codes >> 24) * (numbers >> 24)


@triton.jit
def _unsigned_dot(codes, numbers):
    total = (codes & 255) * (numbers & 255)
    total += ((codes >> 8) & 255) * ((numbers >> 8) & 255)
    total += ((codes >> 16) & 255) * ((numbers >> 16) & 255)
    return total + (codes >> 24) * ((numbers >> 24) & 255)


@triton.jit
def dot_codes(low, high, low_coarse, low_fine, high_coarse, high_fine, coarse, fine):
    """Add to `coarse` and to `fine` the products of four low and four high codes, a byte each, with as many bytes of
    inputs. Coarse bytes are signed, fine bytes are not."""
    if has_ptx():
        sums = tl.inline_asm_elementwise(
            """
            dp4a.u32.s32 $0, $2, $4, $8;
            dp4a.u32.u32 $1, $2, $5, $9;
            dp4a.u32.s32 $0, $3, $6, $0;
            dp4a.u32.u32 $1, $3, $7, $1;
            """,
            "=&r,=&r,r,r,r,r,r,r,r,r",
            [low, high, low_coarse, low_fine, high_coarse, high_fine, coarse, fine],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        sums = (
            coarse + _dot(low, low_coarse) + _dot(high, high_coarse),
            fine + _unsigned_dot(low, low_fine) + _unsigned_dot(high, high_fine),
        )
    return sums


@triton.jit
def two_planes(a, b, c, d):
    """Return the second bytes of four numbers in one word, and their lowest bytes in another. The first number's byte
    is the lowest."""
    if has_ptx():
        planes = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second;
            prmt.b32 first, $2, $3, 0x5140;
            prmt.b32 second, $4, $5, 0x5140;
            prmt.b32 $0, first, second, 0x7632;
            prmt.b32 $1, first, second, 0x5410;
            }""",
            "=&r,=r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        planes = (
            ((a >> 8) & 255) | (b & 0xFF00) | ((c & 0xFF00) << 8) | ((d >> 8) << 24),
            (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24),
        )
    return planes


@triton.jit
def in_fours(values, WORDS: tl.constexpr):
    """[4 × WORDS] → four of [WORDS]: the inputs of the first, second, third and fourth part of each word."""
    even, odd = tl.split(tl.reshape(values, (WORDS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def in_fours_of_rows(values, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, 4 × COUNT] → four of [ROWS, COUNT]: each first, second, third and fourth."""
    even, odd = tl.split(tl.reshape(values, (ROWS, COUNT, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
