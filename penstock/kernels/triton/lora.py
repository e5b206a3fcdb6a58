"""Products with LoRA adapters of any number and of different ranks in one pair of launches.

The rows of a step are sorted by adapter and cut into tiles of rows that share an adapter. `shrink` multiplies the
rows of each tile with the left matrix of their adapter, in parts of the width; `expand` adds up the parts, multiplies
the sum with the right matrix and adds the result to the product of the model's own matrix, or gates it. The product
of the model's own matrix is launched between the two, and may run beside `shrink`. The host
names adapters by slots; kernels find an adapter's matrices, and its rank, in tables. Nothing else depends on the
adapters of a step, so that a CUDA graph of a step serves any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.interface import Activation
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.elementwise import KINDS, gate_up_product
from penstock.kernels.triton.overlap import (
    launch_options,
    let_next_run_beside,
    let_next_start,
    wait_for_previous,
)

FIELDS = 3  # of a tile: slot, first place in the order, rows
MOST_SLICES = 3
MOST_AT_ONCE = 64  # of a rank
EXPAND_SIZE = 8192  # of a program's part of the right matrix
SHRINK_OUTPUTS = 16
SHRINK_COLUMNS = 128  # that a program reads at a time
MOST_SPLITS = 16


@triton.jit
def _dot(left, right, total):
    if left.dtype == tl.float32:
        return tl.dot(left, right, total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit(do_not_specialize=["steps", "slices"])
def _shrink_kernel(
    x, base, lefts, ranks, order, tiles, parts, arrivals, hidden, K, x_stride, steps, slices, hidden_width, places,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """hidden[place of a row in the order of tiles] = x[row] @ left.T. Each program multiplies a part of the
    width; the last one to arrive adds up the parts, in a fixed order."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * 3)
    start = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    index = tl.arange(0, ROWS)
    present = index < count
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    rank = tl.where(slot < 0, 0, tl.load(ranks + tl.maximum(slot, 0))) * slices
    left = base + tl.multiple_of(tl.load(lefts + tl.maximum(slot, 0)), 8)
    rows = tl.load(order + start + index, mask=present, other=0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    first = split * WIDTH * steps
    end = tl.minimum(first + WIDTH * steps, K)
    left_at = left + outputs[:, None] * K + (first + columns)[None, :]
    has_output = (outputs < rank)[:, None]
    ahead = tl.load(left_at, mask=has_output & (first + columns < K)[None, :], other=0.0)
    let_next_run_beside()
    if block * OUTPUTS < rank:
        x_at = x + rows[:, None] * x_stride + (first + columns)[None, :]
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for step in range(steps):
            begin = first + step * WIDTH
            row = tl.load(
                x_at + step * WIDTH, mask=present[:, None] & (begin + columns < K)[None, :], other=0.0
            )
            matrix = ahead
            is_next = (begin + WIDTH + columns < end)[None, :]
            ahead = tl.load(left_at + (step + 1) * WIDTH, mask=has_output & is_next, other=0.0)
            total = _dot(row, tl.trans(matrix), total)
        place = tile * ROWS + index
        inside = present[:, None] & (outputs < rank)[None, :]
        is_last = True
        if SPLITS > 1:
            at = (split * places + place).to(tl.int64)
            tl.store(parts + at[:, None] * hidden_width + outputs[None, :], total, mask=inside)
            tl.debug_barrier()
            counter = arrivals + tile * tl.num_programs(2) + block
            is_last = tl.atomic_add(counter, 1) == SPLITS - 1
            if is_last:
                total = tl.zeros((ROWS, OUTPUTS), tl.float32)
                for part in tl.static_range(SPLITS):
                    at = (part * places + place).to(tl.int64)
                    total += tl.load(
                        parts + at[:, None] * hidden_width + outputs[None, :],
                        mask=inside,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                tl.store(counter, 0)
        if is_last:
            tl.store(
                hidden + place.to(tl.int64)[:, None] * hidden_width + outputs[None, :],
                total.to(hidden.dtype.element_ty),
                mask=inside,
            )


@triton.jit
def _right(right, outputs, is_output, begin, rank, RANK: tl.constexpr):
    """A part of a right matrix: [outputs, RANK]."""
    inner = begin + tl.arange(0, RANK)
    at = outputs.to(tl.int64)[:, None] * rank + inner[None, :]
    return tl.load(right + at, mask=is_output[:, None] & (inner < rank)[None, :], other=0.0)


@triton.jit
def _delta(
    matrix, hidden_at, present, first, right, outputs, is_output, rank, WIDE: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """What an adapter adds to some outputs of a tile: float32 [rows, outputs]. `matrix` has the first columns of the
    right matrix, and all of them unless the rank is WIDE."""
    inner = tl.arange(0, RANK)
    hidden = tl.load(
        hidden_at[:, None] + first + inner[None, :],
        mask=present[:, None] & (inner < rank)[None, :],
        other=0.0,
    )
    total = tl.zeros((present.shape[0], outputs.shape[0]), tl.float32)
    total = _dot(hidden, tl.trans(matrix), total)
    if WIDE:
        for begin in range(RANK, rank, RANK):
            more = _right(right, outputs, is_output, begin, rank, RANK)
            inside = present[:, None] & (begin + inner < rank)[None, :]
            hidden = tl.load(hidden_at[:, None] + first + begin + inner[None, :], mask=inside, other=0.0)
            total = _dot(hidden, tl.trans(more), total)
    return total


@triton.jit
def _expand_kernel(
    hidden, base, rights, ranks, order, tiles, y, out, N, end_0, end_1, hidden_width,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """With a KIND of gate, N is the number of outputs of either half. Else the outputs of a program belong to one
    matrix of a stack."""
    let_next_start()
    tile, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3)
    start = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    index = tl.arange(0, ROWS)
    present = index < count
    rank = tl.multiple_of(tl.where(slot < 0, 0, tl.load(ranks + tl.maximum(slot, 0))), 16)
    right = base + tl.multiple_of(tl.load(rights + tl.maximum(slot, 0)), 8)
    rows = tl.load(order + start + index, mask=present, other=0).to(tl.int64)
    hidden_at = hidden + (tile * ROWS + index).to(tl.int64) * hidden_width
    outputs = chunk * COLUMNS + tl.arange(0, COLUMNS)
    is_output = outputs < N
    matrix = _right(right, outputs, is_output, 0, rank, RANK)
    second_matrix = matrix
    if KIND >= 0:
        second_matrix = _right(right, N + outputs, is_output, 0, rank, RANK)
    wait_for_previous()
    works = rank > 0
    if KIND >= 0:
        works = count > 0
    if works:
        inside = present[:, None] & is_output[None, :]
        if KIND >= 0:
            target = y + rows[:, None] * (2 * N) + outputs[None, :]
            gate = tl.load(target, mask=inside, other=0.0)
            up = tl.load(target + N, mask=inside, other=0.0)
            added = _delta(matrix, hidden_at, present, 0, right, outputs, is_output, rank, WIDE, RANK)
            gate = (gate.to(tl.float32) + added).to(gate.dtype)
            added = _delta(
                second_matrix, hidden_at, present, rank, right, N + outputs, is_output, rank, WIDE, RANK
            )
            up = (up.to(tl.float32) + added).to(up.dtype)
            made = gate_up_product(gate.to(tl.float32), up.to(tl.float32), KIND)
            tl.store(out + rows[:, None] * N + outputs[None, :], made.to(out.dtype.element_ty), mask=inside)
        else:
            first = chunk * COLUMNS
            piece = rank * ((first >= end_0).to(tl.int32) + (first >= end_1).to(tl.int32))
            target = y + rows[:, None] * N + outputs[None, :]
            own = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            added = _delta(matrix, hidden_at, present, piece, right, outputs, is_output, rank, WIDE, RANK)
            tl.store(target, (own + added).to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step, by adapter: which tiles there are is written on the device, before the step."""

    order: Tensor  # int32: rows, sorted by slot
    # int32 [most tiles × FIELDS]; a slot of -1 has no adapter; tiles past the last have no rows.
    fields: Tensor
    arrivals: Tensor  # int32, zero between launches: one for each tile and block of outputs
    count: int  # programs are launched for this many tiles
    rows: int  # of a tile


def tile_rows(num_rows: int) -> int:
    return 16 if num_rows <= 128 else 32 if num_rows <= 512 else 64


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return the most tiles that this many rows of up to this many adapters, or of none, can make."""
    return min(num_rows, num_rows // tile_rows(num_rows) + num_slots + 1)


def arrange(slots: NDArray[np.int32], num_slots: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the order of rows, and the fields of tiles, [most tiles, FIELDS], for the slot of each row."""
    size = tile_rows(len(slots))
    order = np.argsort(slots, kind="stable").astype(np.int32)
    fields = np.zeros((most_tiles(len(slots), num_slots), FIELDS), dtype=np.int32)
    fields[:, 0] = -1
    present, counts = np.unique(slots, return_counts=True)
    tiles_of = -(-counts // size)
    first = np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    nth = np.arange(len(first)) - first
    used = fields[: len(first)]
    used[:, 0] = np.repeat(present, tiles_of)
    used[:, 1] = np.repeat(np.cumsum(counts) - counts, tiles_of) + nth * size
    used[:, 2] = np.minimum(size, np.repeat(counts, tiles_of) - nth * size)
    return order, fields


@dataclass(frozen=True, slots=True)
class DeltaTable:
    """The adapters of one product, by slot. The matrices of a stacked product are `ends` apart: each has columns of
    its own in `left`, `rank` of them, and no others."""

    base: Tensor  # any tensor of the compute type; addresses count from it, in elements
    lefts: Tensor  # int64 [slots]: of [slices × rank, in]
    rights: Tensor  # int64 [slots]: of [out, rank]
    ranks: Tensor  # int32 [slots]; 0 for adapters that leave the product alone
    most_rank: int
    ends: tuple[int, ...]  # the last is the number of outputs

    @property
    def slices(self) -> int:
        return len(self.ends)


def sliced_ends(heights: Sequence[int]) -> tuple[int, ...]:
    """Return where the matrices of a stack end, if the kernels can tell them apart, else the end of the stack."""
    ends = tuple(np.cumsum(heights).tolist())
    fits = len(heights) <= MOST_SLICES and all(height % 64 == 0 for height in heights)
    return ends if fits else ends[-1:]


_only_compiles = ContextVar("_only_compiles", default=False)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    if _only_compiles.get():
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        _ = getattr(compiled, "run", None)  # builds and loads the launcher
        return
    kernel[grid](*arguments, **options)


def compile_for(table: DeltaTable, num_rows: int, width: int, num_slots: int) -> None:
    """Compile the kernels of a step of this many rows, of this many inputs, without a launch: as layers in Llama's
    style need them, in which a gate comes after two stacked matrices."""
    base = table.base
    count = most_tiles(num_rows, num_slots)
    tiles = Tiles(table.ranks, table.ranks, table.ranks, count, tile_rows(num_rows))
    x = torch.empty(num_rows, width, dtype=base.dtype, device=base.device)
    y = torch.empty(num_rows, table.ends[-1], dtype=base.dtype, device=base.device)
    token = _only_compiles.set(True)
    try:
        shrunk = shrink(x, table, tiles)
        expand(shrunk, table, tiles, y, "silu" if table.slices == 2 else None)
    finally:
        _only_compiles.reset(token)


def _splits(width: int, columns: int, tiles: int) -> tuple[int, int]:
    """Return into how many parts the width is cut, so that few tiles too are work for the whole GPU, and how often
    a program reads `columns`."""
    chunks = cdiv(width, columns)
    steps = cdiv(chunks, MOST_SPLITS)
    while steps < chunks and tiles * cdiv(chunks, steps) > 768:
        steps *= 2
    return cdiv(chunks, steps), steps


def shrink(x: Tensor, table: DeltaTable, tiles: Tiles) -> Tensor:
    """Multiply rows with the left matrices of their adapters. Returns [places, slices × rank]: the places of rows
    follow the tiles."""
    width = x.shape[1]
    columns = SHRINK_COLUMNS // (2 if x.dtype == torch.float32 else 1)
    splits, steps = _splits(width, columns, tiles.count)
    places = tiles.count * tiles.rows
    hidden_width = table.slices * table.most_rank
    blocks = cdiv(hidden_width, SHRINK_OUTPUTS)
    hidden = torch.empty(places, hidden_width, dtype=x.dtype, device=x.device)
    parts = hidden
    if splits > 1:
        parts = torch.empty(splits, places, hidden_width, dtype=torch.float32, device=x.device)
    _launch(
        _shrink_kernel,
        (tiles.count, splits, blocks),
        x,
        table.base,
        table.lefts,
        table.ranks,
        tiles.order,
        tiles.fields,
        parts,
        tiles.arrivals,
        hidden,
        width,
        x.stride(0),
        steps,
        table.slices,
        hidden_width,
        places,
        ROWS=tiles.rows,
        OUTPUTS=SHRINK_OUTPUTS,
        WIDTH=columns,
        SPLITS=splits,
        num_warps=4,
        num_stages=1,
        **launch_options(),
    )
    return hidden


def expand(
    shrunk: Tensor, table: DeltaTable, tiles: Tiles, y: Tensor, gate: Activation | None = None
) -> Tensor:
    """Add to `y`, in place, the products of the right matrices with shrunk rows. With `gate`, return instead the
    gated product of the two halves of the sum; `table` has two slices then."""
    halves = 2 if gate else 1
    outputs = y.shape[1] // halves
    out = torch.empty(y.shape[0], outputs, dtype=y.dtype, device=y.device) if gate else y
    rank = min(MOST_AT_ONCE, next_power_of_2(table.most_rank))
    columns = min(256, EXPAND_SIZE // (rank * halves))
    if table.slices > 1 and not gate:  # a program's outputs belong to one matrix of a stack
        columns = min(columns, *(height & -height for height in np.diff((0, *table.ends)).tolist()))
    _launch(
        _expand_kernel,
        (tiles.count, cdiv(outputs, columns)),
        shrunk,
        table.base,
        table.rights,
        table.ranks,
        tiles.order,
        tiles.fields,
        y,
        out,
        outputs,
        table.ends[0],
        table.ends[1] if table.slices > 1 else outputs,
        shrunk.shape[1],
        KIND=KINDS[gate] if gate else -1,
        ROWS=tiles.rows,
        COLUMNS=columns,
        WIDE=table.most_rank > MOST_AT_ONCE,
        RANK=rank,
        num_warps=4,
        num_stages=1,
        **launch_options(),
    )
    return out
