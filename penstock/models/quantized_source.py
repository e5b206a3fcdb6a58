"""Weights of quantized Hugging Face checkpoints as published: AWQ, GPTQ, float8, compressed-tensors.

Each layout is decoded, without loss, to the forms of `kernels.interface`. A matrix is quantized where its tensors say
so (`qweight`, `weight_packed`, or a `weight_scale` beside it) and plain everywhere else; lists of exceptions in the
settings need not be read.

Activations are not quantized on the word of a checkpoint: what it says of them (`input_scale`, dynamic tokens) is for
backends that multiply in eight bits, and every backend here may choose by its own measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.stored_quantization import AWQ, GPTQ, Compressed, Scaled, StoredQuantization

# Nibble i of a word holds the output AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SMALLEST_GROUP = 16


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    columns: int


class QuantizedSource:
    def __init__(self, files: SafetensorsSource, kind: StoredQuantization) -> None:
        self._files = files
        self._kind = kind
        self._names = files.names()

    def names(self) -> frozenset[str]:
        return self._names

    def matrix(self, name: str, rows: int, columns: int) -> WeightData:
        stem = name.removesuffix(".weight")
        shape = Shape(rows, columns)
        match self._kind:
            case AWQ() as kind if f"{stem}.qweight" in self._names:
                return self._awq(stem, shape, kind)
            case GPTQ() as kind if f"{stem}.qweight" in self._names:
                return self._gptq(stem, shape, kind)
            case Compressed() as kind if f"{stem}.weight_packed" in self._names:
                return self._packed(stem, shape, kind)
            case Compressed(scaled=kind) | (Scaled() as kind):
                scales = [
                    each
                    for each in (f"{stem}.weight_scale", f"{stem}.weight_scale_inv")
                    if each in self._names
                ]
                if scales:
                    return self._scaled(name, scales[0], shape, kind)
        return self._files.matrix(name, rows, columns)

    def vector(self, name: str, size: int) -> Tensor:
        return self._files.vector(name, size)

    def _awq(self, stem: str, shape: Shape, kind: AWQ) -> WeightData:
        group = self._group(stem, shape, kind.group)
        words = _ceil(shape.rows, 8)
        packed = self._read(f"{stem}.qweight", (shape.columns, words))
        zeros = self._read(f"{stem}.qzeros", (shape.columns // group, words))
        scales = self._read(f"{stem}.scales", (shape.columns // group, shape.rows)).float().T
        codes = _unpack(packed, 4, AWQ_ORDER)[:, : shape.rows].T
        points = _unpack(zeros, 4, AWQ_ORDER)[:, : shape.rows].T
        return grouped_weight(codes, scales, points, group, bits=4)

    def _gptq(self, stem: str, shape: Shape, kind: GPTQ) -> WeightData:
        group = self._group(stem, shape, kind.group)
        per_word = 32 // kind.bits
        packed = self._read(f"{stem}.qweight", (_ceil(shape.columns, per_word), shape.rows))
        zeros = self._read(f"{stem}.qzeros", (shape.columns // group, _ceil(shape.rows, per_word)))
        scales = self._read(f"{stem}.scales", (shape.columns // group, shape.rows)).float().T
        codes = _unpack(packed.T, kind.bits)[:, : shape.columns]
        points = _unpack(zeros, kind.bits)[:, : shape.rows].T.int() + kind.zero_bias
        order = None
        if f"{stem}.g_idx" in self._names:
            order = self._input_order(f"{stem}.g_idx", shape.columns, group)
        if order is not None:
            codes = codes[:, order]
        return grouped_weight(codes, scales, points, group, kind.bits, order)

    def _packed(self, stem: str, shape: Shape, kind: Compressed) -> WeightData:
        per_word = 32 // kind.bits
        packed = self._read(f"{stem}.weight_packed", (shape.rows, _ceil(shape.columns, per_word)))
        scales = self._files.tensor(f"{stem}.weight_scale").float().reshape(shape.rows, -1)
        group = self._group(stem, shape, _ceil(shape.columns, scales.shape[1]))
        codes = _unpack(packed, kind.bits)[:, : shape.columns]
        if f"{stem}.weight_zero_point" in self._names:
            zeros = self._read(
                f"{stem}.weight_zero_point", (_ceil(shape.rows, per_word), shape.columns // group)
            )
            points = _unpack(zeros.T, kind.bits)[:, : shape.rows].T
        else:
            points = torch.full_like(scales, 1 << (kind.bits - 1), dtype=torch.uint8)
        order = None
        if f"{stem}.weight_g_idx" in self._names:
            order = self._input_order(f"{stem}.weight_g_idx", shape.columns, group)
        if order is not None:
            codes = codes[:, order]
        return grouped_weight(codes, scales, points, group, kind.bits, order)

    def _scaled(self, name: str, scale_name: str, shape: Shape, kind: Scaled) -> WeightData:
        values = self._read(name, (shape.rows, shape.columns))
        scales = self._files.tensor(scale_name).float()
        if values.dtype == torch.float8_e4m3fn:
            return self._float8(name, values, scales, kind)
        if values.dtype != torch.int8:
            raise ModelLoadError(
                f"{name} has scales beside it, but is in {values.dtype}, which cannot be read."
            )
        scales = _row_scales(scales, shape, name).view(-1, 1)
        zero_name = name.removesuffix(".weight") + ".weight_zero_point"
        offsets = None
        if zero_name in self._names:
            offsets = (
                -_row_scales(self._files.tensor(zero_name).float(), shape, zero_name).view(-1, 1) * scales
            )
        return _fitting(GroupQuantWeight(values, scales, offsets, shape.columns, 8))

    def _float8(self, name: str, values: Tensor, scales: Tensor, kind: Scaled) -> WeightData:
        shape = Shape(*values.shape)
        if kind.block is None or scales.numel() in (1, shape.rows):
            return Float8Weight(values, _row_scales(scales, shape, name))
        height, width = kind.block
        if tuple(scales.shape) != (_ceil(shape.rows, height), _ceil(shape.columns, width)):
            raise ModelLoadError(
                f"The scales of {name} are {list(scales.shape)}, which blocks of {height} × {width} do not give."
            )
        by_row = scales.repeat_interleave(height, dim=0)[: shape.rows]
        if shape.columns % width == 0:
            return Float8Weight(values, by_row.contiguous(), width)
        by_value = by_row.repeat_interleave(width, dim=1)[:, : shape.columns]
        return DenseWeight(values.float() * by_value)

    def _input_order(self, name: str, columns: int, group: int) -> Tensor | None:
        """From the group of each input. None where neighbours are together, as they are without act-order."""
        groups = self._read(name, (columns,)).long()
        if torch.equal(groups, torch.arange(columns) // group):
            return None
        counts = torch.bincount(groups.clamp_min(0), minlength=columns // group)
        if groups.min() < 0 or not bool((counts == group).all()):
            raise ModelLoadError(f"{name} does not share out its {columns} inputs in groups of {group}.")
        return torch.argsort(groups, stable=True)

    def _group(self, stem: str, shape: Shape, group: int | None) -> int:
        group = shape.columns if group is None else group
        if shape.columns % group:
            raise ModelLoadError(f"{stem} has {shape.columns} inputs, which groups of {group} do not divide.")
        return group

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._files.tensor(name, shape)


def grouped_weight(
    codes: Tensor,
    scales: Tensor,
    points: Tensor,
    group: int,
    bits: Literal[4, 8],
    order: Tensor | None = None,
) -> WeightData:
    """(codes - points) * scales, of unsigned codes [out, in] and zero points [out, in / group]."""
    middle = 0
    if bits == 8:
        middle = 128
        codes = (codes.int() - middle).to(torch.int8)
    # Adding 0 turns the -0 of a point in the middle into 0.
    offsets: Tensor | None = (middle - points.float()) * scales + 0.0
    if offsets is not None and not offsets.any():
        offsets = None
    return _fitting(
        GroupQuantWeight(
            codes.contiguous(),
            scales.contiguous(),
            None if offsets is None else offsets.contiguous(),
            group,
            bits,
            order,
        )
    )


def _fitting(weight: GroupQuantWeight) -> WeightData:
    """In groups that every backend takes: 16 or a multiple of 32, and otherwise unpacked."""
    if weight.group == _SMALLEST_GROUP or weight.group % (2 * _SMALLEST_GROUP) == 0:
        return weight
    if weight.group % _SMALLEST_GROUP == 0:
        return weight.regrouped(_SMALLEST_GROUP)
    return DenseWeight(weight.dequantize())


def _row_scales(scales: Tensor, shape: Shape, name: str) -> Tensor:
    """One for each row, from one for each row or one for all."""
    flat = scales.flatten()
    if flat.numel() == 1:
        return flat.expand(shape.rows).contiguous()
    if flat.numel() != shape.rows:
        raise ModelLoadError(
            f"{name} of {shape.rows} rows has {flat.numel()} scales, neither one for each nor one."
        )
    return flat


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [n, w] → uint8 [n, w × 32 / bits], lowest bits first; position i of a word goes to place order[i]."""
    per_word = 32 // bits
    places = order or tuple(range(per_word))
    codes = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for index, place in enumerate(places):
        codes[..., place] = ((words >> (bits * index)) & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)
