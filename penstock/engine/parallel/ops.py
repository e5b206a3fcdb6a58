"""Backends for ranks. Models call them like any other backend, and know nothing of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.parallel.experts import (
    ExpertBalance,
    PlacedExperts,
    held,
    pack_balanced,
    places_of,
    through_experts,
)
from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.blocks import DelegatingOps, route
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
    """A backend whose results are added up over the ranks that hold parts of a layer.

    Each rank has some heads, a slice of the MLP and some rows of the vocabulary, and computes its part with the
    wrapped backend. The addition of a half layer to the residual is summed over ranks; the residual itself is the
    same on all ranks.
    """

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


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A layer's exchange, as every step makes it."""

    experts: PackedExperts
    num_experts: int
    top_k: int
    activation: Activation
    width: int  # of the rows that travel


class SharedExperts:
    """The experts that the ranks share, in the order in which a step of the model uses them."""

    def __init__(self, ops: Ops, group: TensorGroup) -> None:
        self._ops = ops
        self._group = group
        self._exchanges: list[_Exchange] = []
        self._is_rehearsing = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Note the exchanges of a step, which all ranks run together."""
        self._exchanges, self._is_rehearsing = [], True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def run(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """Compute `Ops.moe` of this rank's tokens."""
        if self._is_rehearsing:
            layer = _Exchange(experts, routing.num_experts, routing.top_k, activation, x.shape[1])
            self._exchanges.append(layer)
        weights, chosen = route(logits, routing)
        chosen = places_of(chosen, experts)
        own, placement = held(self._ops, experts, routing.num_experts, activation, self._group)
        into = None
        if routing.weighs_input:  # of each pair, instead of its output
            into, weights = weights.flatten().unsqueeze(1), torch.ones_like(weights)
        return through_experts(x, into, weights, chosen, own, placement, self._group)

    def serve(self) -> None:
        """Take part in a step of other ranks without a token of its own."""
        ops = self._ops
        for each in self._exchanges:
            own, placement = held(ops, each.experts, each.num_experts, each.activation, self._group)
            rows = torch.empty(0, each.width, dtype=ops.dtype, device=ops.device)
            weights = torch.empty(0, each.top_k, device=ops.device)
            chosen = torch.empty(0, each.top_k, dtype=torch.int64, device=ops.device)
            through_experts(rows, None, weights, chosen, own, placement, self._group)


class DataParallelOps(DelegatingOps):
    """A backend for ranks that each have tokens of their own, and share experts alone.

    Every rank has all attention heads and dense layers, so all operations but the experts are those of the wrapped
    backend. In a layer with experts, tokens travel to the ranks of their experts and back; all ranks exchange
    together. A rank without tokens runs no model. It repeats only the exchanges of a step, as it has seen them in a
    rehearsal.
    """

    def __init__(self, ops: Ops, shared: SharedExperts, balance: ExpertBalance | None = None) -> None:
        super().__init__(ops)
        self._shared = shared
        self._balance = balance

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> Any:
        if self._balance is None:
            return self._ops.pack_experts(experts)
        return pack_balanced(self._ops, experts, self._balance)

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        return self._shared.run(x, logits, experts, routing, activation)
