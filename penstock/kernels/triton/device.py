"""Properties of the device that kernels ask for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LARGEST_TILE = 256  # rows of a product's tile


# Triton's own functions of these names are made for kernels as well, and take a hundred times as long.
def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 0


@functools.cache
def num_processors(device_index: int) -> int:
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised matrix with memory for whole tiles of rows (`in_whole_tiles`)."""
    return torch.empty(_whole(num_rows), width, dtype=dtype, device=device)[:num_rows]


def in_whole_tiles(x: Tensor) -> Tensor:
    """Return x with rows behind its last one, where its memory has them. They may hold anything. Hopper's copy engine
    takes up to a quarter longer for tiles that end outside of a matrix."""
    num_rows, width = _whole(x.shape[0]), x.shape[1]
    end = (x.storage_offset() + num_rows * width) * x.element_size()
    return x.as_strided((num_rows, width), (width, 1)) if end <= x.untyped_storage().nbytes() else x


def _whole(num_rows: int) -> int:
    """Few rows are one tile, whose size is a power of two."""
    tile = min(LARGEST_TILE, max(16, 1 << (num_rows - 1).bit_length())) if num_rows else 1
    return -(-num_rows // tile) * tile
