"""Round-to-nearest quantization of dense weights while they are loaded."""

from __future__ import annotations

import torch

from penstock.kernels.interface import DenseWeight, GroupQuantWeight, WeightData

_GROUPS = (32, 16)


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
