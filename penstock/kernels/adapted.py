"""Products with LoRA adapters: some rows of a batch get an adapter's share added to what the model's matrix gives.

Wraps a backend for batches in which at least one row has an adapter; others never come here. Rows are grouped by
adapter, and each group is one small product of the backend's own, so that an answer stays as independent of its
neighbours as the backend makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.blocks import DelegatingOps
from penstock.kernels.interface import Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """linear(linear(x, left), right) is what an adapter adds to a product of x."""

    left: PackedLinear
    right: PackedLinear


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a batch that use one adapter."""

    deltas: Mapping[int, PackedDelta]  # by the index of the product
    rows: Tensor  # int64, on the backend's device


class AdaptedOps(DelegatingOps):
    """A backend whose products add what the adapters of the rows say. Experts have no adapters.

    `products` are the matrices that adapters may change, in the order that deltas are numbered by. `use` comes before
    every forward pass."""

    def __init__(self, ops: Ops, products: Sequence[PackedLinear]) -> None:
        super().__init__(ops)
        self._products = tuple(products)  # kept, so that an id stays its own
        self._index_of = {id(product): index for index, product in enumerate(products)}
        self._groups: Sequence[AdaptedRows] = ()

    def use(self, groups: Sequence[AdaptedRows]) -> None:
        self._groups = groups

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        ops = self._ops
        y = ops.linear(x, weight)
        index = self._index_of.get(id(weight))
        if index is None:
            return y
        for group in self._groups:
            delta = group.deltas.get(index)
            if delta is None:
                continue
            rows = group.rows
            if len(rows) == len(y):
                y += ops.linear(ops.linear(x, delta.left), delta.right)
            else:
                y.index_add_(0, rows, ops.linear(ops.linear(x[rows], delta.left), delta.right))
        return y
