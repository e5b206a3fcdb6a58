"""Defines MLPs of several experts, of which a router picks a few for each token, and loads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import ExpertGroups, Ops, PackedExperts, PackedLinear, Routing
from penstock.models.config import ActivationName, ExpertsConfig
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import StackedPart
from penstock.models.weights import ExpertNames


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert for every token. `gate`, where there is one, gives each token's weight of the expert, as a logit."""

    mlp: GatedMLP
    gate: PackedLinear | None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        made = self.mlp(ops, x)
        return made if self.gate is None else ops.opened(made, ops.linear(x, self.gate))

    def hidden(self, ops: Ops, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return what the expert's last product multiplies, for the normed residual."""
        mlp = self.mlp
        hidden = ops.normed_gated(residual, norm.weight, norm.eps, mlp.gate_up, mlp.activation)
        if self.gate is None:
            return hidden
        return ops.opened(hidden, ops.normed_linear(residual, norm.weight, norm.eps, self.gate))


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Many gated MLPs, of which a router picks a few for each token."""

    router: PackedLinear
    experts: PackedExperts
    routing: Routing
    shared: SharedExpert | None
    activation: ActivationName

    def add_to(self, ops: Ops, residual: Tensor, norm: RMSNorm) -> None:
        """Add the experts' output for the normed residual to the residual, in place."""
        hidden = None if self.shared is None else self.shared.hidden(ops, residual, norm)
        ops.moe_block(
            residual, norm.weight, norm.eps, self.router, self.experts, self.routing, self.activation
        )
        if self.shared is not None and hidden is not None:
            ops.add_linear(hidden, self.shared.mlp.down, residual)

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        made = ops.moe(x, ops.router_logits(x, self.router), self.experts, self.routing, self.activation)
        return made if self.shared is None else made.add_(self.shared(ops, x))


def add_mlp(ops: Ops, residual: Tensor, norm: RMSNorm, mlp: GatedMLP | ExpertMLP) -> None:
    """Add an MLP's output for the normed residual to the residual, in place."""
    if isinstance(mlp, GatedMLP):
        ops.mlp_block(residual, norm.weight, norm.eps, mlp.gate_up, mlp.down, mlp.activation)
    else:
        mlp.add_to(ops, residual, norm)


PARTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
SHARED_NAMES = {"shared_expert": "shared_experts", "shared_expert_gate": "shared_experts_gate"}
# Where checkpoints hold the experts of a layer as two tensors, as newer versions of transformers do in memory.
FUSED_EXPERTS = {
    "gate_proj": StackedPart("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", 0, 2),
    "up_proj": StackedPart("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", 1, 2),
    "down_proj": StackedPart("mlp.experts.down_proj", "mlp.experts.down_proj_bias"),
}

GRANITE_EXPERTS = {
    "gate_proj": StackedPart("mlp.input_linear.weight", "mlp.input_linear.bias", 0, 2),
    "up_proj": StackedPart("mlp.input_linear.weight", "mlp.input_linear.bias", 1, 2),
    "down_proj": StackedPart("mlp.output_linear.weight", "mlp.output_linear.bias"),
}


def load_experts(
    load: LayerLoader,
    *,
    bias: bool = False,
    is_shared_gated: bool = False,
    selection_bias: str | None = None,
    weighs_input: bool = False,
    scales: Tensor | None = None,
) -> ExpertMLP:
    """Load the experts of a layer. `bias` says whether experts and router have biases, `is_shared_gated` whether
    tokens have weights for the expert of every token, and `selection_bias` names the values that are added to scores
    where experts are chosen. `scales` multiply what each expert makes."""
    config, experts, prefix = load.config, load.config.experts, f"{load.prefix}.mlp"
    assert experts is not None
    names = [
        ExpertNames(*(f"{prefix}.experts.{number}.{part}" for part in PARTS))
        for number in range(experts.count)
    ]
    shared_expert = None
    if experts.shared_intermediate_size is not None:
        gate = None
        if is_shared_gated:
            gate = load.weights.linear([f"{prefix}.shared_experts_gate"], [1], config.hidden_size)
        shared_expert = SharedExpert(
            load.gated_mlp("mlp.shared_experts", experts.shared_intermediate_size), gate
        )
    chosen_by = None
    if selection_bias is not None:
        chosen_by = load.weights.vector(f"{prefix}.{selection_bias}", experts.count)
    return ExpertMLP(
        router=load.weights.linear([f"{prefix}.gate"], [experts.count], config.hidden_size, bias=bias),
        experts=load.weights.experts(
            names, experts.intermediate_size, config.hidden_size, bias=bias, scales=scales
        ),
        routing=expert_routing(experts, chosen_by, weighs_input=weighs_input),
        shared=shared_expert,
        activation=config.activation,
    )


def expert_routing(
    experts: ExpertsConfig, selection_bias: Tensor | None, *, weighs_input: bool = False
) -> Routing:
    groups = None
    if experts.num_groups > 1:
        groups = ExpertGroups(experts.num_groups, experts.kept_groups, experts.groups_ranked_by)
    return Routing(
        experts.count,
        experts.per_token,
        experts.normalizes,
        scoring=experts.scoring,
        selection_bias=selection_bias,
        groups=groups,
        scale=experts.weight_scale,
        least_sum=experts.least_sum,
        weighs_input=weighs_input,
        jitter=experts.jitter,
    )
