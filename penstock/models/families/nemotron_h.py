"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is Mamba-2, attention without positions, an MLP that squares
positive numbers, or many such MLPs as experts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops, PackedExperts, PackedLinear, Routing
from penstock.models.config import (
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    NotNative,
    RecurrentConfig,
    extended,
)
from penstock.models.experts import expert_routing
from penstock.models.gguf_config import (
    SIGMOID,
    gguf_experts,
    has_experts,
    hybrid_gguf_config,
    layers_with,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba_config, gguf_mamba_layout
from penstock.models.huggingface_config import grouped_experts, layers_of_kind
from penstock.models.layers import Attention, LayerLoader, PlainMLP, RMSNorm
from penstock.models.layout import Layout, StackedPart
from penstock.models.mamba import Mamba2Mixer, load_mamba, mamba_rows
from penstock.models.recurrent import HybridDecoder, LayerCache
from penstock.models.weights import ExpertNames

# As in `hybrid_override_pattern` of older files, and as in `layers_block_type` of newer ones.
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
NAMES = {
    "embeddings": "embed_tokens",
    "norm_f": "norm",
    "mixer.experts": "mlp.experts",
    "mixer.shared_experts": "mlp.shared_experts",
    "mixer.gate": "mlp.gate",
    "mixer.fc1_latent_proj": "mlp.latent_in_proj",
    "mixer.fc2_latent_proj": "mlp.latent_out_proj",
}
GGUF_NAMES = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_latent_down": "mlp.latent_in_proj",
    "ffn_latent_up": "mlp.latent_out_proj",
}
# The tensor that tells the kind of a layer in GGUF files.
GGUF_KINDS = {
    "ssm_a": "mamba",
    "attn_q.weight": "attention",
    "ffn_up.weight": "mlp",
    "ffn_gate_inp.weight": "moe",
}
_SHORTEST_STEP = 0.001  # of Mamba-2, where files do not say
# Where checkpoints hold the experts of a layer as two tensors.
STACKED = {
    part: StackedPart(f"mlp.experts.{part}", f"mlp.experts.{part}_bias") for part in ("up_proj", "down_proj")
}


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """MLPs without a gate, of which a router picks a few for each token, and one for every token. With `latent_in`
    and `latent_out`, the chosen MLPs work on fewer channels than the residual has."""

    router: PackedLinear
    experts: PackedExperts
    routing: Routing
    shared: PlainMLP
    latent_in: PackedLinear | None
    latent_out: PackedLinear | None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        logits = ops.router_logits(x, self.router)
        inputs = x if self.latent_in is None else ops.linear(x, self.latent_in)
        made = ops.moe(inputs, logits, self.experts, self.routing, "relu")
        if self.latent_out is not None:
            made = ops.linear(made, self.latent_out)
        return made.add_(self.shared(ops, x))


@dataclass(frozen=True, slots=True)
class NemotronHLayer:
    norm: RMSNorm
    mixer: Mamba2Mixer | None
    attention: Attention | None
    mlp: PlainMLP | PlainExperts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(ArchitectureConfig):
    kinds: tuple[str, ...]  # of layers
    latent_size: int | None = None  # of the inputs of experts, if they are narrower than the residual


class NemotronH(HybridDecoder):
    name = "nemotron_h"
    huggingface_names = ("NemotronHForCausalLM", "nemotron_h")
    gguf_names = ("nemotron_h", "nemotron_h_moe")
    eps_setting = "layer_norm_epsilon"
    mlp_bias = False
    has_gate = False
    config: NemotronHConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu("mamba_hidden_act")
        kinds = _kinds(fields)
        head_dim = fields.raw("attention_head_dim") or 128
        changed = fields.with_usual(head_dim=head_dim).changed(
            num_hidden_layers=len(kinds), hidden_act=fields.raw("mlp_hidden_act")
        )
        common = super().config_from_huggingface(changed)
        has_bias = fields.flag("use_bias", False)
        recurrent = RecurrentConfig(
            layers=layers_of_kind(kinds, "mamba"),
            conv_width=fields.integer("conv_kernel", 4),
            conv_bias=fields.flag("use_conv_bias", True),
            bias=has_bias,
            output_bias=has_bias,
            num_heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("ssm_state_size", 128),
            step_limits=(fields.number("time_step_min", _SHORTEST_STEP), math.inf),
        )
        return extended(
            common,
            NemotronHConfig,
            recurrent=recurrent,
            unrotated_layers=frozenset(range(len(kinds))),
            experts=_experts(fields, kinds),
            kinds=kinds,
            latent_size=fields.optional_integer("moe_latent_size"),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        common, fields = hybrid_gguf_config(file, cls.name, has_rope=False), metadata_fields(file)
        experts = None
        if has_experts(file):
            experts = gguf_experts(file, common, normalizes=True, usual_gating=SIGMOID)
        recurrent = dataclasses.replace(gguf_mamba_config(file), step_limits=(_SHORTEST_STEP, math.inf))
        return extended(
            common,
            NemotronHConfig,
            recurrent=recurrent,
            experts=experts,
            plain_activation="relu2",
            num_mtp_layers=0,  # a layer for drafts may be there, and is not read
            kinds=_gguf_kinds(file, common.num_layers),
            latent_size=fields.optional_integer("moe_latent_size"),
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mixer", GGUF_NAMES)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(
            old_base="backbone",
            names=NAMES,
            cut=mamba_rows(config, "mixer"),
            experts=STACKED,
            num_experts=config.num_experts,
        )

    def load_layer(self, load: LayerLoader) -> NemotronHLayer:
        kind = self.config.kinds[load.index]
        mlp: PlainMLP | PlainExperts | None = None
        if kind in ("mlp", "moe"):
            mlp = load.plain_mlp("mixer") if kind == "mlp" else self._load_experts(load)
        return NemotronHLayer(
            norm=load.rms_norm("norm"),
            mixer=load_mamba(load, "mixer") if kind == "mamba" else None,
            attention=load.attention(name="mixer") if kind == "attention" else None,
            mlp=mlp,
        )

    def _load_experts(self, load: LayerLoader) -> PlainExperts:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.mlp"
        experts, hidden, latent = config.experts, config.hidden_size, config.latent_size
        assert experts is not None
        each = (f"{prefix}.experts.{number}" for number in range(experts.count))
        names = [ExpertNames(f"{one}.up_proj", f"{one}.up_proj", f"{one}.down_proj") for one in each]
        latent_in = latent_out = None
        if latent is not None:
            has_bias = config.mlp_bias
            latent_in = weights.linear([f"{prefix}.latent_in_proj"], [latent], hidden, bias=has_bias)
            latent_out = weights.linear([f"{prefix}.latent_out_proj"], [hidden], latent, bias=has_bias)
        chosen_by = weights.vector(f"{prefix}.gate.e_score_correction_bias", experts.count)
        return PlainExperts(
            router=weights.linear([f"{prefix}.gate"], [experts.count], hidden),
            experts=weights.experts(names, experts.intermediate_size, latent or hidden),
            routing=expert_routing(experts, chosen_by),
            shared=load.plain_mlp("mlp.shared_experts", intermediate_size=experts.shared_intermediate_size),
            latent_in=latent_in,
            latent_out=latent_out,
        )

    def run_layer(
        self, layer: NemotronHLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
        elif layer.attention is not None:
            layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
        elif layer.mlp is not None:
            residual += layer.mlp(ops, layer.norm(ops, residual))


def _kinds(fields: Fields) -> tuple[str, ...]:
    listed = fields.raw("layers_block_type") or fields.raw("layer_types")
    if listed is None:
        pattern = fields.text("hybrid_override_pattern", "")
        listed = [KINDS.get(letter, letter) for letter in pattern]
    kinds = tuple(OTHER_NAMES.get(str(kind), str(kind)) for kind in listed)
    unknown = set(kinds) - set(KINDS.values())
    if unknown or not kinds:
        raise ModelLoadError(f"{fields.where} has layers of an unknown kind: {sorted(unknown) or 'none'}.")
    return kinds


def _gguf_kinds(file: GGUFFile, num_layers: int) -> tuple[str, ...]:
    found = {index: kind for tensor, kind in GGUF_KINDS.items() for index in layers_with(file, tensor)}
    for index in range(num_layers):
        if index not in found:
            raise ModelLoadError(f"{file.path.name} has no tensor of layer {index} that tells its kind.")
    return tuple(found[index] for index in range(num_layers))


def _experts(fields: Fields, kinds: tuple[str, ...]) -> ExpertsConfig | None:
    if "moe" not in kinds:
        return None
    if fields.text("mlp_hidden_act", "relu2") != "relu2":
        raise NotNative(
            f"{fields.where} asks for experts with the activation {fields.raw('mlp_hidden_act')!r}; known is relu2."
        )
    return dataclasses.replace(
        grouped_experts(fields, len(kinds)),
        dense_layers=frozenset(range(len(kinds))) - layers_of_kind(kinds, "moe"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
    )
