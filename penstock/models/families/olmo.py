"""OLMo 1, 2 and 3, and EXAONE 4, whose layers are normed after attention and MLP instead of before; and OLMo Hybrid,
most of whose layers are gated delta nets in Llama's style, beside OLMo 3's attention with rope or without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.decoder import BlockDecoder, Decoder
from penstock.models.delta_net import GatedDeltaNet, load_delta_net
from penstock.models.experts import add_mlp
from penstock.models.gguf_config import common_gguf_config, gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    linear_layers,
    read_windows,
    rope_parameters,
    ropes_by_layer_kind,
    rotated_in_windows,
)
from penstock.models.layers import Attention, Block, ChangedAttention, Clipped, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import RotatedNorms
from penstock.models.recurrent import HybridDecoder, LayerCache, recurrent_settings


class Olmo(BlockDecoder):
    """The first OLMo: Llama with layer norms that have no weights, and limits on queries, keys and values."""

    name = "olmo"
    huggingface_names = ("OlmoForCausalLM", "olmo")
    gguf_names = ("olmo",)
    attention_bias = False
    norm_kind = "constant"
    is_gguf_interleaved = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        limit = fields.optional_number("clip_qkv")
        return dataclasses.replace(super().config_from_huggingface(fields), norm_eps=1e-5, qkv_limit=limit)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        limit = metadata_fields(file).optional_number("attention.clamp_kqv")
        return dataclasses.replace(super().config_from_gguf(file), qkv_limit=limit)

    def load_attention(self, load: LayerLoader) -> Attention | ChangedAttention:
        attention, limit = load.attention(), self.config.qkv_limit
        return attention if limit is None else ChangedAttention(attention, Clipped(limit))


class Olmo2(Decoder):
    """OLMo 2: norms after attention and MLP, and over all query heads and all key heads together."""

    name = "olmo2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM", "olmo2")
    gguf_names: ClassVar[tuple[str, ...]] = ("olmo2",)
    attention_bias: ClassVar[bool | None] = False
    gguf_stored_names: ClassVar[Mapping[str, str]] = {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    rotated_norms: ClassVar[RotatedNorms] = "wide"

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        if not fields.has("attention.sliding_window"):
            return config
        # OLMo 3, which stretches the layers with full attention only.
        return dataclasses.replace(
            config,
            windows=gguf_windows(fields, config.num_layers, 4),
            local_rope=dataclasses.replace(config.rope, scaling=None),
        )

    def load_attention(self, load: LayerLoader) -> Attention | ChangedAttention:
        return ChangedAttention(load.attention(), load.wide_norms())

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention=self.load_attention(load),
            attention_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
            mlp_norm=load.rms_norm("post_feedforward_layernorm"),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention_norm(ops, layer.attention(ops, residual, cache, batch)))
        residual.add_(layer.mlp_norm(ops, layer.mlp(ops, residual)))


class Olmo3(Olmo2):
    """OLMo 2 with windows on most layers."""

    name = "olmo3"
    huggingface_names = ("Olmo3ForCausalLM", "olmo3")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        theta = fields.number("rope_theta", 500000.0)
        rope, local_rope, fields = ropes_by_layer_kind(fields, theta, theta)
        config = super().config_from_huggingface(fields)
        windows = read_windows(fields, config.num_layers, 4, 4096)
        return dataclasses.replace(config, rope=rope, local_rope=local_rope, windows=windows)


class Exaone4(Olmo2):
    """EXAONE 4: norms after attention and MLP, and on query and key heads. Models with windows rotate no heads in the
    layers with full attention."""

    name = "exaone4"
    huggingface_names = ("Exaone4ForCausalLM", "exaone4")
    gguf_names = ("exaone4",)
    attention_bias = None
    rotated_norms = "heads"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return with_exaone_windows(super().config_from_huggingface(fields), fields)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        if not fields.has("attention.sliding_window"):
            return config
        return rotated_in_windows(config, gguf_windows(fields, config.num_layers, 4))

    def load_attention(self, load: LayerLoader) -> Attention:
        return load.attention(head_norms=True)


def with_exaone_windows(config: ArchitectureConfig, fields: Fields) -> ArchitectureConfig:
    """Return the settings with the windows of EXAONE 4, whose pattern may be a period or a letter for each layer of
    one."""
    if not fields.has("sliding_window"):
        return config
    pattern = fields.raw("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4)
    return rotated_in_windows(config, read_windows(fields, config.num_layers, period))


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
    attention_bias = False
    stored_names = NAMES
    rotated_norms = "wide"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields.require_silu()
        config = super().config_from_huggingface(fields)
        has_rope = rope_parameters(fields).get("rope_theta", fields.raw("rope_theta")) is not None
        num_keys = fields.integer("linear_num_key_heads", config.num_heads)
        key_dim = fields.integer("linear_key_head_dim", int(0.75 * config.hidden_size / num_keys))
        return dataclasses.replace(
            config,
            unrotated_layers=frozenset() if has_rope else frozenset(range(config.num_layers)),
            recurrent=RecurrentConfig(
                layers=linear_layers(fields, config.num_layers, 4),
                conv_width=fields.integer("linear_conv_kernel_dim", 4),
                num_heads=fields.integer("linear_num_value_heads", config.num_heads),
                head_dim=fields.integer("linear_value_head_dim", 2 * key_dim),
                num_groups=num_keys,
                state_size=key_dim,
                largest_rate=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
            ),
        )

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
