"""`TensorParallelOps` is a backend whose results are added up over the ranks that hold parts of a layer.

Each rank has some heads, a slice of the MLP and some rows of the vocabulary, and computes its part with the backend.
The addition of a half layer to the residual is summed over ranks; the residual itself is the same on all ranks.
Models call this backend like any other, and know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from penstock.engine.parallel.experts import ExpertBalance, PlacedExperts, pack_balanced
from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.blocks import DelegatingOps
from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    ExpertWeights,
    Ops,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    Routing,
)
from penstock.models.sharding import Shard, balanced


class TensorParallelOps(DelegatingOps):
    def __init__(
        self,
        ops: Ops,
        group: TensorGroup,
        shard: Shard,
        vocab_size: int,
        balance: ExpertBalance | None = None,
    ) -> None:
        super().__init__(ops)
        self._balance = balance
        self._group = group
        self._vocabularies = balanced(vocab_size, shard.tensor_size)
        self._vocabulary = shard.vocabulary(vocab_size)
        self._placed = PlacedExperts(ops, group) if shard.places_experts else None

    def add_up(self, x: Tensor) -> Tensor:
        return self._group.add_up(x)

    def embed(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        """Embed tokens. Each token is in one rank's rows, and zero on all other ranks."""
        own = self._vocabulary
        rows = token_ids - own.start
        is_elsewhere = (rows < 0) | (rows >= len(own))
        embedded = self._ops.embed(rows.masked_fill(is_elsewhere, 0), table)
        return self._group.add_up(embedded.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, x: Tensor, head: PackedLinear) -> Tensor:
        """Compute logits. The first rank gets all columns; the other ranks, which do not sample, keep their own."""
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

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> Any:
        if self._balance is None:
            return self._ops.pack_experts(experts)
        return pack_balanced(self._ops, experts, self._balance)

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        if self._placed is not None:
            return self._placed.run(x, logits, experts, routing, activation)
        return self._group.add_up(self._ops.moe(x, logits, experts, routing, activation))
