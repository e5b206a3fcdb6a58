"""KV stores made of torch tensors, and their copies in host memory. Knows no layout beyond [layer, block, …].

Keys and values are kept in the type that the backend computes in, in float8, or in int8 with a scale of its own for
every token and head: entry = code × scale.

On CUDA the host memory is page-locked, and copies are asynchronous (`host_copies`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.host_copies import HostCopies, buffer_bytes
from penstock.kernels.interface import KVRegion

LARGEST_CODE = 127
SCALE_TYPE = torch.float32


def to_codes(entries: Tensor) -> tuple[Tensor, Tensor]:
    """[…, D] → int8 of the same shape, and its scales […]."""
    wide = entries.float()
    scales = wide.abs().amax(dim=-1).clamp_min(1e-12) / LARGEST_CODE
    return torch.floor(wide / scales.unsqueeze(-1) + 0.5).to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class TorchKVPart:
    """The keys, or the values, of one layer, read and written by torch."""

    entries: Tensor  # [blocks, block size, G, D]
    scales: Tensor | None  # [blocks, block size, G], of int8

    def write(self, slots: Tensor, new: Tensor, column: int = 0) -> None:
        """[T, G, D], to slots [T]. Fewer columns than D are written from `column` on."""
        if self.scales is None:
            kept = new.to(self.entries.dtype)
        else:
            kept, scales = to_codes(new)
            self.scales.view(-1, scales.shape[-1])[slots] = scales
        # As bytes, because torch cannot assign float8 by index.
        as_bytes = kept.contiguous().view(torch.uint8)
        stored = self.entries.view(torch.uint8).flatten(0, 1)
        first = column * self.entries.element_size()
        stored[slots, :, first : first + as_bytes.shape[2]] = as_bytes

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """float32 [count, G, D]: the first tokens of these blocks."""
        entries = self.entries[blocks].flatten(0, 1)[:count].float()
        if self.scales is None:
            return entries
        return entries * self.scales[blocks].flatten(0, 1)[:count].unsqueeze(-1)


class TensorKVStore:
    """`layer`, which depends on the layout, is for subclasses."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Keys and values are `shape`: [layers, blocks, …, D]. A subclass may have spare blocks, and says what
        `num_blocks` and `block_size` are."""
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.key_scales: Tensor | None = None  # [layers, blocks, …] of int8
        self.value_scales: Tensor | None = None
        if dtype == torch.int8:
            self.key_scales, self.value_scales = (
                torch.zeros(shape[:-1], dtype=SCALE_TYPE, device=device) for _ in range(2)
            )
        self._host: list[Tensor] = []  # for each of `tensors`
        self._copies: HostCopies | None = None  # on CUDA

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a block consists of, each [layers, blocks, …]."""
        parts = self.keys, self.values, self.key_scales, self.value_scales
        return tuple(part for part in parts if part is not None)

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        return tuple(
            KVRegion(
                tensor[layer].data_ptr(),
                tensor.stride(1) * tensor.element_size(),
                tensor.shape[1],
                self.num_strips,
            )
            for tensor in self.tensors
        )

    @property
    def num_strips(self) -> int:
        """Return how many pieces with all KV heads a block consists of in each of `tensors`."""
        return 1

    @property
    def block_bytes(self) -> int:
        return sum(tensor[:, 0].numel() * tensor.element_size() for tensor in self.tensors)

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        sources, targets = sources.flatten(), targets.flatten()
        for tensor in self.tensors:
            # As bytes, because torch cannot assign float8 by index.
            stored = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            size = stored.shape[2]
            stored[:, targets // size, targets % size] = stored[:, sources // size, sources % size]

    def reserve_host(self, num_slots: int) -> None:
        tensors = self.tensors
        self._host = [_host_slots(tensor, num_slots) for tensor in tensors]
        if tensors[0].device.type == "cuda":
            num_bytes = buffer_bytes(sum(each.nbytes for each in tensors))
            self._copies = HostCopies(tensors, self._host, num_bytes)

    def copy_to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        if self._copies is not None:
            self._copies.to_host(block_ids, slots)
            return
        for block_id, slot in zip(block_ids, slots, strict=True):
            for host, tensor in zip(self._host, self.tensors, strict=True):
                host[slot].copy_(tensor[:, block_id])

    def copy_from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        if self._copies is not None:
            self._copies.from_host(slots, block_ids)
            return
        for slot, block_id in zip(slots, block_ids, strict=True):
            for host, tensor in zip(self._host, self.tensors, strict=True):
                tensor[:, block_id].copy_(host[slot])

    def read_host(self, slot: int) -> bytes:
        if self._copies is not None:
            self._copies.finish()
        return b"".join(host[slot].view(torch.uint8).numpy().tobytes() for host in self._host)

    def write_block(self, block_id: int, contents: bytes) -> None:
        start, whole = 0, torch.frombuffer(bytearray(contents), dtype=torch.uint8)
        for tensor in self.tensors:
            place = tensor[:, block_id]
            end = start + place.numel() * place.element_size()
            place.copy_(whole[start:end].view(tensor.dtype).view(place.shape))
            start = end


def _host_slots(store: Tensor, num_slots: int) -> Tensor:
    """Slots come first, so that one is a single piece of memory: a strided copy would make the host wait."""
    shape = (num_slots, store.shape[0], *store.shape[2:])
    if store.device.type != "cuda":
        return torch.empty(shape, dtype=store.dtype)
    # Filled by all cores, then locked: taken as locked memory at once, one core would fill it.
    slots = torch.zeros(shape, dtype=store.dtype)
    if torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.nbytes, 0) != 0:
        raise MemoryError(f"the system does not lock {slots.nbytes} bytes")
    unlock = weakref.finalize(slots, torch.cuda.cudart().cudaHostUnregister, slots.data_ptr())
    unlock.atexit = False  # the end of the process does it
    return slots
