"""The KV cache as the Triton kernels read it: [blocks, G, block size, D] per layer, with scales
[blocks, G, block size] where entries are int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.tensor_kv import TensorKVStore


@dataclass(frozen=True, slots=True)
class PagedLayer:
    keys: Tensor  # [blocks, G, block size, D]
    values: Tensor
    key_scales: Tensor | None  # float32 [blocks, G, block size], of int8
    value_scales: Tensor | None

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def scale_pointers(self) -> tuple[Tensor, Tensor]:
        """Return the pointers to scales. Where there are no scales, kernels get a pointer that they never read."""
        return (
            self.keys if self.key_scales is None else self.key_scales,
            self.values if self.value_scales is None else self.value_scales,
        )


class PagedKV(TensorKVStore):
    """The KV cache. One block more than `num_blocks` takes the writes of padding rows."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape` is layers, blocks, G, block size, D."""
        layers, blocks, *rest = shape
        super().__init__((layers, blocks + 1, *rest), dtype, device)
        self.num_blocks, self.block_size = blocks, shape[3]

    def layer(self, index: int) -> PagedLayer:
        key_scales, value_scales = (
            None if scales is None else scales[index] for scales in (self.key_scales, self.value_scales)
        )
        return PagedLayer(self.keys[index], self.values[index], key_scales, value_scales)
