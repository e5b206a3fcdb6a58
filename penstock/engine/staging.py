"""Copies host arrays to the device. Knows no request.

Copies to a GPU go through page-locked buffers used in turn, so that the host does not wait. A buffer is used again
only after as many steps as there are buffers; by then the executor has collected the step that used the buffer.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_STEPS_IN_FLIGHT = 4
ALIGNMENT = 16


class Staging:
    """Turns numpy arrays into device tensors. On a CPU, both share memory, and nothing is copied."""

    def __init__(self, device: torch.device, bytes_per_step: int) -> None:
        self.device = device
        self._buffers: list[Tensor] = []
        if device.type == "cuda":
            self._buffers = [
                torch.empty(bytes_per_step, dtype=torch.uint8, pin_memory=True)
                for _ in range(MAX_STEPS_IN_FLIGHT + 1)
            ]
        self._current = 0
        self._used = 0
        self._kept: tuple[tuple[object, bytes], Tensor] | None = None

    def next_step(self) -> None:
        if self._buffers:
            self._current = (self._current + 1) % len(self._buffers)
            self._used = 0

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return self.all_to_device(array)[0]

    def all_to_device(self, *arrays: NDArray[np.generic]) -> list[Tensor]:
        """Copy several arrays at once, because the cost of a small copy is its launch."""
        sources = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if not self._buffers:
            return sources
        offsets = [0]
        for source in sources:
            offsets.append(offsets[-1] + -(-source.nbytes // ALIGNMENT) * ALIGNMENT)
        pinned = self._take(offsets[-1])
        if pinned is None:
            return [source.to(self.device) for source in sources]
        for source, offset in zip(sources, offsets, strict=False):
            _part(pinned, offset, source).copy_(source)
        copied = pinned.to(self.device, non_blocking=True)
        return [_part(copied, offset, source) for source, offset in zip(sources, offsets, strict=False)]

    def kept(self, array: NDArray[np.generic]) -> Tensor:
        """Return the array on the device. An array with the same contents as in the last call is not copied again:
        most steps have the rows of the step before. Nothing may write to the result."""
        if not self._buffers:
            return torch.from_numpy(array)
        contents = array.dtype, array.tobytes()
        if self._kept is None or self._kept[0] != contents:
            self._kept = contents, self.to_device(array)
        return self._kept[1]

    def copy_into(self, target: Tensor, array: NDArray[np.generic]) -> None:
        """Overwrite the beginning of a one-dimensional device tensor."""
        source = torch.from_numpy(array)
        pinned = self._take(source.nbytes)
        if pinned is not None:
            source = _part(pinned, 0, source).copy_(source)
        target[: source.numel()].copy_(source, non_blocking=True)

    def _take(self, num_bytes: int) -> Tensor | None:
        """Return page-locked memory of this step; None when it is used up, which is rare: a plain, waiting copy is
        correct too."""
        if not self._buffers or self._used + num_bytes > self._buffers[self._current].nbytes:
            return None
        start, self._used = self._used, -(-(self._used + num_bytes) // ALIGNMENT) * ALIGNMENT
        return self._buffers[self._current][start : start + num_bytes]


def _part(slab: Tensor, offset: int, like: Tensor) -> Tensor:
    return slab[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
