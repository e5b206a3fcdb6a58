"""Copies of KV blocks between a CUDA device and page-locked host memory, beside the steps.

A block lies in pieces, one for each layer. The device gathers the pieces of several blocks in a buffer, or scatters
them from it, in order with the steps; that takes a fraction of a millisecond. The buffer crosses the bus on a stream
of its own, in one piece for neighbouring slots, while steps continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
