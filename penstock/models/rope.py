"""Computes tables of rotary angles. Knows positions and frequencies, not heads or layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.models.config import RopeConfig, RopeScaling


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, divisors: Tensor | None = None) -> Tensor:
    """Return float32 [positions, D]: cosines, then sines.

    `divisors` [D / 2] are scaling worked out beforehand, as GGUF stores it; they replace `rope.scaling`.
    """
    # Angles of late positions need more digits than float32 has.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    amplitude = 1.0
    if divisors is not None:
        frequencies = frequencies / divisors.to(torch.float64).cpu()
    elif rope.scaling is not None:
        frequencies, amplitude = _scaled(frequencies, rope.theta, rope.scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return torch.cat([angles.cos() * amplitude, angles.sin() * amplitude], dim=1).to(torch.float32)


def _scaled(frequencies: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, theta, scaling)


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
        amplitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies * (1.0 - slowed + slowed / scaling.factor), amplitude


def _dimension_of(turns: float, half: int, theta: float, max_positions: int) -> float:
    """Return the (fractional) pair that makes `turns` full turns over `max_positions`."""
    return half * math.log(max_positions / (turns * 2 * math.pi)) / math.log(theta)
