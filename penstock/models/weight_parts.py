"""Cuts rows and columns out of stored matrices, without new rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.interface import (
    DenseWeight,
    Float8Weight,
    GroupQuantWeight,
    WeightData,
)

_GROUP_UNIT = 32  # every backend supports quantization groups of a multiple of this many inputs


@dataclass(frozen=True, slots=True)
class Part:
    """The part that is taken of a matrix. Both ranges have step 1."""

    rows: range
    columns: range


def take_part(weight: WeightData, part: Part) -> WeightData:
    return take_columns(take_rows(weight, part.rows), part.columns)


def take_rows(weight: WeightData, rows: range) -> WeightData:
    if len(rows) == weight.shape[0]:
        return weight
    taken = slice(rows.start, rows.stop)
    match weight:
        case DenseWeight():
            return DenseWeight(weight.values[taken])
        case Float8Weight():
            return replace(weight, values=weight.values[taken], scales=weight.scales[taken])
        case GroupQuantWeight():
            offsets = None if weight.offsets is None else weight.offsets[taken]
            return replace(weight, codes=weight.codes[taken], scales=weight.scales[taken], offsets=offsets)


def multiplied(weight: WeightData, factor: float) -> WeightData:
    """Return a matrix times a number. Codes stay as they are."""
    match weight:
        case DenseWeight():
            return DenseWeight(weight.values.float() * factor)
        case Float8Weight():
            return replace(weight, scales=weight.scales * factor)
        case GroupQuantWeight():
            offsets = None if weight.offsets is None else weight.offsets * factor
            return replace(weight, scales=weight.scales * factor, offsets=offsets)


def pick_rows(weight: WeightData, order: Tensor) -> WeightData:
    """Take the rows of `order`, int64 [n], in this order."""
    match weight:
        case DenseWeight():
            return DenseWeight(weight.values[order])
        case Float8Weight():
            # As bytes, because torch cannot index float8 everywhere.
            values = weight.values.view(torch.uint8)[order].view(weight.values.dtype)
            return replace(weight, values=values, scales=weight.scales[order])
        case GroupQuantWeight():
            offsets = None if weight.offsets is None else weight.offsets[order]
            return replace(weight, codes=weight.codes[order], scales=weight.scales[order], offsets=offsets)


def pick_columns(weight: WeightData, order: Tensor) -> WeightData:
    """Take the columns of `order`, int64 [n], in this order. Columns that move in whole groups keep their scales; a
    quantized matrix of which the order divides groups becomes dense."""
    match weight:
        case DenseWeight():
            return DenseWeight(weight.values[:, order])
        case GroupQuantWeight(input_order=None, group=group) if (
            groups := _moved_groups(order, group)
        ) is not None:
            offsets = None if weight.offsets is None else weight.offsets[:, groups]
            return replace(
                weight, codes=weight.codes[:, order], scales=weight.scales[:, groups], offsets=offsets
            )
        case Float8Weight() | GroupQuantWeight():
            return DenseWeight(weight.dequantize()[:, order])


def _moved_groups(order: Tensor, group: int) -> Tensor | None:
    """Return the order of groups, if the order of columns moves each group as a whole."""
    if len(order) % group:
        return None
    by_group = order.view(-1, group)
    first = by_group[:, :1]
    is_whole = bool((first % group == 0).all()) and torch.equal(by_group, first + torch.arange(group))
    return first.flatten() // group if is_whole else None


def take_columns(weight: WeightData, columns: range) -> WeightData:
    """Take columns without new rounding: a matrix whose scales the cut would divide, or whose inputs are in another
    order, becomes dense."""
    if len(columns) == weight.shape[1]:
        return weight
    taken = slice(columns.start, columns.stop)
    match weight:
        case DenseWeight():
            return DenseWeight(weight.values[:, taken].contiguous())
        case Float8Weight(group=None):
            return replace(weight, values=weight.values[:, taken].contiguous())
        case Float8Weight(group=int(group)) if _on_bounds(columns, group):
            scales = _groups_of(weight.scales, columns, group)
            return replace(weight, values=weight.values[:, taken].contiguous(), scales=scales)
        case GroupQuantWeight(input_order=None, group=group) if _on_bounds(columns, group):
            offsets = None if weight.offsets is None else _groups_of(weight.offsets, columns, group)
            return replace(
                weight,
                codes=weight.codes[:, taken].contiguous(),
                scales=_groups_of(weight.scales, columns, group),
                offsets=offsets,
            )
        case GroupQuantWeight(input_order=None, group=group) if (
            group == weight.shape[1] and len(columns) % _GROUP_UNIT == 0
        ):  # one scale for a whole row is valid for any part of the row
            return replace(weight, codes=weight.codes[:, taken].contiguous(), group=len(columns))
        case Float8Weight() | GroupQuantWeight():
            return DenseWeight(weight.dequantize()[:, taken].contiguous())


def _on_bounds(columns: range, group: int) -> bool:
    return columns.start % group == 0 and columns.stop % group == 0


def _groups_of(table: Tensor, columns: range, group: int) -> Tensor:
    return table[:, columns.start // group : columns.stop // group].contiguous()
