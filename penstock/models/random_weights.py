"""Draws random weights, for tests, benchmarks and plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.interface import (
    DenseWeight,
    WeightData,
)
from penstock.models.weight_parts import Part, take_part

_STANDARD_DEVIATION = 0.02


QuantizeMatrix = Callable[[str, DenseWeight], WeightData]


class RandomSource:
    """Random weights: matrices and biases from N(0, 0.02), and norms that act as 1. A tensor depends on the seed and
    its name alone, so a part of it has the same values as in the whole tensor."""

    bytes_read = 0

    def __init__(
        self, seed: int, *, norm_offset: float, device: torch.device, stored: QuantizeMatrix | None = None
    ) -> None:
        """`stored` converts a matrix of this name to the form in which a checkpoint would hold it."""
        self._seed = seed
        self._device = device  # drawn where they are used: a GPU fills itself in seconds
        self._norm_weight = 1.0 - norm_offset
        self._stored = stored

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str, rows: int, columns: int, part: Part | None = None) -> WeightData:
        values = self._normal(name, rows, columns)
        if self._stored is not None:
            whole = self._stored(name, DenseWeight(values))
            return whole if part is None else take_part(whole, part)
        if part is not None:
            taken = values[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
            values = taken.clone()  # so that the rest of the matrix is freed
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
