"""`TensorParallelOps` is a backend whose results are added up over the ranks that hold parts of a layer.

Each rank has some heads, a slice of the MLP and some rows of the vocabulary, and computes its part with the backend.
The addition of a half layer to the residual is summed over ranks; the residual itself is the same on all ranks.
Models call this backend like any other, and know nothing of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.blocks import DelegatingOps, route
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


class TensorParallelOps(DelegatingOps):
    def __init__(self, ops: Ops, group: TensorGroup, shard: Shard, vocab_size: int) -> None:
        super().__init__(ops)
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

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        if self._placed is not None:
            return self._placed.run(x, logits, experts, routing, activation)
        return self._group.add_up(self._ops.moe(x, logits, experts, routing, activation))


FEW_TOKENS = 32
# As a router's logit, this value gives all other experts a weight of exactly 0.
_CERTAIN = 1e4


@dataclass(frozen=True, slots=True)
class _OwnExperts:
    """The experts of this rank, among all experts."""

    ops: Ops
    packed: PackedExperts
    span: range
    activation: Activation

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Run each row of [n, hidden] through one expert, given by its number among all."""
        if not rows.shape[0]:
            return rows
        logits = torch.zeros(rows.shape[0], len(self.span), dtype=torch.float32, device=rows.device)
        logits.scatter_(1, (chosen - self.span.start).unsqueeze(1), _CERTAIN)
        routing = Routing(len(self.span), 1, normalizes=True)
        return self.ops.moe(rows, logits, self.packed, routing, self.activation)


class PlacedExperts:
    def __init__(self, ops: Ops, group: TensorGroup) -> None:
        self._ops = ops
        self._group = group

    def run(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """Compute `Ops.moe` of `x` and `logits`, which are the same on all ranks, with this rank's `experts`."""
        placement = balanced(routing.num_experts, self._group.size)
        own = _OwnExperts(self._ops, experts, placement[self._group.rank], activation)
        weights, chosen = route(logits, routing)
        into = None
        if routing.weighs_input:  # of each pair, instead of its output
            into, weights = weights.flatten().unsqueeze(1), torch.ones_like(weights)
        if x.shape[0] <= FEW_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._add_up(x, into, weights, chosen, own)
        return self._exchange(x, into, weights, chosen, own, placement)

    def _add_up(
        self, x: Tensor, into: Tensor | None, weights: Tensor, chosen: Tensor, own: _OwnExperts
    ) -> Tensor:
        top_k = chosen.shape[1]
        is_own = (chosen >= own.span.start) & (chosen < own.span.stop)
        if x.is_cuda:
            # No size may depend on values: pairs of other ranks are computed too, by an expert of this rank, and not
            # used.
            chosen = torch.where(is_own, chosen, own.span.start)
            pairs = torch.arange(chosen.numel(), device=x.device)
        else:
            pairs = is_own.flatten().nonzero().squeeze(1)
        of_pairs = x.new_zeros(chosen.numel(), x.shape[1])
        rows = x[pairs // top_k]
        if into is not None:
            rows = (rows * into[pairs]).to(x.dtype)
        of_pairs[pairs] = own.run(rows, chosen.flatten()[pairs])
        of_pairs = of_pairs.view(-1, top_k, x.shape[1]).masked_fill_(~is_own.unsqueeze(2), 0)
        return self._group.add_up(_weighted(of_pairs, weights))

    def _exchange(
        self,
        x: Tensor,
        into: Tensor | None,
        weights: Tensor,
        chosen: Tensor,
        own: _OwnExperts,
        placement: tuple[range, ...],
    ) -> Tensor:
        group, top_k = self._group, chosen.shape[1]
        shares = balanced(x.shape[0], group.size)
        share = slice(shares[group.rank].start, shares[group.rank].stop)
        wanted = chosen[share].flatten()
        last_experts = torch.tensor([span.stop - 1 for span in placement], device=x.device)
        holders = torch.searchsorted(last_experts, wanted)
        order = torch.argsort(holders, stable=True)
        counts = torch.bincount(holders, minlength=group.size)
        sent, received = counts.tolist(), group.exchange_counts(counts).tolist()
        rows = x[share][order // top_k]
        if into is not None:
            rows = (rows * into.view(-1, top_k)[share].view(-1, 1)[order]).to(x.dtype)
        arrived = group.exchange(rows, sent, received)
        made = own.run(arrived, group.exchange(wanted[order], sent, received))
        returned = group.exchange(made, received, sent)
        of_pairs = torch.empty_like(returned)
        of_pairs[order] = returned
        total = _weighted(of_pairs.view(-1, top_k, x.shape[1]), weights[share])
        return group.join_rows(total, [len(span) for span in shares])


def _weighted(of_pairs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of [T, K, hidden] with [T, K] as [T, hidden]."""
    return (of_pairs.float() * weights.unsqueeze(2)).sum(dim=1).to(of_pairs.dtype)
