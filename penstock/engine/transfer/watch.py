"""A KV store that tells when the model goes on to its next layer, so that KV can leave while a step still runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.kernels.interface import HalvesBlocks, KVRegion, KVStore


class WatchedKVStore:
    """Implements KVStore. A model asks for a layer's KV when it is about to write it: all layers before are written,
    or on a GPU are queued to be."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.num_blocks = store.num_blocks
        self.block_size = store.block_size
        self.on_layer: Callable[[int], None] | None = None

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    def layer(self, index: int) -> Any:
        if self.on_layer is not None:
            self.on_layer(index)
        return self._store.layer(index)

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        return self._store.regions(layer)

    def reserve_host(self, num_slots: int) -> None:
        self._store.reserve_host(num_slots)

    def copy_to_host(self, block_id: int, slot: int) -> None:
        self._store.copy_to_host(block_id, slot)

    def copy_from_host(self, slot: int, block_id: int) -> None:
        self._store.copy_from_host(slot, block_id)

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        assert isinstance(self._store, HalvesBlocks), "whoever halves blocks can copy halves"
        self._store.copy_half(block_id, offset, to_block_id)
