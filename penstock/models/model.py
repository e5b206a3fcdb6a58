"""What the engine sees of a model. Knows no architecture and no file format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.config import ArchitectureConfig


class Model(Protocol):
    config: ArchitectureConfig
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was loaded for
    num_parameters: int
    weight_bytes: int  # as packed by the backend

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """int32 [T] → [T, hidden], after the final norm. Writes the tokens' keys and values to `kv`."""
        ...

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Rows of what `forward` returned, [S, hidden] → float32 [S, V]"""
        ...
