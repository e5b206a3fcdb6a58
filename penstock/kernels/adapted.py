"""Products with LoRA adapters: some rows of a batch get an adapter's share added to what the model's matrix gives.

Wraps a backend for batches in which at least one row has an adapter; others never come here. Rows are grouped by
adapter, and each group is one small product of the backend's own, so that an answer stays as independent of its
neighbours as the backend makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    ExpertWeights,
    KVStore,
    Ops,
    PackedExperts,
    PackedLinear,
    Routing,
    SamplingBatch,
    WeightData,
)


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """linear(linear(x, left), right) is what an adapter adds to a product of x."""

    left: PackedLinear
    right: PackedLinear


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of a batch that one adapter is for."""

    deltas: Mapping[int, PackedDelta]  # by the index of the product
    rows: Tensor  # int64, on the backend's device


class AdaptedOps:
    """`products` are the matrices that adapters may change, in the order that deltas are numbered by. `use` comes
    before every forward pass."""

    def __init__(self, ops: Ops, products: Sequence[PackedLinear]) -> None:
        self.name = ops.name
        self.device = ops.device
        self.dtype = ops.dtype
        self.kv_dtype = ops.kv_dtype
        self._ops = ops
        self._products = tuple(products)  # kept, so that an id stays its own
        self._index_of = {id(product): index for index, product in enumerate(products)}
        self._groups: Sequence[AdaptedRows] = ()

    def use(self, groups: Sequence[AdaptedRows]) -> None:
        self._groups = groups

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        ops = self._ops
        y = ops.linear(x, weight)
        index = self._index_of.get(id(weight))
        if index is None:
            return y
        for group in self._groups:
            delta = group.deltas.get(index)
            if delta is None:
                continue
            rows = group.rows
            if len(rows) == len(y):
                y += ops.linear(ops.linear(x, delta.left), delta.right)
            else:
                y.index_add_(0, rows, ops.linear(ops.linear(x[rows], delta.left), delta.right))
        return y

    def attention(
        self, x: Tensor, qkv: Any, output: Any, layer: AttentionLayer, cache: Any, batch: AttentionBatch
    ) -> Tensor:
        return self.linear(self._ops.attend(self.linear(x, qkv), layer, cache, batch), output)

    def mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation) -> Tensor:
        return self.linear(self._ops.gated(self.linear(x, gate_up), activation), down)

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        normed = self._ops.rms_norm(residual, norm, eps)
        residual.add_(self.attention(normed, qkv, output, layer, cache, batch))

    def mlp_block(
        self, residual: Tensor, norm: Tensor, eps: float, gate_up: Any, down: Any, activation: Activation
    ) -> None:
        residual.add_(self.mlp(self._ops.rms_norm(residual, norm, eps), gate_up, down, activation))

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        return self._ops.moe(x, logits, experts, routing, activation)

    def moe_block(  # experts have no adapters
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        experts: Any,
        routing: Routing,
        activation: Activation,
    ) -> None:
        self._ops.moe_block(residual, norm, eps, router, experts, routing, activation)

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> PackedLinear:
        return self._ops.pack_linear(parts, bias)

    def pack_embedding(self, weight: WeightData, tied: Any | None = None) -> Any:
        return self._ops.pack_embedding(weight, tied)

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> PackedExperts:
        return self._ops.pack_experts(experts)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        return self._ops.embed(token_ids, table)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        return self._ops.logits(x, head)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._ops.gated(gate_up, activation)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVStore:
        return self._ops.allocate_kv(num_layers, num_blocks, block_size, num_kv_heads, head_dim)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Any, batch: AttentionBatch) -> Tensor:
        return self._ops.attend(qkv, layer, cache, batch)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return self._ops.sample(logits, batch)
