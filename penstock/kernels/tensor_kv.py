"""KV stores made of torch tensors, and their copies in host memory. Knows no layout beyond [layer, block, …].

Keys and values are kept in the type that the backend computes in, in float8, or in int8 with a scale of its own for
every token and head: entry = code × scale.

On CUDA the host memory is page-locked, and copies are asynchronous. A block lies in pieces, one for each layer. The
device gathers the pieces of several blocks in a buffer, or scatters them from it, in order with the steps; that
takes a fraction of a millisecond. The buffer crosses the bus on a stream of its own, in one piece for neighbouring
slots, while steps continue.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.interface import KVRegion

BUFFER_BYTES = 256 << 20
_NUM_PARTS = 4  # of the buffer: one is filled while others cross the bus
_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def buffer_bytes(total_bytes: int) -> int:
    """Return the size of the buffer, of a device that has `total_bytes` for a KV cache."""
    return min(BUFFER_BYTES, total_bytes // 64)


class HostCopies:
    """All copies of one KV store. A copy to a slot comes before later copies from that slot."""

    def __init__(self, tensors: Sequence[Tensor], slots: Sequence[Tensor], num_bytes: int) -> None:
        """`tensors` are [layers, blocks, …] on the device, `slots` [slots, layers, …] in host memory. The buffer has
        about `num_bytes`, and room for one block at least."""
        device = tensors[0].device
        block_bytes = sum(each[0].nbytes for each in slots)
        self._part_blocks = max(1, num_bytes // (_NUM_PARTS * block_bytes))
        self._blocks = [_as_numbers(each).transpose(0, 1) for each in tensors]  # [blocks, layers, …]
        self._slots = [_as_numbers(each) for each in slots]
        self._parts = [
            [
                torch.empty((self._part_blocks, *each.shape[1:]), dtype=each.dtype, device=device)
                for each in self._slots
            ]
            for _ in range(_NUM_PARTS)
        ]
        self._stream = torch.cuda.Stream(device)
        self._used = [torch.cuda.Event() for _ in range(_NUM_PARTS)]  # the last use of each part
        self._next = 0

    def to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for some_ids, some_slots in self._pieces(block_ids, slots):
            part, used = self._take_part()
            steps = torch.cuda.current_stream()
            steps.wait_event(used)
            ids = _on_device(some_ids, part[0].device)
            for buffer, blocks in zip(part, self._blocks, strict=True):
                torch.index_select(blocks, 0, ids, out=buffer[: len(some_ids)])
            self._stream.wait_event(steps.record_event())
            with torch.cuda.stream(self._stream):
                for buffer, target in zip(part, self._slots, strict=True):
                    for start, end in _runs(some_slots):
                        first = some_slots[start]
                        target[first : first + end - start].copy_(buffer[start:end], non_blocking=True)
                used.record()

    def from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for some_ids, some_slots in self._pieces(block_ids, slots):
            part, used = self._take_part()
            self._stream.wait_event(used)
            with torch.cuda.stream(self._stream):
                for buffer, source in zip(part, self._slots, strict=True):
                    for start, end in _runs(some_slots):
                        first = some_slots[start]
                        buffer[start:end].copy_(source[first : first + end - start], non_blocking=True)
            steps = torch.cuda.current_stream()
            steps.wait_event(self._stream.record_event())
            ids = _on_device(some_ids, part[0].device)
            for buffer, blocks in zip(part, self._blocks, strict=True):
                blocks.index_copy_(0, ids, buffer[: len(some_ids)])
            used.record(steps)

    def finish(self) -> None:
        """Wait until everything has arrived in host memory."""
        self._stream.synchronize()

    def _pieces(
        self, block_ids: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for start in range(0, len(block_ids), self._part_blocks):
            end = start + self._part_blocks
            yield block_ids[start:end], slots[start:end]

    def _take_part(self) -> tuple[list[Tensor], torch.cuda.Event]:
        at, self._next = self._next, (self._next + 1) % _NUM_PARTS
        return self._parts[at], self._used[at]


def _as_numbers(tensor: Tensor) -> Tensor:
    """View a tensor as whole numbers that are as wide as its last dimension allows: torch cannot index float8, and
    moves wide numbers faster."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    width = next(width for width in _WIDTHS if row_bytes % width == 0)
    return tensor.view(_WIDTHS[width])


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers without waiting for the device."""
    return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where runs of neighbouring slots start and end."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield start, at
            start = at


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
