"""Words of 32 bits that hold several small weights, taken apart in registers.

A kernel that loads bytes one by one spends more on putting them in place than on the product; one that loads words
takes each apart in a few instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODE_BASE = tl.constexpr(128.0)  # what `eight_codes` adds to every code

if triton.knobs.runtime.interpret:

    @triton.jit
    def _float8(word, SHIFT: tl.constexpr):
        byte = ((word >> SHIFT) & 255).to(tl.uint8)
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)

    @triton.jit
    def four_float8(word):
        """The float8 (e4m3) numbers of a word, lowest byte first, as float32."""
        return _float8(word, 0), _float8(word, 8), _float8(word, 16), _float8(word, 24)

    @triton.jit
    def _code(word, SHIFT: tl.constexpr):
        return ((word >> SHIFT) & 15).to(tl.float32) + 128.0

    @triton.jit
    def eight_codes(word):
        """The lower halves of a word's bytes, lowest byte first, then the upper halves: each plus 128, as float32."""
        return (
            _code(word, 0),
            _code(word, 8),
            _code(word, 16),
            _code(word, 24),
            _code(word, 4),
            _code(word, 12),
            _code(word, 20),
            _code(word, 28),
        )

else:

    @triton.jit
    def four_float8(word):
        """The float8 (e4m3) numbers of a word, lowest byte first, as float32."""
        return tl.inline_asm_elementwise(
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

    @triton.jit
    def eight_codes(word):
        """The lower halves of a word's bytes, lowest byte first, then the upper halves: each plus 128, as float32.
        A code becomes a float by its bits alone, with one byte permutation: 0x4300 and a code above 16 zero bits is
        128 + code."""
        return tl.inline_asm_elementwise(
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
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [word],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
            ),
            is_pure=True,
            pack=1,
        )


@triton.jit
def in_fours(values, WORDS: tl.constexpr):
    """[4 × WORDS] → four of [WORDS]: what meets the first, second, third and fourth part of each word."""
    even, odd = tl.split(tl.reshape(values, (WORDS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
