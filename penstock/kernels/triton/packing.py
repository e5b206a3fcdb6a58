"""The forms in which weights are kept on the GPU: packed where a kernel reads packed weights, and otherwise in the
compute type.

A stack whose parts are of several kinds (Q and K of four bits, V of six) is kept as a stack of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from penstock.kernels.interface import (
    DenseWeight,
    Float8Weight,
    GroupQuantWeight,
    WeightData,
    with_common_order,
)
from penstock.kernels.reference import TorchLinear
from penstock.kernels.triton import float8, int4, int8
from penstock.kernels.triton.float8 import Float8Linear
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int8 import Int8Linear
from penstock.kernels.triton.targets import current

LARGEST_GROUP = 128  # what a tensor core multiplies between two scales
FLOAT8_UNIT = 16  # cuBLAS wants both sides of a float8 matrix to be multiples


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Several products of one input, each of its own kind."""

    parts: tuple[Packed, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """A product of x[:, order]."""

    inner: Packed
    order: Tensor  # int64 [in]

    @property
    def out_features(self) -> int:
        return self.inner.out_features

    @property
    def in_features(self) -> int:
        return self.inner.in_features

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes + self.order.nbytes


Grouped = Int4Linear | Int8Linear
Packed = TorchLinear | Float8Linear | Grouped | StackedLinear | ReorderedLinear


@dataclass(frozen=True, slots=True)
class PackedRows:
    """An embedding table whose rows are unpacked when they are looked up."""

    table: Grouped
    shared: bool

    @property
    def num_bytes(self) -> int:
        return 0 if self.shared else self.table.num_bytes

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self.table, Int4Linear):
            return int4.unpack(self.table.rows(token_ids), dtype)
        return int8.unpack(self.table.rows(token_ids), dtype)


def pack(
    parts: Sequence[WeightData], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Packed:
    parts, order = with_common_order(parts)
    rounds_inputs = dtype != torch.float32  # float32 stays float32
    fitted = [_fitted(part, rounds_inputs) for part in parts]
    runs = [(kind, list(run)) for kind, run in groupby(fitted, key=_kind)]
    packed: list[Packed] = []
    first = 0
    for kind, run in runs:
        height = sum(part.shape[0] for part in run)
        own_bias = None if bias is None else bias[first : first + height]
        packed.append(_pack_run(kind[0], run, own_bias, dtype, device))
        first += height
    stack = packed[0] if len(packed) == 1 else StackedLinear(tuple(packed))
    return stack if order is None else ReorderedLinear(stack, order.to(device))


def _pack_run(
    kind: str, run: list[WeightData], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Packed:
    match kind:
        case "int4":
            return int4.pack(cast("list[GroupQuantWeight]", run), bias, dtype, device)
        case "int8" | "float8 blocks":
            return int8.pack(cast("list[GroupQuantWeight | Float8Weight]", run), bias, dtype, device)
        case "float8":
            return float8.pack(cast("list[Float8Weight]", run), bias, dtype, device)
    dense = [
        part.values.to(device, dtype) if isinstance(part, DenseWeight) else part.dequantize(dtype).to(device)
        for part in run
    ]
    return TorchLinear(torch.cat(dense), None if bias is None else bias.to(device, dtype))


def _fitted(part: WeightData, rounds_inputs: bool) -> WeightData:
    """Return the weight in groups that kernels take: powers of two, small enough that a tile of a group fits. Kernels
    that round inputs need `rounds_inputs`, and for float8 tensor cores of that type; other kernels widen the
    weights."""
    if isinstance(part, Float8Weight) and part.group is None:
        height, width = part.shape
        group = min(width & -width, LARGEST_GROUP)
        if (rounds_inputs and current().has_float8) or group < int8.SMALLEST_GROUP:
            return part
        scales = part.scales.view(-1, 1).expand(height, width // group).contiguous()
        return Float8Weight(part.values, scales, group)
    if not isinstance(part, GroupQuantWeight):
        return part
    if part.rounds_inputs and not rounds_inputs:
        part = replace(part, rounds_inputs=False)
    group = min(part.group & -part.group, LARGEST_GROUP)
    return part if group == part.group else part.regrouped(group)


def _kind(part: WeightData) -> tuple[Any, ...]:
    """Return the kind of a part. Parts of one kind are packed together."""
    if isinstance(part, GroupQuantWeight):
        if part.bits == 4 and part.group >= int4.SMALLEST_GROUP:
            return "int4", part.group
        if part.bits == 8 and part.group >= int8.SMALLEST_GROUP:
            return "int8", part.group, part.rounds_inputs
    if isinstance(part, Float8Weight):
        is_for_tensor_cores = current().has_float8 and all(side % FLOAT8_UNIT == 0 for side in part.shape)
        if part.group is None and is_for_tensor_cores:
            return ("float8",)
        if part.group is not None and part.group & -part.group == part.group >= int8.SMALLEST_GROUP:
            return "float8 blocks", part.group
    return ("dense",)
