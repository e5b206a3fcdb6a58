"""Reads weights from Hugging Face folders: one `model.safetensors`, shards with an index, or files of other names,
plain or quantized as published by AWQ, GPTQ, float8 and compressed-tensors. Knows no architecture.

Each layout is decoded, without loss, to the forms of `kernels.interface`. A matrix is quantized where its tensors say
so (`qweight`, `weight_packed`, or a `weight_scale` beside it) and plain everywhere else; lists of exceptions in the
settings need not be read.

Where a checkpoint was made for int8 activations, the weight says so, and a backend may round them. Scales of
activations that a checkpoint has (`input_scale`) are not read: each row gets its own scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.models.packed_codes import codes_in_unit, unpack, words_in_unit
from penstock.models.read_ahead import ReadAhead
from penstock.models.stored_quantization import AWQ, GPTQ, Compressed, Scaled, StoredQuantization
from penstock.models.weight_parts import Part, take_part
from penstock.models.weights import Stacked

_LEAST_MAPPED = 16 << 20  # bytes
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


def _text_name(name: str) -> str:
    """Return the name of a tensor of a text model as it is in a checkpoint of the text model alone."""
    name = name.removeprefix("thinker.")  # of models that also speak
    return name.replace("model.text_model.", "model.", 1).replace("language_model.", "", 1)


class SafetensorsSource:
    """Reads tensors from disk when asked for. One file at a time is open and mapped. Its mapping is let go and made
    anew after an eighth of the file was read, so that the pages of tensors that nobody holds leave the process; they
    stay in the page cache. While a file is read, the system reads the next one."""

    single_name = "model.safetensors"
    index_name = "model.safetensors.index.json"
    other_names = "*.safetensors"  # of folders with neither
    no_weights = ("adapter_",)  # beginnings of names of files that hold no weights of the model

    def __init__(self, folder: Path) -> None:
        self._opened: tuple[Path, Any] | None = None
        self._mapped_until = 0  # of `bytes_read`, after which the mapping is released
        self._ahead: ReadAhead | None = None
        self.bytes_read = 0
        # Multimodal checkpoints keep their text model one level down; its tensors get the names they would have
        # in a checkpoint of the text model alone.
        places = self._locate(folder)
        self._stored = {_text_name(name): (file, name) for name, file in places.items()}
        self._ahead = ReadAhead(sorted(set(places.values())))
        self._folder = folder

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> DenseWeight:
        spans = None if part is None else (part.rows, part.columns)
        return DenseWeight(self._read(name, (rows, columns), spans))

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        return self._read(name, (size,), None if part is None else (part,)).to(torch.float32)

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> DenseWeight:
        index = range(place.index, place.index + 1)
        if not place.transposed:
            shape, spans = (place.count, rows, columns), (index, part.rows, part.columns)
            return DenseWeight(self._read(place.name, shape, spans)[0])
        shape, spans = (place.count, columns, rows), (index, part.columns, part.rows)
        return DenseWeight(self._read(place.name, shape, spans)[0].T.contiguous())

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, spans: tuple[range, ...] | None = None
    ) -> Tensor:
        """Return a tensor as stored, of any type. With `spans`, one for each dimension, only those are read."""
        if name not in self._stored:
            raise ModelLoadError(f"The model in {self._folder} has no tensor {name}.")
        file, stored_name = self._stored[name]
        stored = self._guarded(file, lambda opened: opened.get_slice(stored_name))
        stored_shape = stored.get_shape()
        if shape is not None and len(shape) == 1 < len(stored_shape) and _is_vector(stored_shape, *shape):
            whole = self.tensor(name).flatten()
            return whole if spans is None else whole[spans[0].start : spans[0].stop]
        if shape is not None and len(shape) == 2 and _is_stack(stored_shape, *shape):
            whole = self.tensor(name).flatten(0, 1)
            return whole if spans is None else whole[tuple(slice(span.start, span.stop) for span in spans)]
        if shape is not None and tuple(stored_shape) != shape:
            raise ModelLoadError(
                f"{file.name} has {stored_name} of shape {stored_shape} "
                f"where config.json asks for {list(shape)}."
            )
        tensor: Tensor
        if spans is None:
            tensor = self._guarded(file, lambda opened: opened.get_tensor(stored_name))
        else:
            wanted = tuple(slice(span.start, span.stop) for span in spans)
            tensor = self._guarded(file, lambda _: stored[wanted])
        self.bytes_read += tensor.nbytes
        return tensor

    def _read(self, name: str, shape: tuple[int, ...], spans: tuple[range, ...] | None = None) -> Tensor:
        tensor = self.tensor(name, shape, spans)
        if tensor.dtype not in _READABLE:
            file, stored_name = self._stored[name]
            raise ModelLoadError(f"{file.name} has {stored_name} in {tensor.dtype}, which cannot be read.")
        return tensor

    def _locate(self, folder: Path) -> Mapping[str, Path]:
        """Return the file of each tensor."""
        index = folder / self.index_name
        if index.exists():
            files = _read_index(index)
            for file in sorted(set(files.values())):
                if not file.exists():
                    raise ModelLoadError(
                        f"{folder} lacks {file.name}, which its {index.name} names.",
                        hint="Fetch the missing file again.",
                    )
            return files
        single = folder / self.single_name
        if single.exists():
            return dict.fromkeys(self._guarded(single, lambda opened: opened.keys()), single)
        return self._locate_in_all(folder)

    def _locate_in_all(self, folder: Path) -> Mapping[str, Path]:
        """Return the file of each tensor of a folder without an index whose files have names of their own."""
        files = sorted(
            file for file in folder.glob(self.other_names) if not file.name.startswith(self.no_weights)
        )
        # Mistral's own format of the same weights lies beside that of Hugging Face.
        files = [file for file in files if not file.name.startswith("consolidated")] or files
        if not files:
            has_pickles = any(folder.glob("pytorch_model*.bin"))
            raise ModelLoadError(
                f"{folder} has neither {self.single_name} nor {self.index_name}.",
                hint="Read its .bin files with --load-format pt." if has_pickles else None,
            )
        places: dict[str, Path] = {}
        for file in files:
            for name in self._guarded(file, lambda opened: opened.keys()):
                if name in places:
                    raise ModelLoadError(
                        f"{folder} has {name} in both {places[name].name} and {file.name}.",
                        hint=f"Keep the files of one model, or call the right file {self.single_name}.",
                    )
                places[name] = file
        return places

    def _open(self, file: Path) -> Any:
        return safe_open(file, framework="pt")

    def _guarded(self, file: Path, read: Callable[[Any], Any]) -> Any:
        try:
            if self._opened is None or self._opened[0] != file or self.bytes_read > self._mapped_until:
                self._opened = None
                self._opened = file, self._open(file)
                self._mapped_until = self.bytes_read + max(file.stat().st_size // 8, _LEAST_MAPPED)
                if self._ahead is not None:
                    self._ahead.opened(file)
            return read(self._opened[1])
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ModelLoadError(f"{file} cannot be read: {reason}.", hint="Fetch the file again.") from error


def _read_index(index: Path) -> dict[str, Path]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # Only the last part of a name counts, so that an index cannot point out of the folder.
        return {str(name): index.parent / Path(file).name for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{index} is not a valid index of shards.", hint="Fetch the file again."
        ) from error


# Nibble i of a word holds the output AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SMALLEST_GROUP = 16


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
                    for each in (f"{stem}.weight_scale", f"{stem}.weight_scale_inv")
                    if each in self._names
                ]
                if scales:
                    return self._scaled(name, scales[0], shape, kind, wanted)
        return self.files.matrix(name, rows, columns, part)

    def _awq(self, stem: str, shape: Shape, kind: AWQ, part: Part) -> WeightData:
        group = self._group(stem, shape, kind.group)
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
        group = self._group(stem, shape, kind.group)
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
        per_word = 32 // kind.bits
        all_scales = self._scales(f"{stem}.weight_scale")
        if all_scales.numel() == 0 or all_scales.numel() % shape.rows:
            raise ModelLoadError(f"{stem} of {shape.rows} rows has {all_scales.numel()} scales.")
        all_scales = all_scales.reshape(shape.rows, -1)
        group = self._group(stem, shape, _ceil(shape.columns, all_scales.shape[1]))
        order = self._input_order(f"{stem}.weight_g_idx", shape.columns, group)
        window = _window(part, shape, per_word, shape.columns if order is not None else lcm(group, per_word))
        rows = _axis(window.rows, shape.rows)
        groups = _axis(window.columns, shape.columns, group)
        scales = _within(all_scales, window.rows, groups.span)
        packed = self._words(f"{stem}.weight_packed", rows, _axis(window.columns, shape.columns, per_word))
        codes = unpack(packed, kind.bits)[:, : len(window.columns)]
        if f"{stem}.weight_zero_point" in self._names:
            words = _axis(window.rows, shape.rows, per_word)
            zeros = self._words(f"{stem}.weight_zero_point", words, groups)
            points = unpack(zeros.T, kind.bits)[:, : len(window.rows)].T
        else:
            points = torch.full_like(scales, 1 << (kind.bits - 1), dtype=torch.uint8)
        if order is not None:
            codes = codes[:, order]
        return _taken(grouped_weight(codes, scales, points, group, kind.bits, order), window, part)

    def _scaled(self, name: str, scale_name: str, shape: Shape, kind: Scaled, part: Part) -> WeightData:
        values = self._read(name, _axis(part.rows, shape.rows), _axis(part.columns, shape.columns))
        scales = self._scales(scale_name)
        if values.dtype == torch.float8_e4m3fn:
            return _float8(name, values, scales, shape, kind, part)
        if values.dtype != torch.int8:
            raise ModelLoadError(
                f"{name} has scales beside it, but is in {values.dtype}, which cannot be read."
            )
        own = slice(part.rows.start, part.rows.stop)
        scales = _row_scales(scales, shape, name)[own].view(-1, 1)
        zero_name = name.removesuffix(".weight") + ".weight_zero_point"
        offsets = None
        if zero_name in self._names:
            zeros = _row_scales(self.files.tensor(zero_name).float(), shape, zero_name)
            offsets = -zeros[own].view(-1, 1) * scales
        rounds_inputs = isinstance(self._kind, Compressed) and self._kind.rounds_inputs and offsets is None
        return _fitting(
            GroupQuantWeight(values, scales, offsets, len(part.columns), 8, rounds_inputs=rounds_inputs)
        )

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> WeightData:
        return self.files.stacked_matrix(place, rows, columns, part)

    def _input_order(self, name: str, columns: int, group: int) -> Tensor | None:
        """Return the order of inputs by their groups; None when neighbours are together, as without act-order."""
        if name not in self._names:
            return None
        groups = self.files.tensor(name, (columns,)).long()
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
        """Return scales in float32: all of them, or a part."""
        scales = self._read(name, *axes) if axes else self.files.tensor(name)
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
    """Build the weight (codes - points) * scales from unsigned codes [out, in] and zero points [out, in / group]."""
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
    """Return the weight in groups that every backend takes, 16 or a multiple of 32; otherwise unpacked."""
    if weight.group == _SMALLEST_GROUP or weight.group % (2 * _SMALLEST_GROUP) == 0:
        return weight
    if weight.group % _SMALLEST_GROUP == 0:
        return weight.regrouped(_SMALLEST_GROUP)
    return DenseWeight(weight.dequantize())


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


def _is_stack(shape: Sequence[int], rows: int, columns: int) -> bool:
    """Say whether a tensor is several matrices, which are one matrix when they stand one below the other. The
    matrices of a convolution have a row each."""
    return len(shape) == 3 and (shape[0] * shape[1], shape[2]) == (rows, columns)


def _is_vector(shape: Sequence[int], size: int) -> bool:
    """Say whether a tensor is a vector of this size but for further dimensions of 1."""
    return max(shape) == prod(shape) == size
