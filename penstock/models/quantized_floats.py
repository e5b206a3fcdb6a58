"""Reads matrices of four-bit floats (NVFP4, MXFP4), of bitsandbytes and of HQQ from folders. Knows no architecture.

Twice a four-bit float is an integer, so those stay packed in eight bits without loss, or in four bits where a
backend takes them (`is_float4`). The sixteen levels of
bitsandbytes' nf4 and fp4 are no multiples of anything and become dense values.

HQQ cuts a matrix into groups before it is quantized: into rows of neighbours (axis 1), or into columns of numbers
that are far apart (axis 0). Codes with a scale and a zero point for each group stand for (code - zero) * scale.
Groups of neighbours stay packed, without loss: zero points need not be integers. Others become dense values.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, GroupQuantWeight, WeightData
from penstock.models.quantized_source import BARE_SCALE, QuantizedSource, grouped_weight
from penstock.models.safetensors_source import PickledSource, SafetensorsSource
from penstock.models.stored_quantization import (
    HQQ,
    MXFP4,
    BitsAndBytes,
    Compressed,
    Float4,
    Scaled,
    StoredQuantization,
)
from penstock.models.weight_parts import Part, take_columns, take_part
from penstock.models.weights import Stacked, refuse_infinite

logger = logging.getLogger(__name__)

_GROUPS = (32, 16)  # that all backends take
# Twice the numbers of the format: the second eight are negative.
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def float4_weight(packed: Tensor, scales: Tensor, factor: float, group: int) -> GroupQuantWeight:
    """Decode uint8 [rows, in / 2], the first number in the low half of a byte. `scales` [rows, in / group] are
    floats, or exponents of two with a bias of 127 in uint8; `factor` multiplies all of them."""
    rows = packed.shape[0]
    codes = _DOUBLED[torch.stack([packed & 0xF, packed >> 4], dim=-1).view(rows, -1).long()]
    wide = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    return GroupQuantWeight(codes, wide * (factor / 2), None, group, 8, is_float4=True)


@dataclass(frozen=True, slots=True)
class FourBitState:
    """The tensors beside a matrix of bitsandbytes, whose values are levels[code] × absmax of their block."""

    settings: dict[str, Any]  # the JSON in `quant_state`
    levels: Tensor  # float32 [16]
    absmax: Tensor  # float32, or uint8 codes of `nested`
    nested_levels: Tensor | None = None  # float32 [256]
    nested_absmax: Tensor | None = None

    def block_scales(self) -> Tensor:
        if self.nested_levels is None or self.nested_absmax is None:
            return self.absmax.float()
        size = int(self.settings["nested_blocksize"])
        outer = self.nested_absmax.float().repeat_interleave(size)[: self.absmax.numel()]
        return self.nested_levels.float()[self.absmax.long()] * outer + float(self.settings["nested_offset"])


def read_state(raw: Tensor, name: str) -> dict[str, Any]:
    """Read the JSON that bitsandbytes stores as bytes."""
    try:
        settings = json.loads(bytes(raw.tolist()).decode())
        if isinstance(settings, dict) and int(settings["blocksize"]) > 0:
            return settings
    except (ValueError, KeyError, TypeError):
        pass
    raise ModelLoadError(f"{name} does not describe a quantized matrix.")


def four_bit_values(packed: Tensor, state: FourBitState, blocks: range) -> Tensor:
    """Decode whole blocks: bytes of two codes, the first in the high half, to a row of numbers."""
    flat = packed.flatten()
    codes = torch.stack([flat >> 4, flat & 0xF], dim=-1).flatten()
    scales = state.block_scales()[blocks.start : blocks.stop]
    size = int(state.settings["blocksize"])
    return state.levels.float()[codes.long()] * scales.repeat_interleave(size)[: codes.numel()]


def open_folder(
    folder: Path, kind: StoredQuantization | None, *, is_pickled: bool = False
) -> SafetensorsSource | QuantizedSource:
    """Open the weights of a folder, whose settings describe them as `kind`."""
    files = PickledSource(folder) if is_pickled else SafetensorsSource(folder)
    match kind:
        case None:
            return files
        case Float4():
            return Float4Source(files, Scaled())  # matrices in eight bits may be among those in four
        case Compressed() | Scaled():
            return Float4Source(files, kind)
        case MXFP4():
            return StackedFloat4Source(files, kind)
        case BitsAndBytes():
            return BitsAndBytesSource(files, kind)
        case HQQ():
            return HQQSource(files, kind)
        case _:
            return QuantizedSource(files, kind)


class StackedFloat4Source(QuantizedSource):
    """Experts as gpt-oss has them: `_blocks` [experts, out, in / 32, 16] and `_scales` [experts, out, in / 32]."""

    def stacked_matrix(self, place: Stacked, rows: int, columns: int, part: Part) -> WeightData:
        if f"{place.name}_blocks" not in self.names():
            return super().stacked_matrix(place, rows, columns, part)
        group = _GROUPS[0]
        if columns % group:
            raise ModelLoadError(f"{place.name} has {columns} inputs, no multiple of {group}.")
        # Whole groups are read, and cut afterwards.
        groups = range(part.columns.start // group, -(-part.columns.stop // group))
        spans = range(place.index, place.index + 1), part.rows, groups
        shape = place.count, rows, columns // group
        blocks = self.files.tensor(f"{place.name}_blocks", (*shape, group // 2), (*spans, range(group // 2)))
        scales = self.files.tensor(f"{place.name}_scales", shape, spans)
        weight = float4_weight(blocks[0].flatten(1), scales[0], 1.0, group)
        start = groups.start * group
        return take_columns(weight, range(part.columns.start - start, part.columns.stop - start))


class Float4Source(QuantizedSource):
    def shape(self, name: str) -> tuple[int, int]:
        stem = name.removesuffix(".weight")
        is_packed = f"{stem}.weight_packed" in self.names() and f"{stem}.weight_shape" not in self.names()
        if not is_packed and f"{stem}.weight_scale_2" not in self.names():
            return super().shape(name)
        rows, num_bytes = self.files.shape(f"{stem}.weight_packed" if is_packed else name)
        return rows, 2 * num_bytes

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        stem = name.removesuffix(".weight")
        names, read = self.names(), self.files.tensor
        bare = f"{stem}.{BARE_SCALE}"
        if bare in names and self.files.shape(name) == (rows, columns // 2):
            return self._halves(name, bare, columns, part or Part(range(rows), range(columns)))
        is_compressed = f"{stem}.weight_packed" in names
        is_integer = is_compressed and self.files.shape(f"{stem}.weight_packed") != (rows, columns // 2)
        if is_integer or (not is_compressed and f"{stem}.weight_scale_2" not in names):
            return super().matrix(name, rows, columns, part)
        wanted = part or Part(range(rows), range(columns))
        all_scales = read(f"{stem}.weight_scale")
        group = next((size for size in _GROUPS if all_scales.shape == (rows, columns // size)), None)
        if group is None or columns % group:
            raise ModelLoadError(
                f"The scales of {stem} are {list(all_scales.shape)}, which groups of 16 or 32 do not give."
            )
        factor = 1.0
        # NVFP4 has a further scale for the matrix; exponents, as of MXFP4, do without.
        if f"{stem}.weight_global_scale" in names or (
            is_compressed and all_scales.dtype == torch.float8_e4m3fn
        ):
            factor = 1 / self._largest_scale(f"{stem}.weight_global_scale")
        elif not is_compressed:
            factor = self._largest_scale(f"{stem}.weight_scale_2")
        stored = f"{stem}.weight_packed" if is_compressed else name
        packed = read(stored, (rows, columns // 2), (wanted.rows, range(columns // 2)))
        scales = all_scales[wanted.rows.start : wanted.rows.stop]
        return take_columns(float4_weight(packed, scales, factor, group), wanted.columns)

    def _halves(self, name: str, scale_name: str, columns: int, wanted: Part) -> WeightData:
        """Read experts of DeepSeek V4, whose scales have the name of those of its float8 matrices."""
        group, rows = _GROUPS[0], (wanted.rows,)
        if columns % group:
            raise ModelLoadError(f"{name} has {columns} inputs, no multiple of {group}.")
        packed = self.files.tensor(name, None, (*rows, range(columns // 2))).view(torch.uint8)
        shape = (self.files.shape(name)[0], columns // group)
        scales = self.files.tensor(scale_name, shape, (*rows, range(columns // group)))
        return take_columns(float4_weight(packed, scales, 1.0, group), wanted.columns)

    def _largest_scale(self, name: str) -> float:
        scales = self.files.tensor(name).float()
        refuse_infinite(name, scales)
        return float(scales.max())


class BitsAndBytesSource(QuantizedSource):
    _has_logged = False  # that weights are unpacked

    def shape(self, name: str) -> tuple[int, int]:
        states = sorted(each for each in self.names() if each.startswith(f"{name}.quant_state."))
        if not states:
            return super().shape(name)
        stored = read_state(self.files.tensor(states[0]), states[0]).get("shape")
        if (
            not isinstance(stored, list)
            or len(stored) != 2
            or not all(isinstance(each, int) for each in stored)
        ):
            raise ModelLoadError(f"{states[0]} does not state the shape of a matrix.")
        return stored[0], stored[1]

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        names = self.names()
        wanted = part or Part(range(rows), range(columns))
        weight: WeightData
        if f"{name}.absmax" in names:
            weight = self._four_bits(name, rows, columns, wanted.rows)
        elif f"{name.removesuffix('.weight')}.SCB" in names:
            weight = self._eight_bits(name, rows, columns, wanted.rows)
        else:
            return super().matrix(name, rows, columns, part)
        return take_columns(weight, wanted.columns)

    def _eight_bits(self, name: str, rows: int, columns: int, own: range) -> WeightData:
        scales = self.files.tensor(f"{name.removesuffix('.weight')}.SCB", (rows,), (own,)).float() / 127
        codes = self.files.tensor(name, (rows, columns), (own, range(columns)))
        weight = GroupQuantWeight(codes, scales.view(-1, 1), None, columns, 8)
        group = next((size for size in _GROUPS if columns % size == 0), None)
        return DenseWeight(weight.dequantize()) if group is None else weight.regrouped(group)

    def _four_bits(self, name: str, rows: int, columns: int, own: range) -> DenseWeight:
        if not self._has_logged:
            self._has_logged = True
            logger.warning("four-bit weights of bitsandbytes are unpacked to the compute type")
        states = sorted(each for each in self.names() if each.startswith(f"{name}.quant_state."))
        if not states:
            raise ModelLoadError(f"{name} of bitsandbytes has no quant_state beside it.")
        state = FourBitState(
            read_state(self.files.tensor(states[0]), states[0]),
            self.files.tensor(f"{name}.quant_map", (16,)),
            self.files.tensor(f"{name}.absmax"),
            self._beside(name, "nested_quant_map"),
            self._beside(name, "nested_absmax"),
        )
        size, count = int(state.settings["blocksize"]), rows * columns
        if state.absmax.numel() != -(-count // size) or size % 2:
            raise ModelLoadError(
                f"{name} has {state.absmax.numel()} blocks of {size}, which {rows} × {columns} do not fill."
            )
        blocks = range(own.start * columns // size, -(-own.stop * columns // size))
        num_bytes = -(-count // 2)
        span = range(blocks.start * size // 2, min(num_bytes, blocks.stop * size // 2))
        packed = self.files.tensor(name, (num_bytes, 1), (span, range(1)))
        values = four_bit_values(packed, state, blocks)
        refuse_infinite(f"the values of {name}", values)
        first = own.start * columns - blocks.start * size
        return DenseWeight(values[first : first + len(own) * columns].view(len(own), columns))

    def _beside(self, name: str, suffix: str) -> Tensor | None:
        stored = f"{name}.{suffix}"
        return self.files.tensor(stored) if stored in self.names() else None


# By the name of a packing: bits of a code, codes in a word, the type of a word. The first code has the highest bits.
_PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}


class HQQSource(QuantizedSource):
    _has_logged = False  # that weights are unpacked

    def shape(self, name: str) -> tuple[int, int]:
        stem = name.removesuffix(".weight")
        if f"{stem}.W_q" not in self.names():
            return super().shape(name)
        rows, columns = self.files.tensor(f"{stem}.shape", (2,)).tolist()
        return int(rows), int(columns)

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        stem = name.removesuffix(".weight")
        if f"{stem}.W_q" not in self.names():
            return super().matrix(name, rows, columns, part)
        weight = self._weight(stem, rows, columns)
        return weight if part is None else take_part(weight, part)

    def _weight(self, stem: str, rows: int, columns: int) -> WeightData:
        bits, codes = self._codes(stem, rows * columns)
        scales, zeros = self._beside(stem, "scale"), self._beside(stem, "zero")
        if zeros.shape != scales.shape:
            raise ModelLoadError(
                f"{stem} has zero points of shape {list(zeros.shape)} for scales of {list(scales.shape)}."
            )
        height, width = codes.shape
        if tuple(scales.shape) == (height, 1) and columns % width == 0:
            per_row = columns // width
            # Fewer bits than four take as much room as four.
            kept: Literal[4, 8] = 8 if bits == 8 else 4
            return grouped_weight(
                codes.view(rows, columns), scales.view(rows, per_row), zeros.view(rows, per_row), width, kept
            )
        if tuple(scales.shape) not in ((height, 1), (1, width), (1, 1)):
            raise ModelLoadError(
                f"{stem} has scales of shape {list(scales.shape)} for groups of shape {[height, width]}."
            )
        if not self._has_logged:
            self._has_logged = True
            logger.warning("HQQ weights with groups along axis 0 are unpacked to the compute type")
        refuse_infinite(f"the scales of {stem}", scales * zeros)
        return DenseWeight(((codes.float() - zeros) * scales).view(rows, columns))

    def _codes(self, stem: str, count: int) -> tuple[int, Tensor]:
        """Return the bits of a code, and all codes [groups, group] or [group, groups]."""
        packing = bytes(self._beside(stem, "packing").to(torch.uint8).tolist()).decode("latin-1")
        if packing not in _PACKINGS:
            raise ModelLoadError(
                f"{stem} is packed as {packing[:40]!r}, which cannot be read; known: {', '.join(_PACKINGS)}."
            )
        bits, per_word, word = _PACKINGS[packing]
        stored = self.files.tensor(f"{stem}.W_q")
        if stored.dim() == 2 and stored.dtype.is_floating_point:  # bytes that are called numbers
            stored = stored.contiguous().view(word)
        if stored.dim() != 2 or stored.dtype != word or count % stored.shape[1]:
            raise ModelLoadError(f"{stem}.W_q of shape {list(stored.shape)} does not hold {count} numbers.")
        top, mask = bits * (per_word - 1), (1 << bits) - 1
        places = [((stored >> (top - bits * index)) & mask).to(torch.uint8) for index in range(per_word)]
        codes = torch.cat(places)
        height = count // stored.shape[1]
        if not height <= len(codes) < height + per_word:
            raise ModelLoadError(f"{stem}.W_q of shape {list(stored.shape)} does not hold {count} numbers.")
        return bits, codes[:height]

    def _beside(self, stem: str, name: str) -> Tensor:
        tensor = self.files.tensor(f"{stem}.{name}")
        return tensor.float() if tensor.is_floating_point() else tensor
