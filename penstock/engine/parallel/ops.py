"""`TensorParallelOps`: a backend whose results are added up over the ranks that hold parts of a layer.

Each rank has some heads, a slice of the MLP and some rows of the vocabulary, and computes with them what the backend
computes with all. What a half layer adds to the residual is summed over ranks; the residual itself is the same on all
of them. Models call it as they call any backend, and know nothing of ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.engine.parallel.experts import PlacedExperts
from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    Ops,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    Routing,
)
from penstock.models.sharding import Shard, balanced


class TensorParallelOps:
    def __init__(self, ops: Ops, group: TensorGroup, shard: Shard, vocab_size: int) -> None:
        self.name = ops.name
        self.device = ops.device
        self.dtype = ops.dtype
        self.kv_dtype = ops.kv_dtype
        # What one rank can do alone, it does as the backend does it.
        self.pack_linear = ops.pack_linear
        self.linear = ops.linear
        self.pack_embedding = ops.pack_embedding
        self.pack_experts = ops.pack_experts
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.gated = ops.gated
        self.allocate_kv = ops.allocate_kv
        self.attend = ops.attend
        self.sample = ops.sample
        self._ops = ops
        self._group = group
        self._vocabularies = balanced(vocab_size, shard.tensor_size)
        self._vocabulary = shard.vocabulary(vocab_size)
        self._placed = PlacedExperts(ops, group) if shard.places_experts else None

    def embed(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        """Each token is in one rank's rows, and zero in all others'."""
        own = self._vocabulary
        rows = token_ids - own.start
        is_elsewhere = (rows < 0) | (rows >= len(own))
        embedded = self._ops.embed(rows.masked_fill(is_elsewhere, 0), table)
        return self._group.add_up(embedded.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, x: Tensor, head: PackedLinear) -> Tensor:
        """The first rank gets all columns; the others, who do not sample, keep their own."""
        own = self._ops.logits(x, head)
        joined = self._group.join_columns(own, [len(part) for part in self._vocabularies])
        return own if joined is None else joined

    def attention(
        self,
        x: Tensor,
        qkv: PackedLinear,
        output: PackedLinear,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> Tensor:
        return self._group.add_up(self._ops.attention(x, qkv, output, layer, cache, batch))

    def mlp(self, x: Tensor, gate_up: PackedLinear, down: PackedLinear, activation: Activation) -> Tensor:
        return self._group.add_up(self._ops.mlp(x, gate_up, down, activation))

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        if self._placed is not None:
            return self._placed.run(x, logits, experts, routing, activation)
        return self._group.add_up(self._ops.moe(x, logits, experts, routing, activation))

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: PackedLinear,
        output: PackedLinear,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        normed = self._ops.rms_norm(residual, norm, eps)
        residual.add_(self.attention(normed, qkv, output, layer, cache, batch))

    def mlp_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
        activation: Activation,
    ) -> None:
        residual.add_(self.mlp(self._ops.rms_norm(residual, norm, eps), gate_up, down, activation))

    def moe_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: PackedLinear,
        experts: PackedExperts,
        routing: Routing,
        activation: Activation,
    ) -> None:
        """Every rank has the whole router."""
        normed = self._ops.rms_norm(residual, norm, eps)
        residual.add_(self.moe(normed, self._ops.logits(normed, router), experts, routing, activation))
