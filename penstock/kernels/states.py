"""The memory of layers with a fixed state: for each layer some tensors with a slot for every request or snapshot.

All values are float32, in any compute dtype: a state sums up thousands of tokens. Steps address slots by
an index tensor, so a CUDA graph of a step serves any requests. The slot after the last one belongs to no request:
padded rows of a graph write there. Copies and steps take effect in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

STATE_TYPE = torch.float32

StateShapes = tuple[tuple[int, ...], ...]  # the shapes of one layer's tensors, for one request


def state_bytes(layers: Sequence[StateShapes]) -> int:
    """Return the bytes of one slot in all layers."""
    return sum(prod(shape) for shapes in layers for shape in shapes) * STATE_TYPE.itemsize


class StateStore:
    def __init__(self, layers: Sequence[StateShapes], num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.slot_bytes = state_bytes(layers)
        self._layers = [
            tuple(torch.zeros((num_slots + 1, *shape), dtype=STATE_TYPE, device=device) for shape in shapes)
            for shapes in layers
        ]
        self._tensors = [tensor for layer in self._layers for tensor in layer]
        self._host: list[Tensor] = []  # for each of `_tensors`

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer, each [slots + 1, …]."""
        return self._layers[index]

    def reserve_host(self, num_slots: int) -> None:
        """Take host memory for this many slots; once, before the first copy."""
        self._host = [
            torch.empty(
                (num_slots, *tensor.shape[1:]), dtype=STATE_TYPE, pin_memory=tensor.device.type == "cuda"
            )
            for tensor in self._tensors
        ]

    def clear(self, slot: int) -> None:
        for tensor in self._tensors:
            tensor[slot].zero_()

    def copy(self, from_slot: int, slot: int) -> None:
        for tensor in self._tensors:
            tensor[slot].copy_(tensor[from_slot])

    def copy_to_host(self, from_slot: int, slot: int) -> None:
        for host, tensor in zip(self._host, self._tensors, strict=True):
            host[slot].copy_(tensor[from_slot], non_blocking=True)

    def copy_from_host(self, from_slot: int, slot: int) -> None:
        for host, tensor in zip(self._host, self._tensors, strict=True):
            tensor[slot].copy_(host[from_slot], non_blocking=True)


class NoKV:
    """The KV store of a model without attention. Blocks are ids without memory."""

    block_bytes = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

    def layer(self, index: int) -> None:
        return None

    def regions(self, layer: int) -> tuple[()]:
        return ()

    def reserve_host(self, num_slots: int) -> None: ...

    def copy_to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None: ...

    def copy_from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None: ...

    def read_host(self, slot: int) -> bytes:
        return b""

    def write_block(self, block_id: int, contents: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The slots of the states of a step's requests."""

    store: StateStore
    slots: Tensor  # int64 [R] on the device


@dataclass(frozen=True, slots=True)
class ScanLayer:
    """The settings of a selective scan with H heads. Head h reads the inputs and outputs of group `groups[h]`."""

    decay: Tensor  # float32 [H], negative
    skip: Tensor  # float32 [H]: the share of a head's input that is added to its output
    step_bias: Tensor  # float32 [H]
    groups: Tensor  # int64 [H]
    step_limits: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True)
class ChannelScanLayer:
    """The settings of a scan over C channels, each with N decays of its own."""

    decay: Tensor  # float32 [C, N], negative
    skip: Tensor  # float32 [C]: the share of a channel's input that is added to its output
    step_bias: Tensor  # float32 [C]


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The settings of a gated delta rule with H value heads. Head h has the query and the key of head `keys[h]`."""

    decay: Tensor  # float32 [H], negative
    step_bias: Tensor  # float32 [H]
    keys: Tensor  # int64 [H]
    num_keys: int  # key heads
    key_dim: int
    largest_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class ChannelDeltaLayer:
    """The settings of a delta rule with H heads, each of whose keys has K decays of its own."""

    decay: Tensor  # float32 [H], negative
    step_bias: Tensor  # float32 [H, K]
