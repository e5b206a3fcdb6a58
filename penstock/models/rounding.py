"""Rounds plain matrices to fewer bits: to the types that `--quantization` names, and to the forms in which
checkpoints hold quantized matrices."""

from __future__ import annotations

import torch

from penstock.core.engine_config import Quantization
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.models.stored_quantization import (
    AWQ,
    GPTQ,
    MXFP4,
    Compressed,
    Float4,
    Scaled,
    StoredQuantization,
)

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


def quantize_fp8(weight: DenseWeight, block: tuple[int, int] | None = None) -> WeightData:
    """float8 (e4m3) with a scale for each row, which takes the row's largest value to the format's largest; or with a
    scale for each block of this many outputs and inputs. A matrix that blocks do not fill stays as it is."""
    values = weight.values.to(torch.float32)
    if block is None:
        scales = values.abs().amax(dim=1).clamp_min(1e-12) / _LARGEST_FLOAT8
        return Float8Weight((values / scales.unsqueeze(1)).to(torch.float8_e4m3fn), scales)
    (rows, columns), (height, width) = weight.shape, block
    if rows % height or columns % width:
        return weight
    blocks = values.view(rows // height, height, columns // width, width)
    block_scales = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / _LARGEST_FLOAT8
    rounded = (blocks / block_scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return Float8Weight(rounded, block_scales.repeat_interleave(height, dim=0), width)


def quantize_float4(weight: DenseWeight) -> WeightData:
    """Float4 (e2m1) with a power of two for each 32 neighbours (MXFP4). A matrix whose rows are no multiple of that
    stays as it is."""
    rows, columns = weight.shape
    if columns % _GROUPS[0]:
        return weight
    grouped = weight.values.to(torch.float32).view(rows, columns // _GROUPS[0], _GROUPS[0])
    _, exponents = torch.frexp(grouped.abs().amax(dim=2).clamp_min(1e-30))
    scales = torch.exp2(exponents - 4.0)  # the largest double lies between 8 and 16
    doubles = grouped / scales.unsqueeze(2)
    sizes = doubles.abs()
    steps = torch.where(sizes >= 8, 4.0, torch.where(sizes >= 4, 2.0, 1.0))
    codes = ((sizes / steps).round_() * steps).clamp_(max=12).copysign_(doubles).to(torch.int8)
    return GroupQuantWeight(codes.view(rows, columns), scales, None, _GROUPS[0], 8, is_float4=True)


def quantize_int4(weight: DenseWeight, group: int = _INT4_GROUP) -> WeightData:
    """Round to four bits with a scale and an offset for each `group` neighbours. A matrix whose rows are no multiple
    of that stays as it is."""
    rows, columns = weight.shape
    if columns % group:
        return weight
    grouped = weight.values.to(torch.float32).view(rows, columns // group, group)
    lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)
    scales = (highest - lowest) / 15
    divisors = torch.where(scales == 0, 1.0, scales)
    codes = ((grouped - lowest.unsqueeze(2)) / divisors.unsqueeze(2)).round_().to(torch.uint8)
    return GroupQuantWeight(codes.view(rows, columns), scales, lowest, group, 4)


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


def as_stored(kind: StoredQuantization, name: str, weight: DenseWeight) -> WeightData:
    """Round random values to the form that a checkpoint of this kind has for the matrix."""
    if not name.startswith("model.layers.") or name.endswith(".mlp.gate.weight"):
        return weight
    match kind:
        case MXFP4():
            return quantize_float4(weight) if ".experts." in name else weight
        case Scaled(block=block) | Compressed(scaled=Scaled(block=block), bits=8):
            return quantize_fp8(weight, block)
        case GPTQ(bits=8):
            return quantize_int8(weight)
        case AWQ(group=group) | GPTQ(group=group):
            return quantize_int4(weight, group or weight.shape[1])
        case Compressed():
            return quantize_int4(weight)
        case Float4():
            return quantize_float4(weight)
    return weight
