"""Weights made up from nothing but their names and shapes, for benchmarks and tests of speed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from penstock.kernels.interface import DenseWeight
from penstock.models.weight_parts import Part

_STANDARD_DEVIATION = 0.02


class RandomSource:
    """Matrices and biases from N(0, 0.02), norms as if they were 1. A tensor depends on the seed and its name
    alone, not on what was asked for before: of a part, the rest is drawn too."""

    bytes_read = 0

    def __init__(self, seed: int, *, norm_offset: float, device: torch.device) -> None:
        self._seed = seed
        self._device = device  # drawn where they are used: a GPU fills itself in seconds
        self._norm_weight = 1.0 - norm_offset

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> DenseWeight:
        values = self._normal(name, rows, columns)
        if part is not None:
            taken = values[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
            values = taken.clone()  # lets the rest go
        return DenseWeight(values)

    def vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full((size,), self._norm_weight, device=self._device)
        values = self._normal(name, size)
        return values if part is None else values[part.start : part.stop]

    def _normal(self, name: str, *shape: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.empty(*shape, device=self._device).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
