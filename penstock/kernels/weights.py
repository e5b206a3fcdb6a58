"""Weight matrices as checkpoints store them: dense, integer codes in groups, float8. Backends pack these forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A plain matrix [out, in]."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class GroupQuantWeight:
    """Integer codes with a scale, and maybe an offset, for each `group` neighbours of a row.

    weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

    Every GGUF block format, AWQ, GPTQ and round-to-nearest int8 decode to this form without loss. `bits` is 4 when
    all codes lie in 0..15, else 8.

    With `input_order` the columns are stored in another order: column j belongs to input input_order[j]. (GPTQ
    checkpoints made in the order of activations group inputs that are no neighbours.)
    """

    codes: Tensor  # int8 (bits 8) or uint8 (bits 4, one code per byte) [out, in]
    scales: Tensor  # float32 [out, in / group]
    offsets: Tensor | None  # float32 [out, in / group]
    group: int  # 16, or a multiple of 32; `in` is a multiple of it
    bits: Literal[4, 8]
    input_order: Tensor | None = None  # int64 [in], a permutation
    # Made to be multiplied with inputs that are rounded to int8 too, which a backend may then do. Codes are int8, and
    # all groups of a row have the same scale.
    rounds_inputs: bool = False
    # Codes are twice the numbers of float4 (e2m1): 0, ±1, ±2, ±3, ±4, ±6, ±8, ±12. A backend may keep them in four
    # bits.
    is_float4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the codes, two to a byte where they have four bits, and of scales and offsets in 16
        bits."""
        tables = self.scales.numel() + (0 if self.offsets is None else self.offsets.numel())
        return self.codes.numel() * (4 if self.is_float4 else self.bits) // 8 + 2 * tables

    def regrouped(self, group: int) -> GroupQuantWeight:
        """Return the same weights in smaller groups, several of which share a scale."""
        times = self.group // group
        scales, offsets = (
            None if table is None else table.repeat_interleave(times, dim=1)
            for table in (self.scales, self.offsets)
        )
        assert scales is not None
        return replace(self, scales=scales, offsets=offsets, group=group)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        grouped = self.codes.to(torch.float32).view(out, width // self.group, self.group)
        values = grouped * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            values = values + self.offsets.unsqueeze(-1)
        values = values.view(out, width)
        if self.input_order is not None:
            values = torch.empty_like(values).index_copy_(1, self.input_order, values)
        return values.to(dtype)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight[n, k] = values[n, k] * scales[n], or * scales[n, k // group] where `group` is given."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out], or [out, in / group]
    group: int | None = None  # `in` is a multiple of it

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        grouped = self.values.to(torch.float32).view(out, -1, self.group or width)
        return (grouped * self.scales.view(out, -1, 1)).view(out, width).to(dtype)


WeightData = DenseWeight | GroupQuantWeight | Float8Weight


def with_common_order(parts: Sequence[WeightData]) -> tuple[list[WeightData], Tensor | None]:
    """For backends that reorder the input of a stack once: the parts in one order of inputs, and that order. None is
    the inputs' own; parts that disagree are brought to it as dense matrices."""
    orders = [part.input_order if isinstance(part, GroupQuantWeight) else None for part in parts]
    first = orders[0]
    if first is not None and all(order is not None and torch.equal(order, first) for order in orders):
        return [
            replace(part, input_order=None) for part in parts if isinstance(part, GroupQuantWeight)
        ], first
    return [
        part if order is None or isinstance(part, DenseWeight) else DenseWeight(part.dequantize())
        for part, order in zip(parts, orders, strict=True)
    ], None
