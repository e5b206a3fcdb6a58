"""Computes tables of rotary angles. Knows positions and frequencies, not heads or layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import RopeConfig, RopeScaling, yarn_amplitude


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, divisors: Tensor | None = None) -> Tensor:
    """Return float32 [positions, D]: cosines, then sines. If only a part of a head is rotated, the angles of the rest
    are 0.

    `divisors` [rotated / 2] are scaling worked out beforehand, as GGUF stores it; they replace `rope.scaling`.
    """
    rotary_dim = rope.rotary_dim or head_dim
    # Angles of late positions need more digits than float32 has.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = rope.theta**-exponents
    amplitude = 1.0
    if divisors is not None:
        frequencies = frequencies / divisors.to(torch.float64).cpu()
    elif rope.scaling is not None:
        frequencies, amplitude = _scaled(frequencies, rope.theta, rope.scaling, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    unrotated = (head_dim - rotary_dim) // 2
    cosines = F.pad(angles.cos() * amplitude, (0, unrotated), value=1.0)
    sines = F.pad(angles.sin() * amplitude, (0, unrotated))
    return torch.cat([cosines, sines], dim=1).to(torch.float32)


def identity_table(head_dim: int, num_positions: int) -> Tensor:
    """Return a table that rotates nothing."""
    ones = torch.ones(num_positions, head_dim // 2)
    return torch.cat([ones, torch.zeros_like(ones)], dim=1)


def pair_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> Tensor:
    """Return the order of the numbers of a stored head that puts rotated pairs half a head apart, where kernels
    expect them: int64 [D]. A pair is stored as neighbours if `interleaved`, else half of the rotated part apart.
    Numbers that are not rotated fill the other places."""
    half, rotated, rest = head_dim // 2, rotary_dim // 2, (head_dim - rotary_dim) // 2
    stored = torch.arange(head_dim)
    pairs = stored[:rotary_dim].view(rotated, 2).T if interleaved else stored[:rotary_dim].view(2, rotated)
    unrotated = stored[rotary_dim:].view(2, rest)
    return torch.cat([pairs, unrotated], dim=1).reshape(2 * half)


def _scaled(
    frequencies: Tensor, theta: float, scaling: RopeScaling, num_positions: int
) -> tuple[Tensor, float]:
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "ntk":
        rotary_dim = 2 * len(frequencies)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return (theta * scaling.factor ** (rotary_dim / (rotary_dim - 2))) ** -exponents, 1.0
    if scaling.kind == "proportional":
        frequencies = frequencies / scaling.factor
        frequencies[scaling.rotated_pairs :] = 0.0
        return frequencies, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "longrope":
        return _longrope(frequencies, scaling, num_positions)
    return _yarn(frequencies, theta, scaling)


def _longrope(frequencies: Tensor, scaling: RopeScaling, num_positions: int) -> tuple[Tensor, float]:
    """Divide frequencies by one of two lists. Cached keys must not depend on the length of a request, so the context
    that the model was loaded for decides which list."""
    assert scaling.original_max_positions is not None
    is_long = num_positions > scaling.original_max_positions
    divisors = scaling.long_divisors if is_long else scaling.short_divisors
    if len(divisors) != len(frequencies):
        raise ModelLoadError(
            f"The rope settings list {len(divisors)} factors for {len(frequencies)} rotated pairs of a head."
        )
    amplitude = scaling.long_amplitude if is_long else scaling.short_amplitude
    if amplitude is None:
        amplitude = scaling.attention_factor
    if amplitude is None:
        stretch = math.log(max(1.0, scaling.factor)) / math.log(scaling.original_max_positions)
        amplitude = math.sqrt(1.0 + stretch)
    return frequencies / torch.tensor(divisors, dtype=torch.float64), amplitude


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies by Llama 3's rule: long waves by the factor, short waves not at all, the others blended."""
    assert scaling.original_max_positions is not None
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Scale frequencies by Yarn's rule: a blend that is linear in the dimension, and sharper attention."""
    assert scaling.original_max_positions is not None
    half = len(frequencies)
    low = _dimension_of(scaling.beta_fast, half, theta, scaling.original_max_positions)
    high = _dimension_of(scaling.beta_slow, half, theta, scaling.original_max_positions)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = (high - low) or 0.001
    slowed = ((torch.arange(half, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    amplitude = scaling.attention_factor
    if amplitude is None:
        amplitude = yarn_amplitude(scaling.factor)
    return frequencies * (1.0 - slowed + slowed / scaling.factor), amplitude


def _dimension_of(turns: float, half: int, theta: float, max_positions: int) -> float:
    """Return the (fractional) pair that makes `turns` full turns over `max_positions`."""
    return half * math.log(max_positions / (turns * 2 * math.pi)) / math.log(theta)
