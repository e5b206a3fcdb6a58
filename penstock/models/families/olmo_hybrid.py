"""OLMo Hybrid: most layers are gated delta nets in Llama's style. The others are OLMo 3's attention, normed after
attention and MLP, with rope or without."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.delta_net import GatedDeltaNet, load_delta_net
from penstock.models.experts import add_mlp
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds, rope_parameters
from penstock.models.layers import ChangedAttention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout
from penstock.models.recurrent import HybridDecoder, LayerCache, recurrent_settings

NAMES = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "linear_attn.q_proj": "linear_attn.query_proj",
    "linear_attn.k_proj": "linear_attn.key_proj",
    "linear_attn.v_proj": "linear_attn.value_proj",
    "linear_attn.g_proj": "linear_attn.gate_proj",
    "linear_attn.b_proj": "linear_attn.rate_proj",
    "linear_attn.a_proj": "linear_attn.step_proj",
    "linear_attn.o_norm": "linear_attn.norm",
    "linear_attn.o_proj": "linear_attn.out_proj",
}
_NORM_EPS = 1e-5  # of delta nets, whatever the settings say of other norms


@dataclass(frozen=True, slots=True)
class OlmoHybridLayer:
    """A layer with norms before its two halves if it has a mixer, and after them if it has attention."""

    norm: RMSNorm
    attention: ChangedAttention | None
    mixer: GatedDeltaNet | None
    mlp_norm: RMSNorm
    mlp: GatedMLP


class OlmoHybrid(HybridDecoder):
    name = "olmo_hybrid"
    huggingface_names = ("OlmoHybridForCausalLM", "olmo_hybrid")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu()
        config = common_huggingface_config(fields, cls.name)
        kinds = layer_kinds(fields, config.num_layers, {"linear_attention", "full_attention"})
        if kinds is None:
            kinds = tuple(
                "linear_attention" if (index + 1) % 4 else "full_attention"
                for index in range(config.num_layers)
            )
        has_bias = fields.flag("attention_bias", False)
        has_rope = rope_parameters(fields).get("rope_theta", fields.raw("rope_theta")) is not None
        num_keys = fields.integer("linear_num_key_heads", config.num_heads)
        key_dim = fields.integer("linear_key_head_dim", int(0.75 * config.hidden_size / num_keys))
        return dataclasses.replace(
            config,
            qkv_bias=has_bias,
            output_bias=has_bias,
            unrotated_layers=frozenset() if has_rope else frozenset(range(config.num_layers)),
            recurrent=RecurrentConfig(
                layers=frozenset(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
                conv_width=fields.integer("linear_conv_kernel_dim", 4),
                num_heads=fields.integer("linear_num_value_heads", config.num_heads),
                head_dim=fields.integer("linear_value_head_dim", 2 * key_dim),
                num_groups=num_keys,
                state_size=key_dim,
                largest_rate=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
            ),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(names=NAMES)

    def load_layer(self, load: LayerLoader) -> OlmoHybridLayer:
        settings = recurrent_settings(load.config)
        if load.index in settings.layers:
            mixer = load_delta_net(load, norm_eps=_NORM_EPS, largest_rate=settings.largest_rate)
            norms = load.rms_norm("input_layernorm"), load.rms_norm("post_attention_layernorm")
            return OlmoHybridLayer(norms[0], None, mixer, norms[1], load.gated_mlp())
        attention = ChangedAttention(load.attention(), load.wide_norms())
        norms = load.rms_norm("post_attention_layernorm"), load.rms_norm("post_feedforward_layernorm")
        return OlmoHybridLayer(norms[0], attention, None, norms[1], load.gated_mlp())

    def run_layer(
        self, layer: OlmoHybridLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
            add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
        elif layer.attention is not None:
            residual.add_(layer.norm(ops, layer.attention(ops, residual, cache.kv, batch)))
            residual.add_(layer.mlp_norm(ops, layer.mlp(ops, residual)))
