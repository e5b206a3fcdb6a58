"""The interface of a model, as the engine uses it. Knows no architecture and no file format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore, Ops
from penstock.models.config import ArchitectureConfig
from penstock.models.weights import NamedProduct


class Model(Protocol):
    config: ArchitectureConfig
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was loaded for
    num_parameters: int
    weight_bytes: int  # as packed by the backend
    products: Sequence[NamedProduct]  # its matrices, for what is added to them (LoRA)

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """int32 [T] → [T, hidden], after the final norm. Writes the tokens' keys and values to `kv`."""
        ...

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Rows of what `forward` returned, [S, hidden] → float32 [S, V]"""
        ...

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        """[S, hidden] → int64 [S], what a greedy draw takes of `logits`; None where that is not quicker."""
        ...

    def with_ops(self, ops: Ops) -> Model:
        """The same weights, run by other operations."""
        ...

    def with_distinct_layers(self) -> Model:
        """One layer of each kind, which is enough to meet every kernel that the model needs."""
        ...


class StagedModel(Model, Protocol):
    """A model whose forward pass can be taken apart, for a pipeline: `embed`, `run_layers`, `normed`."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """int32 [T] → [T, hidden]: what enters the first layer."""
        ...

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        """Through the layers that are here, in place."""
        ...

    def normed(self, residual: Tensor) -> Tensor:
        """What leaves the last layer, after the final norm."""
        ...
