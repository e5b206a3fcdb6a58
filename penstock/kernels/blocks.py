"""The halves of a pre-norm decoder layer, put together from a backend's smaller operations.

What they mean. A backend may do them in fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    ExpertWeights,
    PackedLinear,
    Routing,
)

if TYPE_CHECKING:
    from penstock.kernels.interface import Ops


@dataclass(frozen=True, slots=True)
class ExpertList:
    """Experts as ordinary products, each with its gate and up stacked."""

    gate_ups: tuple[PackedLinear, ...]
    downs: tuple[PackedLinear, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (*self.gate_ups, *self.downs))


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """float32 [T, E] → the weights of each token's experts, float32 [T, K], and which they are, int64 [T, K]."""
    shares = torch.softmax(logits, dim=-1)
    # Stable, so that equals keep the order of their indices.
    ranked, order = torch.sort(shares, dim=-1, descending=True, stable=True)
    weights, chosen = ranked[:, : routing.top_k], order[:, : routing.top_k]
    if routing.normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


class ComposedBlocks:
    def attention_block(
        self: Ops,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        normed = self.rms_norm(residual, norm, eps)
        residual.add_(self.attention(normed, qkv, output, layer, cache, batch))

    def mlp_block(
        self: Ops,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: Any,
        down: Any,
        activation: Activation,
    ) -> None:
        residual.add_(self.mlp(self.rms_norm(residual, norm, eps), gate_up, down, activation))

    def pack_experts(self: Ops, experts: Iterable[ExpertWeights]) -> ExpertList:
        packed = [
            (self.pack_linear([expert.gate, expert.up]), self.pack_linear([expert.down]))
            for expert in experts
        ]
        return ExpertList(tuple(pair[0] for pair in packed), tuple(pair[1] for pair in packed))

    def moe(
        self: Ops, x: Tensor, logits: Tensor, experts: Any, routing: Routing, activation: Activation
    ) -> Tensor:
        weights, chosen = route(logits, routing)
        total = torch.zeros_like(x, dtype=torch.float32)
        # In the order of the experts, so that a row's sum does not depend on its neighbours.
        for index in chosen.unique().tolist():
            rows, ranks = (chosen == index).nonzero(as_tuple=True)
            made = self.mlp(x[rows], experts.gate_ups[index], experts.downs[index], activation)
            total[rows] += made.float() * weights[rows, ranks].unsqueeze(1)
        return total.to(x.dtype)

    def moe_block(
        self: Ops,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        experts: Any,
        routing: Routing,
        activation: Activation,
    ) -> None:
        normed = self.rms_norm(residual, norm, eps)
        residual.add_(self.moe(normed, self.logits(normed, router), experts, routing, activation))
