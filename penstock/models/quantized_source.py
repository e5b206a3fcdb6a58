"""Reads quantized weights of Hugging Face folders, as published by AWQ, GPTQ, float8 and compressed-tensors. Knows no
architecture.

Each layout is decoded, without loss, to the forms of `kernels.interface`. A matrix is quantized where its tensors say
so (`qweight`, `weight_packed`, or a `weight_scale` beside it) and plain everywhere else; lists of exceptions in the
settings need not be read.

Where a checkpoint was made for int8 activations, the weight says so, and a backend may round them. Scales of
activations that a checkpoint has (`input_scale`) are not read: each row gets its own scale.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.stored_quantization import AWQ, GPTQ, Compressed, Scaled, StoredQuantization
from penstock.models.weight_parts import Part, take_columns, take_part
from penstock.models.weights import Stacked

# Nibble i of a word holds the output AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SMALLEST_GROUP = 16
BARE_SCALE = "scale"  # the name of scales beside float8 and float4 matrices in DeepSeek V4's folders


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    columns: int


class Axis(NamedTuple):
    """A dimension of a stored tensor, and the part that is read."""

    size: int
    span: range


class QuantizedSource:
    def __init__(self, files: SafetensorsSource, kind: StoredQuantization) -> None:
        self.files = files
        self._kind = kind
        self._names = files.names()

    def names(self) -> frozenset[str]:
        return self._names

    @property
    def bytes_read(self) -> int:
        return self.files.bytes_read

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        return self.files.vector(name, size, part)

    def indices(self, name: str, rows: int, columns: int) -> Tensor:
        return self.files.indices(name, rows, columns)

    def is_quantized(self, name: str) -> bool:
        stem = name.removesuffix(".weight")
        beside = (
            "qweight",
            "weight_packed",
            "weight_scale",
            "weight_scale_inv",
            "SCB",
            "weight.absmax",
            "W_q",
        )
        return any(f"{stem}.{each}" in self._names for each in beside)

    def shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a quantized matrix, as its tensors show them."""
        stem = name.removesuffix(".weight")
        shape = self.files.shape
        match self._kind:
            case AWQ() if f"{stem}.qweight" in self._names:
                return shape(f"{stem}.scales")[-1], shape(f"{stem}.qweight")[
                    0
                ]  # the last word may not be full
            case GPTQ(bits=bits) if f"{stem}.qweight" in self._names:
                words, rows = shape(f"{stem}.qweight")
                return rows, words * 32 // bits
        if f"{stem}.weight_shape" in self._names:
            rows, columns = self.files.tensor(f"{stem}.weight_shape", (2,)).tolist()
        else:
            rows, columns = shape(name)
        return rows, columns

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        stem = name.removesuffix(".weight")
        shape = Shape(rows, columns)
        wanted = part or Part(range(rows), range(columns))
        match self._kind:
            case AWQ() as kind if f"{stem}.qweight" in self._names:
                return self._awq(stem, shape, kind, wanted)
            case GPTQ() as kind if f"{stem}.qweight" in self._names:
                return self._gptq(stem, shape, kind, wanted)
            case Compressed() as kind if f"{stem}.weight_packed" in self._names:
                return self._packed(stem, shape, kind, wanted)
            case Compressed(scaled=kind) | (Scaled() as kind):
                scales = [
                    each
                    for each in (f"{stem}.weight_scale", f"{stem}.weight_scale_inv", f"{stem}.{BARE_SCALE}")
                    if each in self._names
                ]
                if scales:
                    return self._scaled(name, scales[0], shape, kind, wanted)
        return self.files.matrix(name, rows, columns, part)

    def _awq(self, stem: str, shape: Shape, kind: AWQ, part: Part) -> WeightData:
        group = min(kind.group or shape.columns, shape.columns)  # the last group may be smaller
        window = _window(part, shape, 8, group)
        groups = _axis(window.columns, shape.columns, group)
        words = _axis(window.rows, shape.rows, 8)
        packed = self._words(f"{stem}.qweight", _axis(window.columns, shape.columns), words)
        zeros = self._words(f"{stem}.qzeros", groups, words)
        scales = self._scales(f"{stem}.scales", groups, _axis(window.rows, shape.rows)).T
        codes = unpack(packed, 4, AWQ_ORDER)[:, : len(window.rows)].T
        points = unpack(zeros, 4, AWQ_ORDER)[:, : len(window.rows)].T
        return _taken(grouped_weight(codes, scales, points, group, bits=4), window, part)

    def _gptq(self, stem: str, shape: Shape, kind: GPTQ, part: Part) -> WeightData:
        group = min(kind.group or shape.columns, shape.columns)  # the last group may be smaller
        unit = codes_in_unit(kind.bits)
        if kind.has_order and f"{stem}.g_idx" not in self._names:
            raise ModelLoadError(f"{stem} has no g_idx, which desc_act in the settings asks for.")
        order = self._input_order(f"{stem}.g_idx", shape.columns, group)
        window = _window(part, shape, unit, shape.columns if order is not None else lcm(group, unit))
        rows = _axis(window.rows, shape.rows)
        groups = _axis(window.columns, shape.columns, group)
        packed = self._words(f"{stem}.qweight", _words_axis(window.columns, shape.columns, kind.bits), rows)
        zeros = self._words(f"{stem}.qzeros", groups, _words_axis(window.rows, shape.rows, kind.bits))
        scales = self._scales(f"{stem}.scales", groups, rows).T
        codes = unpack(packed.T, kind.bits)[:, : len(window.columns)]
        points = unpack(zeros, kind.bits)[:, : len(window.rows)].T.int() + kind.zero_bias
        if order is not None:
            codes = codes[:, order]
        kept: Literal[4, 8] = 8 if kind.bits == 8 else 4  # fewer bits than four take as much room as four
        return _taken(grouped_weight(codes, scales, points, group, kept, order), window, part)

    def _packed(self, stem: str, shape: Shape, kind: Compressed, part: Part) -> WeightData:
        num_words = self.files.shape(f"{stem}.weight_packed")[-1]
        bits: Literal[4, 8] = 8 if num_words == _ceil(shape.columns, 4) else 4
        per_word = 32 // bits
        all_scales, group = self._grouped_scales(stem, shape, kind.groups)
        order = self._input_order(f"{stem}.weight_g_idx", shape.columns, group)
        window = _window(part, shape, per_word, shape.columns if order is not None else lcm(group, per_word))
        rows = _axis(window.rows, shape.rows)
        groups = _axis(window.columns, shape.columns, group)
        scales = _within(all_scales, window.rows, groups.span)
        packed = self._words(f"{stem}.weight_packed", rows, _axis(window.columns, shape.columns, per_word))
        codes = unpack(packed, bits)[:, : len(window.columns)]
        if f"{stem}.weight_zero_point" in self._names:
            words = _axis(window.rows, shape.rows, per_word)
            zeros = self._words(f"{stem}.weight_zero_point", words, groups)
            points = unpack(zeros.T, bits)[:, : len(window.rows)].T
        else:
            points = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
        if order is not None:
            codes = codes[:, order]
        return _taken(grouped_weight(codes, scales, points, group, bits, order), window, part)

    def _grouped_scales(self, stem: str, shape: Shape, groups: Set[int]) -> tuple[Tensor, int]:
        """Return the scales of a matrix and the inputs that share one: of `groups`, the one that gives as many scales
        as there are. The last group may be smaller."""
        scales = self._scales(f"{stem}.weight_scale")
        if scales.numel() == 0 or scales.numel() % shape.rows:
            raise ModelLoadError(f"{stem} of {shape.rows} rows has {scales.numel()} scales.")
        scales = scales.reshape(shape.rows, -1)
        count = scales.shape[1]
        if count == 1:
            return scales, shape.columns
        fitting = sorted(size for size in groups if _ceil(shape.columns, size) == count)
        if fitting:
            return scales, fitting[-1]
        return scales, self._group(stem, shape, _ceil(shape.columns, count))

    def _scaled(self, name: str, scale_name: str, shape: Shape, kind: Scaled, part: Part) -> WeightData:
        values = self._read(name, _axis(part.rows, shape.rows), _axis(part.columns, shape.columns))
        scales = self._scales(scale_name)
        if values.dtype == torch.float8_e4m3fn:
            if isinstance(self._kind, Compressed) and kind.block is None and _is_grouped(scales, shape):
                _, group = self._grouped_scales(name.removesuffix(".weight"), shape, self._kind.groups)
                kind = Scaled((1, group))
            return _float8(name, values, scales, shape, kind, part)
        if values.dtype != torch.int8:
            raise ModelLoadError(
                f"{name} has scales beside it, but is in {values.dtype}, which cannot be read."
            )
        own = slice(part.rows.start, part.rows.stop)
        zero_name = name.removesuffix(".weight") + ".weight_zero_point"
        if isinstance(self._kind, Compressed) and _is_grouped(scales, shape):
            return self._scaled_groups(name, zero_name, shape, self._kind, part)
        scales = _row_scales(scales, shape, name)[own].view(-1, 1)
        offsets = None
        if zero_name in self._names:
            zeros = _row_scales(self.files.tensor(zero_name).float(), shape, zero_name)
            offsets = -zeros[own].view(-1, 1) * scales
        rounds_inputs = isinstance(self._kind, Compressed) and self._kind.rounds_inputs and offsets is None
        return _fitting(
            GroupQuantWeight(values, scales, offsets, len(part.columns), 8, rounds_inputs=rounds_inputs)
        )

    def _scaled_groups(
        self, name: str, zero_name: str, shape: Shape, kind: Compressed, part: Part
    ) -> WeightData:
        """Read plain int8 codes with scales for groups of inputs."""
        scales, group = self._grouped_scales(name.removesuffix(".weight"), shape, kind.groups)
        codes = self._read(name, _axis(part.rows, shape.rows), _axis(range(shape.columns), shape.columns))
        own = slice(part.rows.start, part.rows.stop)
        points = torch.full_like(scales, 128)
        if zero_name in self._names:
            points += self.files.tensor(zero_name, tuple(scales.shape))
        weight = grouped_weight(codes.int() + 128, scales[own], points[own], group, 8)
        return take_columns(weight, part.columns)

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> WeightData:
        return self.files.stacked_matrix(place, rows, columns, part)

    def _input_order(self, name: str, columns: int, group: int) -> Tensor | None:
        """Return the order of inputs by their groups; None when neighbours are together, as without act-order."""
        if name not in self._names:
            return None
        groups = self.files.tensor(name, (columns,)).long()
        if torch.equal(groups, torch.arange(columns) // group):
            return None
        sizes = torch.bincount(torch.arange(columns) // group)
        if groups.min() < 0 or not torch.equal(torch.bincount(groups.clamp_min(0)), sizes):
            raise ModelLoadError(f"{name} does not share out its {columns} inputs in groups of {group}.")
        return torch.argsort(groups, stable=True)

    def _group(self, stem: str, shape: Shape, group: int | None) -> int:
        group = shape.columns if group is None else group
        if shape.columns % group:
            raise ModelLoadError(f"{stem} has {shape.columns} inputs, which groups of {group} do not divide.")
        return group

    def _read(self, name: str, *axes: Axis) -> Tensor:
        sizes, spans = tuple(axis.size for axis in axes), tuple(axis.span for axis in axes)
        is_whole = all(len(axis.span) == axis.size for axis in axes)
        return self.files.tensor(name, sizes, None if is_whole else spans)

    def _words(self, name: str, *axes: Axis) -> Tensor:
        words = self._read(name, *axes)
        if words.dtype != torch.int32:
            raise ModelLoadError(f"{name} is in {words.dtype}; codes are packed in int32.")
        return words

    def _scales(self, name: str, *axes: Axis) -> Tensor:
        """Return scales in float32: all of them, or a part. Exponents of two may be bytes with a bias of 127."""
        scales = self._read(name, *axes) if axes else self.files.tensor(name)
        if scales.dtype == torch.uint8 and isinstance(self._kind, Scaled | Compressed):
            return torch.exp2(scales.float() - 127)
        if not scales.is_floating_point():
            raise ModelLoadError(f"{name} has scales in {scales.dtype}, which cannot be read.")
        return scales.float()


def _window(part: Part, shape: Shape, row_unit: int, column_unit: int) -> Part:
    """Return the smallest range that holds `part` and divides no word and no group."""
    return Part(_widened(part.rows, shape.rows, row_unit), _widened(part.columns, shape.columns, column_unit))


def _widened(span: range, size: int, unit: int) -> range:
    return range(span.start // unit * unit, min(size, _ceil(span.stop, unit) * unit))


def _axis(span: range, size: int, unit: int = 1) -> Axis:
    """Return the axis of a tensor that stores `unit` neighbours as one."""
    return Axis(_ceil(size, unit), range(span.start // unit, _ceil(span.stop, unit)))


def _taken(weight: WeightData, window: Part, part: Part) -> WeightData:
    """Cut `part` of the whole matrix out of its `window`."""
    rows = range(part.rows.start - window.rows.start, part.rows.stop - window.rows.start)
    columns = range(part.columns.start - window.columns.start, part.columns.stop - window.columns.start)
    return take_part(weight, Part(rows, columns))


def _within(table: Tensor, rows: range, columns: range) -> Tensor:
    return table[rows.start : rows.stop, columns.start : columns.stop]


def _float8(name: str, values: Tensor, scales: Tensor, shape: Shape, kind: Scaled, part: Part) -> WeightData:
    """Build a float8 weight from the `values` of the part and the `scales` of the whole matrix."""
    if kind.block is None or scales.numel() in (1, shape.rows):
        return Float8Weight(values, _row_scales(scales, shape, name)[part.rows.start : part.rows.stop])
    height, width = kind.block
    if tuple(scales.shape) != (_ceil(shape.rows, height), _ceil(shape.columns, width)):
        raise ModelLoadError(
            f"The scales of {name} are {list(scales.shape)}, which blocks of {height} × {width} do not give."
        )
    by_row = scales.repeat_interleave(height, dim=0)
    if part.columns.start % width == 0 and part.columns.stop % width == 0:
        groups = _axis(part.columns, shape.columns, width).span
        return Float8Weight(values, _within(by_row, part.rows, groups).contiguous(), width)
    by_value = by_row.repeat_interleave(width, dim=1)
    return DenseWeight(values.float() * _within(by_value, part.rows, part.columns))


def grouped_weight(
    codes: Tensor,
    scales: Tensor,
    points: Tensor,
    group: int,
    bits: Literal[4, 8],
    order: Tensor | None = None,
) -> WeightData:
    """Build the weight (codes - points) * scales from unsigned codes [out, in] and zero points [out, in / group]. The
    last group may be smaller than the others."""
    columns, middle = codes.shape[1], 0
    if columns % group:
        size = gcd(columns, group)
        scales, points = (
            each.repeat_interleave(group // size, dim=1)[:, : columns // size] for each in (scales, points)
        )
        group = size
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
    """Return the weight in groups that every backend takes, 16 or a multiple of 32; otherwise unpacked."""
    if weight.group == _SMALLEST_GROUP or weight.group % (2 * _SMALLEST_GROUP) == 0:
        return weight
    if weight.group % _SMALLEST_GROUP == 0:
        return weight.regrouped(_SMALLEST_GROUP)
    return DenseWeight(weight.dequantize())


def _is_grouped(scales: Tensor, shape: Shape) -> bool:
    """Return whether each row has several scales."""
    return scales.dim() == 2 and scales.shape[0] == shape.rows and scales.shape[1] > 1


def _row_scales(scales: Tensor, shape: Shape, name: str) -> Tensor:
    """Return one scale for each row, from one for each row or one for all."""
    flat = scales.flatten()
    if flat.numel() == 1:
        return flat.expand(shape.rows).contiguous()
    if flat.numel() != shape.rows:
        raise ModelLoadError(
            f"{name} of {shape.rows} rows has {flat.numel()} scales, neither one for each nor one."
        )
    return flat


def _words_axis(span: range, size: int, bits: int) -> Axis:
    """Return the axis of a tensor of words that hold these codes."""
    units, per_unit = _axis(span, size, codes_in_unit(bits)), words_in_unit(bits)
    return Axis(units.size * per_unit, range(units.span.start * per_unit, units.span.stop * per_unit))


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)


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
