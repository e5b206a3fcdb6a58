"""Host memory that a GPU can read on its own, so that small copies never make the host wait.

Copies go through page-locked buffers used in turn. A buffer comes round again only after as many steps as there are
buffers, by when the executor has collected the step that used it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_STEPS_IN_FLIGHT = 4
ALIGNMENT = 16


class Staging:
    """Turns numpy arrays into device tensors. On a CPU they are the same memory, and nothing is copied."""

    def __init__(self, device: torch.device, bytes_per_step: int) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        if device.type == "cuda":
            self._buffers = [
                torch.empty(bytes_per_step, dtype=torch.uint8, pin_memory=True)
                for _ in range(MAX_STEPS_IN_FLIGHT + 1)
            ]
        self._current = 0
        self._used = 0

    def next_step(self) -> None:
        if self._buffers:
            self._current = (self._current + 1) % len(self._buffers)
            self._used = 0

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        source = torch.from_numpy(np.ascontiguousarray(array))
        if not self._buffers:
            return source
        end = self._used + source.nbytes
        buffer = self._buffers[self._current]
        if end > buffer.nbytes:  # rare: a plain, waiting copy is correct too
            return source.to(self._device)
        pinned = buffer[self._used : end].view(source.dtype).view(source.shape)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        pinned.copy_(source)
        return pinned.to(self._device, non_blocking=True)
