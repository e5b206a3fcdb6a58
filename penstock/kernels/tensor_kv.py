"""KV stores made of torch tensors, and their copies in host memory. Knows no layout beyond [layer, block, …].

On CUDA the host memory is page-locked and copies are asynchronous, on the stream that computes: steps and copies
cannot overtake each other, and the host waits for neither.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TensorKVStore:
    """`layer`, which depends on the layout, is for subclasses."""

    def __init__(self, keys: Tensor, values: Tensor, num_blocks: int, block_size: int) -> None:
        """Keys and values are [layers, blocks, …] and may have spare blocks beyond `num_blocks`."""
        self.keys = keys
        self.values = values
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._host_keys: Tensor | None = None
        self._host_values: Tensor | None = None

    @property
    def block_bytes(self) -> int:
        return self.keys[:, 0].numel() * self.keys.element_size() * 2

    def reserve_host(self, num_slots: int) -> None:
        self._host_keys = _host_slots(self.keys, num_slots)
        self._host_values = _host_slots(self.values, num_slots)

    def copy_to_host(self, block_id: int, slot: int) -> None:
        assert self._host_keys is not None
        assert self._host_values is not None
        self._host_keys[slot].copy_(self.keys[:, block_id], non_blocking=True)
        self._host_values[slot].copy_(self.values[:, block_id], non_blocking=True)

    def copy_from_host(self, slot: int, block_id: int) -> None:
        assert self._host_keys is not None
        assert self._host_values is not None
        self.keys[:, block_id].copy_(self._host_keys[slot], non_blocking=True)
        self.values[:, block_id].copy_(self._host_values[slot], non_blocking=True)


def _host_slots(store: Tensor, num_slots: int) -> Tensor:
    """Slots come first, so that one is a single piece of memory: a strided copy would make the host wait."""
    shape = (num_slots, store.shape[0], *store.shape[2:])
    return torch.empty(shape, dtype=store.dtype, pin_memory=store.device.type == "cuda")
