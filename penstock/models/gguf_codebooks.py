"""Decodes GGUF's block formats with codebooks (IQ1 to IQ4), of three values (TQ) and of tiny floats (MXFP4, NVFP4).

All of them become integers and scales without loss, like the formats in `gguf_source.py`: a codebook's entries
are small integers, half steps are doubled, and eighths are multiplied by eight. `gguf_codebooks.npz` holds the tables
that define the IQ formats.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_BITS = np.arange(8, dtype=np.uint8)
_NIBBLES = np.array([0, 4], dtype=np.uint8)
_SEVENS = np.array([0, 7, 14, 21], dtype=np.uint32)
_THREES = np.array([0, 3, 6, 9], dtype=np.uint16)
_FOURTH_STEPS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
_TINY_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)  # doubled
# The sign bits of eight numbers in seven: the eighth makes their count even.
_EVEN_SIGNS = np.array([index | (index.bit_count() & 1) << 7 for index in range(128)], dtype=np.uint8)
_POWERS_OF_THREE = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


@cache
def _codebooks() -> dict[str, NDArray[np.int8]]:
    with np.load(Path(__file__).with_name("gguf_codebooks.npz"), allow_pickle=False) as tables:
        return {name: tables[name] for name in tables.files}


def half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of every block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, w] → [n, 2w], the low half of each byte first."""
    halves: Bytes = (packed[:, :, None] >> _NIBBLES) & np.uint8(0xF)
    return halves.reshape(len(packed), -1)


def _fill_signed(codes: Bytes, entries: NDArray[np.int8], signs: Bytes) -> None:
    """Write entries [n, …, 8 or 4] with the signs in bits, one byte for eight neighbours."""
    bits = ((signs.reshape(len(codes), -1, 1) >> _BITS) & 1).reshape(codes.shape)
    values = entries.reshape(codes.shape)
    codes.view(np.int8)[:] = np.where(bits, -values, values)


def iq2_xxs(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    words = blocks[:, 2:].reshape(-1, 8, 8)
    high = np.ascontiguousarray(words[:, :, 4:]).view(np.uint32)[:, :, 0]
    signs = _EVEN_SIGNS[(high[:, :, None] >> _SEVENS) & 0x7F]
    _fill_signed(codes, _codebooks()["iq2_xxs"][words[:, :, :4]], signs)
    scales[:] = half(blocks, 0) * (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.25)


def iq2_xs(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    words = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
    _fill_signed(codes, _codebooks()["iq2_xs"][words & 511], _EVEN_SIGNS[words >> 9])
    scales[:] = half(blocks, 0) * (np.float32(0.5) + _nibbles(blocks[:, 66:74])) * np.float32(0.25)


def iq2_s(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    top = ((blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3).reshape(-1, 32)
    entries = _codebooks()["iq2_s"][blocks[:, 2:34] | top.astype(np.uint16) << 8]
    _fill_signed(codes, entries, blocks[:, 34:66])
    scales[:] = half(blocks, 0) * (np.float32(0.5) + _nibbles(blocks[:, 74:82])) * np.float32(0.25)


def iq3_xxs(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    high = np.ascontiguousarray(blocks[:, 66:98]).view(np.uint32)
    signs = _EVEN_SIGNS[(high[:, :, None] >> _SEVENS) & 0x7F]
    _fill_signed(codes, _codebooks()["iq3_xxs"][blocks[:, 2:66]], signs)
    scales[:] = half(blocks, 0) * (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.5)


def iq3_s(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    top = ((blocks[:, 66:74, None] >> _BITS) & 1).reshape(-1, 64)
    entries = _codebooks()["iq3_s"][blocks[:, 2:66] | top.astype(np.uint16) << 8]
    _fill_signed(codes, entries, blocks[:, 74:106])
    scales[:] = half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:110]))


def _fill_eighths(codes: Bytes, entries: NDArray[np.int8], is_lower: NDArray[np.bool_]) -> None:
    """Write eight times the entries [n, 32, 8], plus or minus one."""
    eighths = entries * 8 + np.where(is_lower, -1, 1).astype(np.int8)[:, :, None]
    codes.view(np.int8)[:] = eighths.reshape(codes.shape)


def iq1_s(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    high = np.ascontiguousarray(blocks[:, 34:50]).view(np.uint16)
    top = ((high[:, :, None] >> _THREES) & 7).reshape(-1, 32) << 8
    is_lower = np.repeat(high >= 0x8000, 4, axis=1)
    _fill_eighths(codes, _codebooks()["iq1_s"][blocks[:, 2:34] | top], is_lower)
    scales[:] = half(blocks, 0) * (2 * ((high >> 12) & 7) + 1) / 8


def iq1_m(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    words = np.ascontiguousarray(blocks[:, 48:56]).view(np.uint16)
    quarters = (words & 0xF000) >> np.array([12, 8, 4, 0], dtype=np.uint16)
    factor = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    high = _nibbles(blocks[:, 32:48])
    entries = _codebooks()["iq1_s"][blocks[:, :32] | (high & 7).astype(np.uint16) << 8]
    _fill_eighths(codes, entries, (high & 8) != 0)
    steps = ((words[:, :, None] >> _THREES) & 7).reshape(-1, 16)
    scales[:] = factor * (2 * steps + 1) / 8


def iq4_nl(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    packed = blocks[:, 2:]
    codes.view(np.int8)[:] = _FOURTH_STEPS[np.concatenate([packed & 0xF, packed >> 4], axis=1)]
    scales[:] = half(blocks, 0)


def iq4_xs(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    by_group = blocks[:, 8:].reshape(-1, 8, 16)
    halves = np.concatenate([by_group & 0xF, by_group >> 4], axis=2)
    codes.view(np.int8)[:] = _FOURTH_STEPS[halves].reshape(codes.shape)
    top = (blocks[:, 2:4].view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    steps = (_nibbles(blocks[:, 4:8]) | (top << 4).astype(np.uint8)).astype(np.int8) - 32
    scales[:] = half(blocks, 0) * steps


def tq1_0(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    at = 0
    for start, width, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        digits = blocks[:, None, start : start + width] * _POWERS_OF_THREE[:count, None]
        size = width * count
        codes[:, at : at + size] = ((digits.astype(np.uint16) * 3) >> 8).reshape(-1, size)
        at += size
    scales[:] = half(blocks, 52)
    offsets[:] = -scales


def tq2_0(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    halves, by_shift = blocks[:, :64].reshape(-1, 2, 32), codes.reshape(-1, 2, 4, 32)
    for index in range(4):
        np.bitwise_and(halves >> (2 * index), 3, out=by_shift[:, :, index])
    scales[:] = half(blocks, 64)
    offsets[:] = -scales


def mxfp4(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    packed = blocks[:, 1:]
    codes.view(np.int8)[:] = _TINY_FLOATS[np.concatenate([packed & 0xF, packed >> 4], axis=1)]
    scales[:] = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)  # the codes are doubled


def nvfp4(blocks: Bytes, codes: Bytes, scales: Floats, offsets: Floats) -> None:
    by_group = blocks[:, 4:].reshape(-1, 4, 8)
    halves = np.concatenate([by_group & 0xF, by_group >> 4], axis=2)
    codes.view(np.int8)[:] = _TINY_FLOATS[halves].reshape(codes.shape)
    stored = blocks[:, :4].astype(np.int32)
    exponent, fraction = (stored >> 3) & 0xF, stored & 7
    normal = np.ldexp((1 + fraction / 8).astype(np.float32), exponent - 7)
    made: Any = np.where(exponent == 0, np.ldexp(fraction.astype(np.float32), -9), normal)
    scales[:] = np.where(stored == 0x7F, 0, made) / 2  # the codes are doubled
