"""Unpacks codes of a few bits from words of 32."""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor


def codes_in_unit(bits: int) -> int:
    """Return how many codes fill whole words."""
    return lcm(bits, 32) // bits


def words_in_unit(bits: int) -> int:
    """Return how many words these codes fill."""
    return lcm(bits, 32) // 32


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [n, w] → uint8 [n, w × 32 / bits], lowest bits first; position i of a word goes to place order[i]. Codes
    of three bits go on in the next word."""
    per_word = 32 // bits
    if 32 % bits:
        units = words.long().bitwise_and(0xFFFFFFFF).unflatten(1, (-1, words_in_unit(bits)))
        starts = [divmod(index * bits, 32) for index in range(codes_in_unit(bits))]
        split = [
            units[..., word] >> shift | (units[..., word + 1] << (32 - shift) if shift + bits > 32 else 0)
            for word, shift in starts
        ]
        return torch.stack(split, dim=-1).bitwise_and((1 << bits) - 1).to(torch.uint8).flatten(1)
    places = order or tuple(range(per_word))
    codes = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for index, place in enumerate(places):
        codes[..., place] = ((words >> (bits * index)) & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)
