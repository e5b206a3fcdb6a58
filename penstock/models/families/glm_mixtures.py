"""Mixtures that choose experts as GLM 4.5 does, by sigmoids with a bias, and differ in a detail or two: dots.llm1,
Solar Open, Hunyuan 3, K-EXAONE and Trinity (AFMoE)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.families.mixtures import Glm4Moe
from penstock.models.families.olmo import with_exaone_windows
from penstock.models.gguf_config import (
    SIGMOID,
    gguf_windows,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    common_huggingface_config,
    grouped_experts,
    layer_windows,
    read_windows,
    rotated_in_windows,
)
from penstock.models.layers import Attention, LayerLoader, Norm, RMSNorm
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

_BIAS = "gate.e_score_correction_bias"


class _GlmMixture(Glm4Moe):
    """Rotates whole heads. A family has its own names for what `ExpertsConfig` holds."""

    gguf_names: ClassVar[tuple[str, ...]] = ()
    gguf_stored_names: ClassVar[Mapping[str, str]] = {}


class Dots1(_GlmMixture):
    """dots.llm1: norms on query and key heads, and maybe windows in the last layers."""

    name = "dots1"
    huggingface_names = ("Dots1ForCausalLM", "dots1")
    gguf_names = ("dots1",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual(partial_rotary_factor=1.0, norm_topk_prob=False)
        config = super().config_from_huggingface(fields)
        windows = config.windows
        if fields.has("sliding_window"):
            window, first = fields.integer("sliding_window"), fields.raw("max_window_layers")
            first = config.num_layers if first is None else first
            listed = layer_windows(fields, config.num_layers, window)
            windows = listed or tuple(
                window if index >= first else None for index in range(config.num_layers)
            )
        return dataclasses.replace(config, windows=windows, output_bias=config.qkv_bias, head_norms=True)


class SolarOpen(_GlmMixture):
    """Solar Open: experts in every layer."""

    name = "solar_open"
    huggingface_names = ("SolarOpenForCausalLM", "solar_open")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        inner = fields.integer("moe_intermediate_size")
        fields = fields.with_usual(partial_rotary_factor=1.0, intermediate_size=inner)
        return super().config_from_huggingface(fields.changed(first_k_dense_replace=0, use_qk_norm=False))


class HunyuanV3(_GlmMixture):
    """Hunyuan 3: norms on query and key heads."""

    name = "hy_v3"
    huggingface_names = ("HYV3ForCausalLM", "hy_v3")
    gguf_names = ("hy_v3",)
    stored_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": f"mlp.{_BIAS}",
        "mlp.shared_mlp": "mlp.shared_experts",
    }
    gguf_stored_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("exp_probs_b.bias", "exp_probs_b"), f"mlp.{_BIAS}"
    )

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(
            fields, cls.name, default_theta=11_158_840.0, attention_bias=False, mlp_bias=False
        )
        named = fields.renamed({"routed_scaling_factor": "router_scaling_factor"})
        experts = _experts(named, config.num_layers, 1)
        if experts.shared_intermediate_size is None:  # no count: one of the size of a dense layer's MLP
            experts = dataclasses.replace(experts, shared_intermediate_size=config.intermediate_size)
        return dataclasses.replace(config, head_norms=True, experts=experts)


class ExaoneMoe(_GlmMixture):
    """K-EXAONE: norms on query and key heads, and windows. Layers without a window rotate no heads."""

    name = "exaone_moe"
    huggingface_names = ("ExaoneMoeForCausalLM", "exaone_moe")
    gguf_names = ("exaone-moe",)
    stored_names: ClassVar[Mapping[str, str]] = {"mlp.e_score_correction_bias": f"mlp.{_BIAS}"}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        experts = _experts(fields, config.num_layers, fields.raw("first_k_dense_replace"))
        return with_exaone_windows(dataclasses.replace(config, head_norms=True, experts=experts), fields)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        config = dataclasses.replace(config, num_mtp_layers=0)  # these layers are not native
        if not fields.has("attention.sliding_window"):
            return config
        return rotated_in_windows(config, gguf_windows(fields, config.num_layers, 4))


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention whose output is multiplied by the sigmoid of a gate, number by number."""

    inner: Attention
    gate: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        made = ops.attend(ops.linear(x, self.inner.qkv), self.inner.layer, cache, batch)
        made = ops.opened(made, ops.linear(x, self.gate))
        return ops.add_up(ops.linear(made, self.inner.output))


@dataclass(frozen=True, slots=True)
class AfmoeLayer:
    attention_norm: RMSNorm
    attention: GatedAttention
    added_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: Norm
    added_mlp_norm: RMSNorm


class Afmoe(Decoder):
    """Trinity: gated attention, whose heads are rotated in layers with a window only, and norms before and after
    attention and MLP."""

    name = "afmoe"
    huggingface_names = ("AfmoeForCausalLM", "afmoe")
    gguf_names = ("afmoe",)
    attention_bias = False
    gguf_experts_normalize = True
    gguf_gating = SIGMOID
    selection_bias = _BIAS
    stored_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "mlp.gate",
        "mlp.expert_bias": f"mlp.{_BIAS}",
    }
    gguf_stored_names: ClassVar[Mapping[str, str]] = {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "attn_gate": "self_attn.gate_proj",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        period = fields.integer("global_attn_every_n_layers", 4)
        named = fields.renamed({"routed_scaling_factor": "route_scale"})
        config = dataclasses.replace(
            config,
            embedding_scale=config.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0,
            experts=_experts(named, config.num_layers, fields.raw("num_dense_layers")),
        )
        return rotated_in_windows(config, read_windows(fields, config.num_layers, period))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        config = dataclasses.replace(
            config, embedding_scale=config.hidden_size**0.5
        )  # of all published models
        return rotated_in_windows(config, gguf_windows(metadata_fields(file), config.num_layers, 4))

    def load_layer(self, load: LayerLoader) -> AfmoeLayer:
        width = self.config.num_heads * self.config.head_dim
        gate = load.weights.linear(
            [f"{load.prefix}.self_attn.gate_proj"],
            [width],
            self.config.hidden_size,
            part=LinearPart(rows=[scaled(load.heads.queries, self.config.head_dim)]),
        )
        return AfmoeLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=GatedAttention(load.attention(head_norms=True), gate),
            added_norm=load.rms_norm("post_attention_layernorm"),
            mlp_norm=load.rms_norm("pre_mlp_layernorm"),
            mlp=self.load_mlp(load),
            added_mlp_norm=load.rms_norm("post_mlp_layernorm"),
        )

    def run_layer(
        self, layer: AfmoeLayer, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        made = layer.attention(ops, layer.attention_norm(ops, residual), cache, batch)
        residual.add_(layer.added_norm(ops, made))
        made = layer.mlp(ops, layer.mlp_norm(ops, residual))
        residual.add_(layer.added_mlp_norm(ops, made))


def _experts(fields: Fields, num_layers: int, num_dense: int | None) -> ExpertsConfig:
    """Read the experts of families that list the layers with an MLP, or count the first ones."""
    count = fields.integer("num_experts", fields.raw("num_local_experts"))
    shared = fields.raw("num_shared_experts")
    named = fields.changed(
        n_routed_experts=count, n_shared_experts=shared, first_k_dense_replace=num_dense, moe_layer_freq=None
    )
    return grouped_experts(named, num_layers)
