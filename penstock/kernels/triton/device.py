"""Properties of the device that kernels ask for."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_processors(device_index: int) -> int:
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(device_index).multi_processor_count
