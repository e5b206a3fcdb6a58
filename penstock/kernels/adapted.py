"""Products with LoRA adapters: some rows of a batch get an adapter's share added to what the model's matrix gives.

Wraps a backend for batches in which at least one row has an adapter; others never come here. A backend may have its
own way to compute the products of all adapters of a batch (`BatchesAdapters`). In the way of this module, rows are
grouped by adapter, and each group is one small product of the backend's own, so that an answer stays as independent
of its neighbours as the backend makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.blocks import DelegatingOps
from penstock.kernels.interface import DenseWeight, Ops, PackedLinear

RANK_UNIT = 16  # ranks are padded with zeros to a multiple, for fast products
NO_ADAPTER = -1
CopyInto = Callable[[Tensor, NDArray[Any]], None]  # overwrites the beginning of a tensor on the device


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A matrix of the model that adapters may change: several matrices, of this many outputs each, that are
    stacked."""

    packed: PackedLinear
    heights: tuple[int, ...]
    columns: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The change of a product by an adapter: right @ (left @ x), for each matrix of the stack that it changes."""

    heights: tuple[int, ...]
    columns: int
    pairs: tuple[tuple[Tensor, Tensor] | None, ...]  # left, [rank, in], and right, [height, rank]

    @property
    def ranks(self) -> list[int]:
        return [0 if pair is None else pair[0].shape[0] for pair in self.pairs]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return one left and one right matrix, which has zeros where a row and a column belong to different
        matrices."""
        total = _padded(sum(self.ranks))
        left, right = torch.zeros(total, self.columns), torch.zeros(sum(self.heights), total)
        row = column = 0
        for pair, height, rank in zip(self.pairs, self.heights, self.ranks, strict=True):
            if pair is not None:
                left[column : column + rank] = pair[0]
                right[row : row + height, column : column + rank] = pair[1]
            row, column = row + height, column + rank
        return left, right

    def sliced(self) -> tuple[Tensor, Tensor]:
        """Return the left matrices one below the other, each padded to the largest rank, and the right matrices one
        below the other: [matrices × rank, in] and [out, rank]."""
        rank = _padded(max(self.ranks))
        left, right = torch.zeros(len(self.pairs), rank, self.columns), torch.zeros(sum(self.heights), rank)
        row = 0
        for index, (pair, height, own) in enumerate(zip(self.pairs, self.heights, self.ranks, strict=True)):
            if pair is not None:
                left[index, :own] = pair[0]
                right[row : row + height, :own] = pair[1]
            row += height
        return left.flatten(0, 1), right


def _padded(rank: int) -> int:
    return -(-rank // RANK_UNIT) * RANK_UNIT


class Adapters(Protocol):
    """The adapters on a device, by slot, and the adapters of the step that comes next."""

    version: int  # changes when recorded graphs become invalid
    records_graphs: bool  # whether a recorded step serves other adapters too

    def pack(self, deltas: Mapping[int, Delta]) -> Any:
        """Prepare an adapter for `load`, on any thread. `deltas` are numbered like the products."""
        ...

    def load(self, slot: int, packed: Any) -> None: ...

    def unload(self, slot: int) -> None: ...

    def use(self, slots: NDArray[np.int32], copy_into: CopyInto) -> None:
        """Set the slot of each row of the next forward pass, or NO_ADAPTER."""
        ...

    def around(self, ops: Ops) -> Ops:
        """Return operations that add what adapters say to the products of `ops`. Experts have no adapters."""
        ...


@runtime_checkable
class BatchesAdapters(Protocol):
    """Backends with kernels for the adapters of a batch."""

    def batched_adapters(self, products: Sequence[AdaptedProduct], num_slots: int) -> Adapters: ...


def adapters_on(ops: Ops, products: Sequence[AdaptedProduct], num_slots: int) -> Adapters:
    if isinstance(ops, BatchesAdapters):
        return ops.batched_adapters(products, num_slots)
    return GroupedAdapters(ops, products)


@dataclass(frozen=True, slots=True)
class _PackedDelta:
    """linear(linear(x, left), right) is what an adapter adds to a product of x."""

    left: PackedLinear
    right: PackedLinear


class GroupedAdapters:
    """Adapters as ordinary products of a backend, one pair for each adapter of a step."""

    version = 0
    records_graphs = False

    def __init__(self, ops: Ops, products: Sequence[AdaptedProduct]) -> None:
        self._ops = ops
        self._products = tuple(products)  # kept, so that an id stays its own
        self.index_of = {id(product.packed): index for index, product in enumerate(products)}
        self._loaded: dict[int, Mapping[int, _PackedDelta]] = {}
        self.groups: list[tuple[Mapping[int, _PackedDelta], Tensor]] = []  # adapters, and their rows

    def pack(self, deltas: Mapping[int, Delta]) -> Mapping[int, Delta]:
        return deltas

    def load(self, slot: int, packed: Mapping[int, Delta]) -> None:
        pack = self._ops.pack_linear
        self._loaded[slot] = {
            index: _PackedDelta(*(pack([DenseWeight(half)]) for half in delta.joined()))
            for index, delta in packed.items()
        }

    def unload(self, slot: int) -> None:
        del self._loaded[slot]

    def use(self, slots: NDArray[np.int32], copy_into: CopyInto) -> None:
        self.groups = [
            (self._loaded[slot], torch.from_numpy(np.flatnonzero(slots == slot)).to(self._ops.device))
            for slot in dict.fromkeys(slots.tolist())
            if slot != NO_ADAPTER
        ]

    def around(self, ops: Ops) -> AdaptedOps:
        return AdaptedOps(ops, self)


class AdaptedOps(DelegatingOps):
    """A backend whose products add what the adapters of the rows say."""

    def __init__(self, ops: Ops, adapters: GroupedAdapters) -> None:
        super().__init__(ops)
        self._adapters = adapters

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        ops = self._ops
        y = ops.linear(x, weight)
        index = self._adapters.index_of.get(id(weight))
        if index is None:
            return y
        for deltas, rows in self._adapters.groups:
            delta = deltas.get(index)
            if delta is None:
                continue
            if len(rows) == len(y):
                y += ops.linear(ops.linear(x, delta.left), delta.right)
            else:
                y.index_add_(0, rows, ops.linear(ops.linear(x[rows], delta.left), delta.right))
        return y
