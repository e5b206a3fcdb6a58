"""Rounds dense weights to fewer bits while they are loaded."""

from __future__ import annotations

import torch

from penstock.core.engine_config import Quantization
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData

_GROUPS = (32, 16)
_INT4_GROUP = 128
_LARGEST_FLOAT8 = 448.0


def quantize(weight: DenseWeight, method: Quantization) -> WeightData:
    match method:
        case "int8":
            return quantize_int8(weight)
        case "int4":
            return quantize_int4(weight)
        case "fp8":
            return quantize_fp8(weight)


def quantize_fp8(weight: DenseWeight) -> Float8Weight:
    """float8 (e4m3) with a scale for each row, which takes the row's largest value to the format's largest."""
    values = weight.values.to(torch.float32)
    scales = values.abs().amax(dim=1).clamp_min(1e-12) / _LARGEST_FLOAT8
    return Float8Weight((values / scales.unsqueeze(1)).to(torch.float8_e4m3fn), scales)


def quantize_int4(weight: DenseWeight) -> WeightData:
    """Four bits with a scale and an offset for each 128 neighbours; a matrix whose rows do not divide so stays."""
    rows, columns = weight.shape
    if columns % _INT4_GROUP:
        return weight
    grouped = weight.values.to(torch.float32).view(rows, columns // _INT4_GROUP, _INT4_GROUP)
    lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)
    scales = (highest - lowest) / 15
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = ((grouped - lowest.unsqueeze(2)) / divisors.unsqueeze(2)).round_().to(torch.uint8)
    return GroupQuantWeight(codes.view(rows, columns), scales, lowest, _INT4_GROUP, 4)


def quantize_int8(weight: DenseWeight) -> WeightData:
    """Symmetric int8 with a float32 scale for each 32 neighbours (16, where rows are no multiple of 32).

    A matrix whose rows are a multiple of neither stays as it is.
    """
    rows, columns = weight.shape
    group = next((size for size in _GROUPS if columns % size == 0), None)
    if group is None:
        return weight
    grouped = weight.values.to(torch.float32).view(rows, columns // group, group)
    scales = grouped.abs().amax(dim=2) / 127
    # A group of zeros has scale 0; any divisor gives it codes of 0.
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = (grouped / divisors.unsqueeze(2)).round_().to(torch.int8).view(rows, columns)
    return GroupQuantWeight(codes, scales, None, group, 8)
