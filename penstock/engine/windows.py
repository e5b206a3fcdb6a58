"""KV storage of models whose layers have windows, and the block tables of their requests. Does not know the
scheduler.

Layers with a window free the blocks behind it (`kvcache.windows`). So that all layers share one pool of blocks, a
block of memory has room for a few layers only: as many as there are layers with full attention. Layers with a window
are divided into parts of that size, each with a block table of its own. To attention, a request in such a part is a
shorter request, which begins at the first block that its tokens attend to; only the rotary embedding uses the true
positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.plan import Chunk, WindowGroup
from penstock.kernels.interface import AttentionBatch, HalvesBlocks, KVRegion, KVStore
from penstock.models.model import LayerWindow

MOST_PARTS = 16
WORTHWHILE = 0.9  # of the memory of the longest context without groups
MOST_WASTE = 1.25  # of the memory of short contexts, in which windows save nothing

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The memory that each layer of a model uses."""

    groups: tuple[WindowGroup, ...]
    num_layers: int  # that a block of memory has room for
    part_of_layer: tuple[int | None, ...]  # counted over all groups; None for layers with full attention
    place_of_layer: tuple[int, ...]  # among the layers of a block

    @property
    def all_have_windows(self) -> bool:
        return None not in self.part_of_layer

    @property
    def num_parts(self) -> int:
        return sum(group.num_parts for group in self.groups)


def lay_out(windows: Sequence[LayerWindow | None], max_model_len: int, block_size: int) -> LayerLayout | None:
    """Divide layers into groups; None if that saves little memory."""
    kinds = [None if each is None or each.size >= max_model_len else each for each in windows]
    for kind in kinds:
        if kind is not None and kind.in_chunks and kind.size % block_size:
            raise ConfigError(
                f"The model attends in chunks of {kind.size} tokens, which blocks of {block_size} do not fill.",
                hint=f"Shorten the context to one chunk: --max-model-len {kind.size}.",
            )
    counts = Counter(kind for kind in kinds if kind is not None)
    if not counts:
        return None
    total, num_whole = len(kinds), len(kinds) - counts.total()
    best: tuple[float, int] | None = None
    for num_layers in range(max(1, num_whole), max(num_whole, *counts.values()) + 1):
        parts = {kind: -(-count // num_layers) for kind, count in counts.items()}
        num_parts, whole = sum(parts.values()), num_layers if num_whole else 0
        short = (whole + num_layers * num_parts) / total
        in_windows = sum(
            count * min(max_model_len, kind.size + 2 * block_size) for kind, count in parts.items()
        )
        long = (whole * max_model_len + num_layers * in_windows) / (total * max_model_len)
        if num_parts <= MOST_PARTS and short <= MOST_WASTE and long <= WORTHWHILE:
            choice = (short + long, -num_layers)  # among equals, the fewest parts
            best = choice if best is None else min(best, choice)
    return None if best is None else _assigned(kinds, counts, -best[1])


def _assigned(
    kinds: Sequence[LayerWindow | None], counts: Mapping[LayerWindow, int], num_layers: int
) -> LayerLayout:
    """Give each layer a place: neighbours share a part, so that kernels prepare for each part once."""
    firsts: dict[LayerWindow, int] = {}  # the first part of each kind
    groups: list[WindowGroup] = []
    for kind, count in counts.items():
        firsts[kind] = sum(group.num_parts for group in groups)
        groups.append(WindowGroup(kind.size, -(-count // num_layers), kind.in_chunks))
    met: Counter[LayerWindow | None] = Counter()
    parts: list[int | None] = []
    places: list[int] = []
    for each in kinds:
        parts.append(None if each is None else firsts[each] + met[each] // num_layers)
        places.append(met[each] % num_layers)
        met[each] += 1
    return LayerLayout(tuple(groups), num_layers, tuple(parts), tuple(places))


class LaidOutKV:
    """A KV store with room for a few layers in each block, seen as a store of all layers."""

    def __init__(self, store: KVStore, places: Sequence[int]) -> None:
        self._store = store
        self._places = places
        self.num_blocks = store.num_blocks
        self.block_size = store.block_size
        self.reserve_host = store.reserve_host
        self.copy_to_host = store.copy_to_host
        self.copy_from_host = store.copy_from_host
        self.read_host = store.read_host
        self.write_block = store.write_block

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    def layer(self, index: int) -> Any:
        return self._store.layer(self._places[index])

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        return self._store.regions(self._places[layer])


class HalvingLaidOutKV(LaidOutKV):
    def __init__(self, store: KVStore, places: Sequence[int]) -> None:
        super().__init__(store, places)
        assert isinstance(store, HalvesBlocks)
        self.copy_half = store.copy_half


def laid_out(store: KVStore, layout: LayerLayout | None) -> KVStore:
    """Return the store as the layers of a model see it."""
    if layout is None or layout.place_of_layer == tuple(range(layout.num_layers)):
        return store
    kind = HalvingLaidOutKV if isinstance(store, HalvesBlocks) else LaidOutKV
    return kind(store, layout.place_of_layer)


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """The tokens of a step in layers with windows."""

    positions: Int64Array  # [T]
    slots: Int32Array  # [parts, T]


@dataclass(frozen=True, slots=True)
class WindowContexts:
    """The contexts of the R sequences of a step in one group. Each sequence starts at its own first visible block."""

    context_lens: Int32Array  # [R]
    block_tables: Int32Array  # [parts of the group, R, width]


class WindowRows:
    """The window blocks of running requests, by row. A request has a bounded number of them: they take turns in the
    columns of a ring."""

    def __init__(self, layout: LayerLayout, max_rows: int, block_size: int, step_tokens: int) -> None:
        self.layout = layout
        self.block_size = block_size
        step = -(-step_tokens // block_size)
        self._rings: list[Int32Array] = [
            np.zeros((max_rows, -(-group.window // block_size) + step + 3, group.num_parts), dtype=np.int32)
            for group in layout.groups
        ]

    def place(self, row: int, chunk: Chunk) -> None:
        for each in chunk.window_blocks:
            ring = self._rings[each.group]
            block_ids = np.array(each.block_ids, dtype=np.int32).reshape(-1, ring.shape[2])
            columns = (each.first + np.arange(len(block_ids))) % ring.shape[1]
            ring[row, columns] = block_ids

    def tokens(self, rows: Int64Array, positions: Int64Array) -> WindowTokens:
        """Return the places of tokens, given the row and the position of each."""
        block_at, offsets = positions // self.block_size, positions % self.block_size
        blocks = [ring[rows, block_at % ring.shape[1]] for ring in self._rings]
        slots = np.concatenate(blocks, axis=1) * self.block_size + offsets[:, None]
        return WindowTokens(positions, np.ascontiguousarray(slots.T, dtype=np.int32))

    def contexts(
        self, group: int, rows: Int64Array, first_positions: Int64Array, context_lens: Int32Array
    ) -> WindowContexts:
        """Return the contexts of sequences in a group, given the position of each one's first query."""
        first = self._first_seen(group, first_positions) // self.block_size
        lengths = (context_lens - first * self.block_size).astype(np.int32)
        width = -(-int(lengths.max()) // self.block_size)
        return WindowContexts(lengths, self._tables(group, rows, first, width))

    def decode_contexts(self, group: int, rows: Int64Array, positions: Int64Array) -> WindowContexts:
        """Return the contexts of single tokens in a group. All tables have the same width, `decode_width`."""
        first = self._first_seen(group, positions) // self.block_size
        lengths = (positions + 1 - first * self.block_size).astype(np.int32)
        return WindowContexts(lengths, self._tables(group, rows, first, self.decode_width(group)))

    def decode_width(self, group: int) -> int:
        """Return the most blocks that one token attends to."""
        each = self.layout.groups[group]
        return -(-each.window // self.block_size) + (0 if each.in_chunks else 1)

    def _first_seen(self, group: int, positions: Int64Array) -> Int64Array:
        each = self.layout.groups[group]
        if each.in_chunks:
            return positions - positions % each.window
        return np.maximum(positions - each.window + 1, 0)

    def _tables(self, group: int, rows: Int64Array, first: Int64Array, width: int) -> Int32Array:
        ring = self._rings[group]
        columns = (first[:, None] + np.arange(width)) % ring.shape[1]
        return np.ascontiguousarray(ring[rows[:, None], columns].transpose(2, 0, 1))


def with_parts(
    batch: AttentionBatch,
    layout: LayerLayout,
    slots: Tensor,
    contexts: Sequence[tuple[Tensor, Tensor | Sequence[Tensor]]],
    bounds: Sequence[Int32Array | int],
) -> AttentionBatch:
    """Return a batch with parts for layers with windows. `slots` are [parts, T]; `contexts` has for each group the
    lengths [R] and the block tables [parts of the group, R, width]; `bounds` has the same lengths on the host, or the
    largest length that they may have."""
    parts: list[AttentionBatch] = []
    for (context_lens, tables), bound in zip(contexts, bounds, strict=True):
        lengths = None
        if not isinstance(bound, int):
            starts = batch.lengths[0] if batch.lengths is not None else batch.query_starts.cpu()
            lengths = starts, torch.from_numpy(bound)
        group = replace(
            batch,
            context_lens=context_lens,
            max_context_len=bound if isinstance(bound, int) else int(bound.max()),
            neighbours=None,  # each token has a table of its own, which begins with its window
            lengths=lengths,
        )
        for table in tables:
            parts.append(replace(group, slots=slots[len(parts)], block_tables=table, part=len(parts)))
    return replace(batch, parts=tuple(parts), part_of_layer=layout.part_of_layer)
