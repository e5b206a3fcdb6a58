"""The layouts that `penstock quantize` writes. All are published layouts, which `quantized_source.py` reads.

A method rounds one matrix to the tensors of its layout. Knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.tensor_kv import to_codes
from penstock.models.quantized_source import AWQ_ORDER

MethodName = Literal["fp8", "int8", "w8a8", "int4", "int4-awq"]

_LARGEST_FLOAT8 = 448.0
_SMALLEST_SCALE = 6e-8  # the least that float16 holds


@dataclass(frozen=True, slots=True)
class Rounded:
    codes: Tensor  # uint8 [out, in]
    scales: Tensor  # float16 [out, in / group]
    zeros: Tensor  # uint8 [out, in / group]

    def dequantize(self) -> Tensor:
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, self.scales.shape[1], -1).float() - self.zeros.unsqueeze(2).float()
        return (grouped * self.scales.unsqueeze(2).float()).view(rows, columns)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to quantize. `encode(weight, group)` returns the tensors of a matrix by the ends of their names."""

    name: MethodName
    has_groups: bool
    encode: Callable[[Tensor, int], dict[str, Tensor]]
    settings: Callable[
        [int, list[str]], dict[str, Any]
    ]  # `quantization_config`, from the group and plain layers


def round_to_groups(weight: Tensor, group: int, bits: Literal[4, 8], *, symmetric: bool) -> Rounded:
    """Round to nearest, with one scale and one zero point for each `group` neighbours of a row."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    top = (1 << bits) - 1
    if symmetric:
        middle = 1 << (bits - 1)
        scales = grouped.abs().amax(dim=2) / (middle - 1)
        scales = scales.clamp_min(_SMALLEST_SCALE).half()
        zeros = torch.full_like(scales, middle, dtype=torch.float32)
    else:
        lowest, highest = grouped.amin(dim=2).clamp_max(0), grouped.amax(dim=2).clamp_min(0)
        scales = ((highest - lowest) / top).clamp_min(_SMALLEST_SCALE).half()
        zeros = (-lowest / scales.float()).round_().clamp_(0, top)
    codes = (grouped / scales.float().unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, top)
    return Rounded(codes.view(rows, columns).to(torch.uint8), scales, zeros.to(torch.uint8))


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 [n, w] → int32 [n, w × bits / 32], lowest bits first, padded with zeros to whole words; position i of a
    word takes the code at place order[i]."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    by_word = padded.view(codes.shape[0], -1, per_word)
    words = torch.zeros(by_word.shape[:2], dtype=torch.int32)
    for index, place in enumerate(order or range(per_word)):
        words |= by_word[:, :, place].to(torch.int32) << (bits * index)
    return words


def _encode_fp8(weight: Tensor, group: int) -> dict[str, Tensor]:
    values = weight.float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LARGEST_FLOAT8
    return {"weight": (values / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _encode_rows(weight: Tensor, group: int) -> dict[str, Tensor]:
    codes, scales = to_codes(weight)
    return {"weight": codes, "weight_scale": scales.unsqueeze(1)}


def _encode_packed(weight: Tensor, group: int, bits: Literal[4, 8]) -> dict[str, Tensor]:
    """Pack integers as compressed-tensors does. Four bits have zero points, eight bits have none."""
    rounded = round_to_groups(weight, group, bits, symmetric=bits == 8)
    tensors = {
        "weight_packed": pack_words(rounded.codes, bits),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if bits == 4:
        tensors["weight_zero_point"] = pack_words(rounded.zeros.T.contiguous(), bits).T.contiguous()
    return tensors


def _encode_awq(weight: Tensor, group: int) -> dict[str, Tensor]:
    rounded = round_to_groups(weight, group, 4, symmetric=False)
    return {
        "qweight": pack_words(rounded.codes.T.contiguous(), 4, AWQ_ORDER),
        "qzeros": pack_words(rounded.zeros.T.contiguous(), 4, AWQ_ORDER),
        "scales": rounded.scales.T.contiguous(),
    }


def _compressed_settings(layout: str, weights: dict[str, Any], plain: list[str]) -> dict[str, Any]:
    described: dict[str, Any] = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}}
    if weights["strategy"] == "channel":
        described["input_activations"] = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": described},
        "ignore": plain,
    }


def _fp8_settings(group: int, plain: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return _compressed_settings("float-quantized", weights, plain)


def _rows_settings(group: int, plain: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return _compressed_settings("int-quantized", weights, plain)


def _packed_settings(bits: int) -> Callable[[int, list[str]], dict[str, Any]]:
    def settings(group: int, plain: list[str]) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": bits == 8,
            "strategy": "group",
            "group_size": group,
        }
        return _compressed_settings("pack-quantized", weights, plain)

    return settings


def _awq_settings(group: int, plain: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": plain,
    }


METHODS: dict[str, Method] = {
    "fp8": Method("fp8", False, _encode_fp8, _fp8_settings),
    "int8": Method("int8", True, lambda weight, group: _encode_packed(weight, group, 8), _packed_settings(8)),
    "w8a8": Method("w8a8", False, _encode_rows, _rows_settings),
    "int4": Method("int4", True, lambda weight, group: _encode_packed(weight, group, 4), _packed_settings(4)),
    "int4-awq": Method("int4-awq", True, _encode_awq, _awq_settings),
}
