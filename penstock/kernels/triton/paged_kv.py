"""The KV cache as the Triton kernels read it: [blocks, G, block size, D] per layer, with scales
[blocks, G, block size] where entries are int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.tensor_kv import TensorKVStore
from penstock.kernels.triton.device import next_power_of_2


@triton.jit(do_not_specialize=["count", "blocks"], do_not_specialize_on_alignment=["sources", "targets"])
def _move_kernel(
    keys, values, key_scales, value_scales, sources, targets, count, blocks,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Move tokens of one request, in one head of one layer: one after the other, so that a thread has read a source
    before it writes there."""
    layer, group = tl.program_id(0).to(tl.int64) // G, tl.program_id(0) % G
    dims = tl.arange(0, D_PAD)
    inside = dims < D
    for index in range(count):
        source = tl.load(sources + tl.program_id(1) * count + index)
        target = tl.load(targets + tl.program_id(1) * count + index)
        if source != target:
            old = ((layer * blocks + source // BLOCK_SIZE) * G + group) * BLOCK_SIZE + source % BLOCK_SIZE
            new = ((layer * blocks + target // BLOCK_SIZE) * G + group) * BLOCK_SIZE + target % BLOCK_SIZE
            key = tl.load(keys + old * D + dims, mask=inside)
            value = tl.load(values + old * D + dims, mask=inside)
            tl.store(keys + new * D + dims, key, mask=inside)
            tl.store(values + new * D + dims, value, mask=inside)
            if HAS_SCALES:
                tl.store(key_scales + new, tl.load(key_scales + old))
                tl.store(value_scales + new, tl.load(value_scales + old))


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

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        layers, blocks, groups, size, dim = self.keys.shape
        parts = [
            each.view(torch.uint8) if each.element_size() == 1 else each for each in (self.keys, self.values)
        ]
        scales = (self.key_scales, self.value_scales)
        _move_kernel[(layers * groups, len(sources))](
            *parts,
            *(part if scale is None else scale for part, scale in zip(parts, scales, strict=True)),
            sources.contiguous(),
            targets.contiguous(),
            sources.shape[1],
            blocks,
            G=groups,
            D=dim,
            D_PAD=next_power_of_2(dim),
            BLOCK_SIZE=size,
            HAS_SCALES=self.key_scales is not None,
            num_warps=1,
        )

    def layer(self, index: int) -> PagedLayer:
        key_scales, value_scales = (
            None if scales is None else scales[index] for scales in (self.key_scales, self.value_scales)
        )
        return PagedLayer(self.keys[index], self.values[index], key_scales, value_scales)
