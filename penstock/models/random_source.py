"""Weights made up from nothing but their names and shapes, for benchmarks and tests of speed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from penstock.kernels.interface import DenseWeight

_STANDARD_DEVIATION = 0.02


class RandomSource:
    """Matrices and biases from N(0, 0.02), norms as if they were 1. A tensor depends on the seed and its name
    alone, not on what was asked for before."""

    def __init__(self, seed: int, *, norm_offset: float, device: torch.device) -> None:
        self._seed = seed
        self._device = device  # drawn where they are used: a GPU fills itself in seconds
        self._norm_weight = 1.0 - norm_offset

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str, rows: int, columns: int) -> DenseWeight:
        return DenseWeight(self._normal(name, rows, columns))

    def vector(self, name: str, size: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full((size,), self._norm_weight, device=self._device)
        return self._normal(name, size)

    def _normal(self, name: str, *shape: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.empty(*shape, device=self._device).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
