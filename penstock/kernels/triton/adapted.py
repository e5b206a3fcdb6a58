"""Adapters on a GPU, in memory that CUDA graphs can refer to: `kernels/adapted.py` says what they are, and `lora.py`
has the kernels.

A graph knows the tables of adapters and the tiles of rows by their addresses: both are filled before a step. Only a
higher rank than any before, or a matrix that no adapter changed before, needs other launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.adapted import RANK_UNIT, AdaptedProduct, CopyInto, Delta
from penstock.kernels.blocks import DelegatingOps
from penstock.kernels.interface import Activation, AttentionBatch, AttentionLayer, Ops
from penstock.kernels.triton import lora, products
from penstock.kernels.triton.elementwise import rms_norm
from penstock.kernels.triton.lora import DeltaTable, Tiles

STATIC_ROWS = 4096  # no graph has more rows
ARRIVALS = 1 << 18  # more than any launch has tiles and blocks of outputs
_ALIGNMENT = 16  # elements between matrices
_COMPILERS = 4  # threads
# Rows of steps for which kernels differ, to be compiled before the first step.
_WARM_UP_ROWS = (32, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in host memory. By product: where its left and right matrices begin, and its rank."""

    values: Tensor
    places: Mapping[int, tuple[int, int, int]]


class BatchedAdapters:
    """Implements `Adapters`."""

    records_graphs = True

    def __init__(
        self, adapted: Sequence[AdaptedProduct], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.version = 0
        self.tiles: Tiles | None = None
        self._products = tuple(adapted)  # kept, so that an id stays its own
        self._ends = [lora.sliced_ends(product.heights) for product in adapted]
        self._num_slots = num_slots
        self._dtype = dtype
        self._device = device
        self._base = torch.zeros(_ALIGNMENT, dtype=dtype, device=device)
        # By product and slot: the addresses of left and right matrices, then ranks.
        self._addresses = torch.zeros(len(adapted), 2, num_slots, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(len(adapted), num_slots, dtype=torch.int32, device=device)
        self._most_ranks = [0] * len(adapted)
        self._tables: dict[int, DeltaTable] = {}
        self._held: dict[int, Tensor] = {}
        self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        self._static = torch.zeros(
            _places(STATIC_ROWS, num_slots) + STATIC_ROWS, dtype=torch.int32, device=device
        )

    def pack(self, deltas: Mapping[int, Delta]) -> PackedAdapter:
        """Lay an adapter out for the device, and compile the kernels that it needs."""
        halves: list[Tensor] = []
        places: dict[int, tuple[int, int, int]] = {}
        end = 0
        for index, delta in deltas.items():
            is_sliced = len(self._ends[index]) == len(delta.heights)
            starts = []
            for half in delta.sliced() if is_sliced else delta.joined():
                halves.append(half)
                starts.append(end)
                end += -(-half.numel() // _ALIGNMENT) * _ALIGNMENT
            places[index] = starts[0], starts[1], halves[-1].shape[1]
        values = torch.zeros(end, dtype=self._dtype)
        for half, start in zip(
            halves, [place for pair in places.values() for place in pair[:2]], strict=True
        ):
            values[start : start + half.numel()] = half.flatten()
        if self._device.type == "cuda":
            self.compile({index: _rounded(place[2]) for index, place in places.items()})
        return PackedAdapter(values, places)

    def load(self, slot: int, packed: PackedAdapter) -> None:
        held = packed.values.to(self._device)
        first = (held.data_ptr() - self._base.data_ptr()) // held.element_size()
        addresses = torch.zeros(len(self._products), 2, dtype=torch.int64)
        ranks = torch.zeros(len(self._products), dtype=torch.int32)
        for index, (left, right, rank) in packed.places.items():
            addresses[index, 0], addresses[index, 1], ranks[index] = first + left, first + right, rank
            self._grow(index, _rounded(rank))
        self._addresses[:, :, slot] = addresses.to(self._device)
        self._ranks[:, slot] = ranks.to(self._device)
        self._held[slot] = held

    def unload(self, slot: int) -> None:
        self._ranks[:, slot] = 0
        del self._held[slot]

    def use(self, slots: NDArray[np.int32], copy_into: CopyInto) -> None:
        count = len(slots)
        order, fields = lora.arrange(slots, self._num_slots)
        start = _places(count, self._num_slots)
        values = np.zeros(start + count, dtype=np.int32)
        values[: fields.size], values[start:] = fields.reshape(-1), order
        if count <= STATIC_ROWS:
            target = self._static
        else:
            target = torch.empty(len(values), dtype=torch.int32, device=self._device)
        copy_into(target, values)
        self.tiles = Tiles(
            target[start : start + count],
            target[: fields.size],
            self._arrivals,
            len(fields),
            lora.tile_rows(count),
        )

    def around(self, ops: Ops) -> BatchedOps:
        return BatchedOps(ops, self)

    def table(self, weight: object) -> DeltaTable | None:
        return self._tables.get(id(weight))

    def _grow(self, index: int, rank: int) -> None:
        if rank > self._most_ranks[index]:
            self._most_ranks[index] = rank
            self._tables[id(self._products[index].packed)] = self._table(index, rank)
            self.version += 1

    def _table(self, index: int, most_rank: int) -> DeltaTable:
        lefts, rights = self._addresses[index]
        return DeltaTable(self._base, lefts, rights, self._ranks[index], most_rank, self._ends[index])

    def compile(self, ranks: Mapping[int, int]) -> None:
        """Compile the kernels for adapters of these ranks, by product, in this thread and without a launch."""
        kinds = {
            (self._ends[index], self._products[index].columns, rank): index for index, rank in ranks.items()
        }
        tables = [
            (self._table(index, max(rank, self._most_ranks[index])), width)
            for (_, width, rank), index in kinds.items()
        ]

        def compile_one(job: tuple[int, tuple[DeltaTable, int]]) -> None:
            if self._device.type == "cuda":  # threads begin with the first GPU
                torch.cuda.set_device(self._base.device)
            count, (table, width) = job
            lora.compile_for(table, count, width, self._num_slots)

        with ThreadPoolExecutor(_COMPILERS) as compilers:
            list(compilers.map(compile_one, product(_WARM_UP_ROWS, tables)))


def _rounded(rank: int) -> int:
    return max(RANK_UNIT, 1 << (rank - 1).bit_length())


def _places(num_rows: int, num_slots: int) -> int:
    """Return the size of the fields of tiles, rounded up so that what is after them is aligned."""
    tiles = lora.most_tiles(num_rows, num_slots)
    return -(-tiles // 4) * 4 * lora.FIELDS


@dataclass(frozen=True, slots=True)
class _Begun:
    """A product with adapters whose first half was launched."""

    shrunk: Tensor
    table: DeltaTable
    tiles: Tiles


class BatchedOps(DelegatingOps):
    """A `TritonOps` whose products add what the adapters of the rows say, in a few launches more."""

    def __init__(self, ops: Any, adapters: BatchedAdapters) -> None:
        super().__init__(ops)
        self.moe_block = ops.moe_block  # type: ignore[method-assign]
        self._adapters = adapters

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        begun = self._begin(x, weight)
        return self._add(begun, self._ops.linear(x, weight))

    def mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation) -> Tensor:
        begun = self._begin(x, gate_up)
        return self.linear(self._gated(begun, self._ops.linear(x, gate_up), activation), down)

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        projected = self._add(*self._begin_normed(residual, norm, eps, qkv))
        attended = self.attend(projected, layer, cache, batch)
        begun = self._begin(attended, output)
        products.add_linear(attended, output, residual, beside=begun is not None)
        self._add(begun, residual)

    def mlp_block(
        self, residual: Tensor, norm: Tensor, eps: float, gate_up: Any, down: Any, activation: Activation
    ) -> None:
        hidden = self._gated(*self._begin_normed(residual, norm, eps, gate_up), activation)
        begun = self._begin(hidden, down)
        products.add_linear(hidden, down, residual, beside=begun is not None)
        self._add(begun, residual)

    def _begin_normed(self, x: Tensor, norm: Tensor, eps: float, weight: Any) -> tuple[_Begun | None, Tensor]:
        """Begin the product of the RMS norm of `x`, and return the product with the model's own matrix too."""
        if self._adapters.table(weight) is None:
            return None, products.normed_linear(x, norm, eps, weight)
        normed = rms_norm(x, norm, eps)
        return self._begin(normed, weight), products.linear(normed, weight, beside=True)

    def _begin(self, x: Tensor, weight: Any) -> _Begun | None:
        """Multiply `x` with the left matrices of adapters of `weight`, if there are any."""
        table = self._adapters.table(weight)
        if table is None:
            return None
        tiles = self._adapters.tiles
        assert tiles is not None, "`use` comes before a forward pass"
        assert tiles.order.shape[0] == x.shape[0], "and names the slot of every row"
        return _Begun(lora.shrink(x, table, tiles), table, tiles)

    def _add(self, begun: _Begun | None, y: Tensor) -> Tensor:
        """Add the adapters' outputs for the input to `y`."""
        return y if begun is None else lora.expand(begun.shrunk, begun.table, begun.tiles, y)

    def _gated(self, begun: _Begun | None, y: Tensor, activation: Activation) -> Tensor:
        if begun is None or begun.table.slices != 2:
            return self.gated(self._add(begun, y), activation)
        return lora.expand(begun.shrunk, begun.table, begun.tiles, y, activation)
