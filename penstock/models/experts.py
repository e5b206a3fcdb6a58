"""Defines MLPs of several experts, of which a router picks a few for each token, and loads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.interface import Ops, PackedExperts, PackedLinear, Routing
from penstock.models.config import ActivationName
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.weights import ExpertNames


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert for every token. `gate` gives each token's share of it, as a logit."""

    mlp: GatedMLP
    gate: PackedLinear

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        share = torch.sigmoid(ops.linear(x, self.gate).float())
        return (self.mlp(ops, x) * share).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Many gated MLPs, of which a router picks a few for each token."""

    router: PackedLinear
    experts: PackedExperts
    routing: Routing
    shared: SharedExpert | None
    activation: ActivationName

    def add_to(self, ops: Ops, residual: Tensor, norm: RMSNorm) -> None:
        """Add what the experts make of the normed residual to the residual, in place."""
        shared = None if self.shared is None else self.shared(ops, norm(ops, residual))
        ops.moe_block(
            residual, norm.weight, norm.eps, self.router, self.experts, self.routing, self.activation
        )
        if shared is not None:
            residual.add_(shared)


def load_experts(
    load: LayerLoader,
    name: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertMLP:
    """Load the experts of a layer. `parts` are the names of gate, up and down within an expert."""
    config, experts, prefix = load.config, load.config.experts, f"{load.prefix}.{name}"
    assert experts is not None
    names = [
        ExpertNames(*(f"{prefix}.experts.{number}.{part}" for part in parts))
        for number in range(experts.count)
    ]
    shared = None
    if experts.shared_intermediate_size is not None:
        shared = SharedExpert(
            mlp=load.gated_mlp(f"{name}.shared_expert", experts.shared_intermediate_size),
            gate=load.weights.linear([f"{prefix}.shared_expert_gate"], [1], config.hidden_size),
        )
    return ExpertMLP(
        router=load.weights.linear([f"{prefix}.gate"], [experts.count], config.hidden_size),
        experts=load.weights.experts(names, experts.intermediate_size, config.hidden_size),
        routing=Routing(experts.count, experts.per_token, experts.normalizes),
        shared=shared,
        activation=config.activation,
    )
