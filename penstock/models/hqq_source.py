"""Reads matrices of HQQ checkpoints from folders, as transformers stores them. Knows no architecture.

A matrix is cut into groups before it is quantized: into rows of neighbours (axis 1), or into columns of numbers that
are far apart (axis 0). Codes with a scale and a zero point for each group stand for (code - zero) * scale. Groups of
neighbours stay packed, without loss: zero points need not be integers. Others become dense values.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import DenseWeight, WeightData
from penstock.models.quantized_source import QuantizedSource, grouped_weight
from penstock.models.weight_parts import Part, take_part
from penstock.models.weights import refuse_infinite

logger = logging.getLogger(__name__)

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
