"""Decides from which ranks of a sender a rank reads its part of a block. Arithmetic alone: reads nothing.

A rank has a range of the model's KV heads. If sender and receiver have the same number of ranks, rank i has the same
heads on both sides, and reads whole blocks. Otherwise a rank reads ranges of heads, each from a sender rank that has
them. A single receiver rank reads one half from each of two sender ranks. With fewer KV heads than ranks, several
ranks read the same head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.kv_transfer import KVHeads, KVLayout, MemoryRegion

Layers = tuple[tuple[MemoryRegion, ...], ...]


class TransferError(Exception):
    """KV of another engine cannot be read. Never fatal: the engine that asked for it computes it."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Describes the memory and the meaning of one rank's blocks, by layer."""

    layers: Layers
    num_blocks: int
    model: str  # engines with equal values can exchange blocks
    memory: str = "DRAM"
    device_id: int = 0
    kv_dtype: str = ""
    block_size: int = 0
    heads: KVHeads | None = None  # as in KVLayout
    rank: int = 0
    num_ranks: int = 1

    @property
    def bytes_per_block(self) -> int:
        return sum(region.block_bytes for regions in self.layers for region in regions)


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of a sender, and the KV heads that are read from it; None: whole blocks."""

    layout: KVLayout
    heads: KVHeads | None = None


def sources_of(ours: KVMemory, peer: KVLayout) -> tuple[Source, ...]:
    """Return the ranks of a sender that a rank reads from. Raises TransferError, with the rest of a sentence about
    the sender, if its blocks cannot be used here."""
    if ours.model != peer.model:
        raise TransferError(f"its KV is of {peer.model!r}, and ours of {ours.model!r}")
    if ours.kv_dtype != peer.kv_dtype:
        raise TransferError(f"its KV is stored as {peer.kv_dtype}, and ours as {ours.kv_dtype}")
    if ours.block_size != peer.block_size:
        raise TransferError(f"its blocks have {peer.block_size} tokens, and ours {ours.block_size}")
    ranks = (peer, *peer.others)
    if len(ranks) == ours.num_ranks and ranks[ours.rank].heads == ours.heads:
        source = Source(ranks[ours.rank])
        if _sizes(source.layout.layers) != _sizes(ours.layers):
            raise TransferError("its blocks have another layout")
        return (source,)
    if ours.heads is None or any(rank.heads is None for rank in ranks):
        raise TransferError(
            f"it has {len(ranks)} ranks and this engine {ours.num_ranks}, and layers of this model differ in their "
            "KV heads"
        )
    sources = tuple(_cut(ours.heads, ranks))
    for source in sources:
        if _head_sizes(source.layout.layers, source.layout.heads) != _head_sizes(ours.layers, ours.heads):
            raise TransferError("its blocks have another layout")
    return sources


def _cut(wanted: KVHeads, ranks: Sequence[KVLayout]) -> Iterator[Source]:
    """Yield ranks that together have these heads, and no head twice."""
    head = wanted.start
    while head < wanted.stop:
        holders = [
            rank for rank in ranks if rank.heads is not None and rank.heads.start <= head < rank.heads.stop
        ]
        if not holders:
            raise TransferError(f"none of its ranks has the KV head {head}")
        heads = holders[0].heads
        assert heads is not None
        stop = min(heads.stop, wanted.stop)
        yield Source(holders[0], KVHeads(head, stop))
        head = stop


def pieces(
    layers: Layers, wanted: range, runs: NDArray[np.int64], own: KVHeads | None, heads: KVHeads | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where some heads of some blocks lie in these layers, and how many bytes each piece has. `own` are the
    heads of the memory; without `heads`, pieces are whole blocks. `runs` are rows of (first block, count)."""
    regions = [region for layer in wanted for region in layers[layer]]
    found = [
        _whole(region, runs) if heads is None or own is None else _part(region, runs, own, heads)
        for region in regions
    ]
    return np.concatenate([starts for starts, _ in found]), np.concatenate([sizes for _, sizes in found])


def _whole(region: MemoryRegion, runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return region.address + runs[:, 0] * region.block_bytes, runs[:, 1] * region.block_bytes


def _part(
    region: MemoryRegion, runs: NDArray[np.int64], own: KVHeads, heads: KVHeads
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    blocks = np.concatenate([np.arange(first, first + count) for first, count in runs])
    head_bytes = _head_bytes(region, own)
    strip_bytes = head_bytes * (own.stop - own.start)
    strips = np.arange(region.num_strips) * strip_bytes + (heads.start - own.start) * head_bytes
    starts = region.address + (blocks[:, None] * region.block_bytes + strips[None, :]).reshape(-1)
    return starts, np.full_like(starts, (heads.stop - heads.start) * head_bytes)


def _head_bytes(region: MemoryRegion, own: KVHeads) -> int:
    return region.block_bytes // (region.num_strips * (own.stop - own.start))


def _sizes(layers: Layers) -> list[list[tuple[int, int]]]:
    return [[(region.block_bytes, region.num_strips) for region in regions] for regions in layers]


def _head_sizes(layers: Layers, own: KVHeads | None) -> list[list[tuple[int, int]]]:
    assert own is not None
    return [[(_head_bytes(region, own), region.num_strips) for region in regions] for regions in layers]
