"""Operations put together from a backend's primitive ones, and the base of wrappers around a backend.

The composed operations are the definition; a backend may override any of them by fewer steps with the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    ExpertGroups,
    ExpertWeights,
    PackedLinear,
    Routing,
)
from penstock.kernels.latent import LatentKVStore, attend_latent, choose_tokens
from penstock.kernels.recurrence import (
    channel_delta,
    channel_scan,
    gated_delta,
    gated_norm,
    selective_scan,
    short_conv,
)

if TYPE_CHECKING:
    from penstock.kernels.interface import Ops


@runtime_checkable
class HasMemory(Protocol):
    """Packed matrices whose bytes can be copied to other processes."""

    def memory(self) -> Iterable[tuple[str, Tensor]]:
        """Return the kinds and the bytes of the matrix's tables, as `PackedExperts.memory` does."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertList:
    """Experts as ordinary products, each with its gate and up stacked."""

    gate_ups: tuple[PackedLinear, ...]
    downs: tuple[PackedLinear, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (*self.gate_ups, *self.downs))

    def memory(self, index: int) -> Sequence[tuple[str, Tensor]]:
        tables: list[tuple[str, Tensor]] = []
        for part in (self.gate_ups[index], self.downs[index]):
            assert isinstance(part, HasMemory), "backends without a form of their own for experts have it"
            tables += part.memory()
        return tables


def sigmoid(x: Tensor) -> Tensor:
    """Return sigmoids that depend on no other row. On a CPU `torch.sigmoid` rounds the last numbers of a tensor,
    fewer than two vectors of them, in another way than those in front."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return x.neg().exp_().add_(1).reciprocal_()


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """float32 [T, E] → the weights of each token's experts, float32 [T, K], and which they are, int64 [T, K]. Runs
    on any device without waiting for the device."""
    if routing.scoring == "sparsemixer":
        weights, chosen = _mix_sparsely(logits, routing)
    else:
        scores = torch.softmax(logits, dim=-1) if routing.scoring == "softmax" else sigmoid(logits)
        ranked = scores if routing.selection_bias is None else scores + routing.selection_bias
        if routing.groups is not None:
            ranked = _within_best_groups(ranked, routing.groups)
        # Stable, so that equals keep the order of their indices.
        chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
        weights = scores.gather(1, chosen)
    if routing.normalizes:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(routing.least_sum)
    return weights * routing.scale, chosen


def _within_best_groups(scores: Tensor, groups: ExpertGroups) -> Tensor:
    """Return the scores with those outside of the best groups at minus infinity."""
    by_group = scores.view(scores.shape[0], groups.count, -1)
    quality = by_group.topk(groups.ranked_by, dim=-1).values.sum(dim=-1)
    best = torch.sort(quality, dim=-1, descending=True, stable=True).indices[:, : groups.kept]
    is_left_out = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)


def _mix_sparsely(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left, weights, chosen = logits, [], []
    for _ in range(routing.top_k):
        highest = left.amax(dim=-1, keepdim=True)
        index = left.argmax(dim=-1, keepdim=True)
        is_far = (highest - logits) / logits.abs().maximum(highest) > 2 * routing.jitter
        weights.append(torch.softmax(left.masked_fill(is_far, float("-inf")), dim=-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(weights, dim=1), torch.cat(chosen, dim=1)


class ComposedOps:
    """Attention, MLPs, experts and the halves of a pre-norm decoder layer, made of products, norms, gates and
    `attend`."""

    @property
    def rounding(self) -> str:
        return ""

    def allocate_latents(
        self: Ops, num_layers: int, num_blocks: int, block_size: int, width: int
    ) -> LatentKVStore:
        return LatentKVStore((num_layers, num_blocks, block_size, width), self.kv_dtype, self.device)

    attend_latent = staticmethod(attend_latent)
    choose_tokens = staticmethod(choose_tokens)

    def add_up(self, x: Tensor) -> Tensor:
        return x

    def normed_linear(self: Ops, x: Tensor, norm: Tensor, eps: float, weight: Any) -> Tensor:
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def normed_gated(
        self: Ops, x: Tensor, norm: Tensor, eps: float, gate_up: Any, activation: Activation
    ) -> Tensor:
        return self.gated(self.normed_linear(x, norm, eps, gate_up), activation)

    def add_linear(self: Ops, x: Tensor, weight: Any, residual: Tensor) -> None:
        residual.add_(self.add_up(self.linear(x, weight)))

    def opened(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * sigmoid(gate.float())).to(x.dtype)

    short_conv = staticmethod(short_conv)
    selective_scan = staticmethod(selective_scan)
    channel_scan = staticmethod(channel_scan)
    gated_delta = staticmethod(gated_delta)
    channel_delta = staticmethod(channel_delta)
    gated_norm = staticmethod(gated_norm)

    def attention(
        self: Ops, x: Tensor, qkv: Any, output: Any, layer: AttentionLayer, cache: Any, batch: AttentionBatch
    ) -> Tensor:
        return self.linear(self.attend(self.linear(x, qkv), layer, cache, batch), output)

    def mlp(self: Ops, x: Tensor, gate_up: Any, down: Any, activation: Activation) -> Tensor:
        return self.linear(self.gated(self.linear(x, gate_up), activation), down)

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
        self: Ops, residual: Tensor, norm: Tensor, eps: float, gate_up: Any, down: Any, activation: Activation
    ) -> None:
        residual.add_(self.mlp(self.rms_norm(residual, norm, eps), gate_up, down, activation))

    def router_logits(self: Ops, x: Tensor, router: Any) -> Tensor:
        return self.logits(x, router)

    def pack_experts(self: Ops, experts: Iterable[ExpertWeights]) -> ExpertList:
        packed = [
            (
                self.pack_linear([expert.gate, expert.up], expert.gate_up_bias),
                self.pack_linear([expert.down], expert.down_bias),
            )
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
            taken, share = x[rows], weights[rows, ranks].unsqueeze(1)
            if routing.weighs_input:
                taken = (taken * share).to(x.dtype)
            made = self.mlp(taken, experts.gate_ups[index], experts.downs[index], activation)
            total[rows] += made.float() if routing.weighs_input else made.float() * share
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
        residual.add_(self.moe(normed, self.router_logits(normed, router), experts, routing, activation))


class DelegatingOps(ComposedOps):
    """A wrapper around a backend: subclasses override some products, and the composed operations use the overridden
    products. All other primitive operations are the wrapped backend's."""

    def __init__(self, ops: Ops) -> None:
        self.name = ops.name
        self.device = ops.device
        self.dtype = ops.dtype
        self.kv_dtype = ops.kv_dtype
        self.pack_linear = ops.pack_linear
        self.pack_embedding = ops.pack_embedding
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.gated = ops.gated
        self.allocate_kv = ops.allocate_kv
        self.attend = ops.attend
        self.attend_latent = ops.attend_latent
        self.choose_tokens = ops.choose_tokens
        self.short_conv = ops.short_conv
        self.selective_scan = ops.selective_scan
        self.channel_scan = ops.channel_scan
        self.gated_delta = ops.gated_delta
        self.channel_delta = ops.channel_delta
        self.gated_norm = ops.gated_norm
        self.sample = ops.sample
        self._ops = ops

    @property
    def rounding(self) -> str:
        return self._ops.rounding

    def allocate_latents(self, num_layers: int, num_blocks: int, block_size: int, width: int) -> Any:
        return self._ops.allocate_latents(num_layers, num_blocks, block_size, width)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self._ops.linear(x, weight)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        return self._ops.embed(token_ids, table)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        return self._ops.logits(x, head)

    def opened(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._ops.opened(x, gate)

    def add_up(self, x: Tensor) -> Tensor:
        return self._ops.add_up(x)

    def router_logits(self, x: Tensor, router: Any) -> Tensor:
        return self._ops.router_logits(x, router)

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> Any:
        return self._ops.pack_experts(experts)

    def moe(
        self, x: Tensor, logits: Tensor, experts: Any, routing: Routing, activation: Activation
    ) -> Tensor:
        return self._ops.moe(x, logits, experts, routing, activation)
