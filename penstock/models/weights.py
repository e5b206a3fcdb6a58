"""Where weights come from, and how a model asks for them. Does not know file formats or architectures.

Names are those of Hugging Face checkpoints of text models (`model.layers.0.self_attn.q_proj.weight`); a source
that stores others translates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.core.config import Quantization
from penstock.kernels.interface import (
    DenseWeight,
    ExpertWeights,
    Ops,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    WeightData,
)
from penstock.models.quantize import quantize

OnProgress = Callable[[str, float], None]


class WeightSource(Protocol):
    """Tensors by name, read one at a time when asked for. A tensor that is missing, or not of the shape the model
    expects, is a ModelLoadError."""

    def names(self) -> frozenset[str]: ...

    def matrix(self, name: str, rows: int, columns: int) -> WeightData: ...

    def vector(self, name: str, size: int) -> Tensor:
        """float32 [size] on the host."""
        ...


class ExpertNames(NamedTuple):
    """What a checkpoint calls the three matrices of one expert."""

    gate: str
    up: str
    down: str


class WeightLoader:
    """Packs a source's weights for a backend, one layer at a time, and keeps count."""

    def __init__(
        self,
        source: WeightSource,
        ops: Ops,
        *,
        quantization: Quantization | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.ops = ops
        self.num_parameters = 0
        self.weight_bytes = 0
        self._source = source
        self._names = source.names()
        self._quantization = quantization
        self._on_progress = on_progress
        self._num_loaded = 0

    def has(self, name: str) -> bool:
        return name in self._names

    def vector(self, name: str, size: int, *, plus: float = 0.0) -> Tensor:
        """float32 on the backend's device, for norms."""
        values = self._host_vector(name, size)
        self.weight_bytes += values.nbytes
        return (values + plus).to(self.ops.device)

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns] on the backend's device, for embeddings that are looked up as they are."""
        weight = self._matrix(name, rows, columns)
        values = weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()
        self.weight_bytes += values.nbytes
        return values.to(self.ops.device)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool = False
    ) -> PackedLinear:
        """The matrices `{name}.weight`, stacked, with the vectors `{name}.bias` when `bias` is set."""
        parts = [
            self._quantized(f"{name}.weight", height, columns)
            for name, height in zip(names, rows, strict=True)
        ]
        biases = None
        if bias:
            biases = torch.cat(
                [self._host_vector(f"{name}.bias", height) for name, height in zip(names, rows, strict=True)]
            )
        packed = self.ops.pack_linear(parts, biases)
        self.weight_bytes += packed.num_bytes
        return packed

    def experts(
        self, names: Sequence[ExpertNames], intermediate_size: int, hidden_size: int
    ) -> PackedExperts:
        packed = self.ops.pack_experts(
            ExpertWeights(
                gate=self._quantized(f"{expert.gate}.weight", intermediate_size, hidden_size),
                up=self._quantized(f"{expert.up}.weight", intermediate_size, hidden_size),
                down=self._quantized(f"{expert.down}.weight", hidden_size, intermediate_size),
            )
            for expert in names
        )
        self.weight_bytes += packed.num_bytes
        return packed

    def embedding_and_head(
        self, vocab_size: int, hidden_size: int, *, tied: bool
    ) -> tuple[PackedEmbedding, PackedLinear]:
        weight = self._matrix("model.embed_tokens.weight", vocab_size, hidden_size)
        if tied:
            head = self.ops.pack_linear([weight])
            table = self.ops.pack_embedding(weight, tied=head)
            self.weight_bytes += head.num_bytes + table.num_bytes
            return table, head
        table = self.ops.pack_embedding(weight)
        self.weight_bytes += table.num_bytes
        return table, self.linear(["lm_head"], [vocab_size], hidden_size)

    def _quantized(self, name: str, rows: int, columns: int) -> WeightData:
        """A matrix in the type that was asked for."""
        matrix = self._matrix(name, rows, columns)
        if self._quantization is not None and isinstance(matrix, DenseWeight):
            return quantize(matrix, self._quantization)
        return matrix

    def _matrix(self, name: str, rows: int, columns: int) -> WeightData:
        weight = self._source.matrix(name, rows, columns)
        self._count(rows * columns)
        return weight

    def _host_vector(self, name: str, size: int) -> Tensor:
        values = self._source.vector(name, size)
        self._count(size)
        return values

    def _count(self, num_parameters: int) -> None:
        self.num_parameters += num_parameters
        self._num_loaded += 1
        if self._on_progress is not None:
            # A checkpoint may hold tensors that the model does not use, and the other way round.
            self._on_progress("Loading weights", min(1.0, self._num_loaded / max(1, len(self._names))))
