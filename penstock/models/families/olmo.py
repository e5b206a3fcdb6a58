"""OLMo 1, 2 and 3, and EXAONE 4, whose layers are normed after attention and MLP instead of before."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.families.llama import Llama
from penstock.models.gguf_config import common_gguf_config, gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_windows,
    ropes_by_layer_kind,
    windows_by_pattern,
)
from penstock.models.layers import Block, ChangedAttention, Clipped, LayerLoader, LayerNorm, Norm
from penstock.models.layout import Layout
from penstock.models.weights import WeightLoader


class Olmo(Decoder):
    """The first OLMo: Llama with layer norms that have no weights, and limits on queries, keys and values."""

    name = "olmo"
    huggingface_names = ("OlmoForCausalLM", "olmo")
    gguf_names = ("olmo",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            norm_eps=1e-5,
            qkv_bias=has_bias,
            output_bias=has_bias,
            qkv_limit=fields.optional_number("clip_qkv"),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        limit = metadata_fields(file).optional_number("attention.clamp_kqv")
        return dataclasses.replace(common_gguf_config(file, cls.name), qkv_limit=limit)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return Llama.gguf_layout(config)

    def load_layer(self, load: LayerLoader) -> Block:
        norm, limit = self.load_final_norm(load.weights), self.config.qkv_limit
        attention = load.attention()
        return Block(
            attention_norm=norm,
            attention=attention if limit is None else ChangedAttention(attention, Clipped(limit)),
            mlp_norm=norm,
            mlp=load.gated_mlp(),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return LayerNorm(None, None, self.config.norm_eps)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))


class Olmo2(Decoder):
    """OLMo 2: norms after attention and MLP, and over all query heads and all key heads together."""

    name = "olmo2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Olmo2ForCausalLM", "olmo2")
    gguf_names: ClassVar[tuple[str, ...]] = ("olmo2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        config = common_huggingface_config(fields, cls.name)
        return dataclasses.replace(config, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        if not fields.has("attention.sliding_window"):
            return config
        # OLMo 3, which stretches the layers with full attention only.
        return dataclasses.replace(
            config,
            windows=gguf_windows(fields, config.num_layers, 4),
            local_rope=dataclasses.replace(config.rope, scaling=None),
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(
            {
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            }
        )

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention=ChangedAttention(load.attention(), load.wide_norms()),
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
        window = fields.integer("sliding_window", 4096)
        windows = layer_windows(fields, config.num_layers, window)
        return dataclasses.replace(
            config,
            rope=rope,
            local_rope=local_rope,
            windows=windows_by_pattern(window, 4, config.num_layers) if windows is None else windows,
        )


class Exaone4(Olmo2):
    """EXAONE 4: norms after attention and MLP, and on query and key heads. Models with windows rotate no heads in the
    layers with full attention."""

    name = "exaone4"
    huggingface_names = ("Exaone4ForCausalLM", "exaone4")
    gguf_names = ("exaone4",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        if not fields.has("sliding_window"):
            return config
        window = fields.integer("sliding_window")
        windows = layer_windows(fields, config.num_layers, window)
        if windows is None:
            pattern = fields.raw("sliding_window_pattern")
            period = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4)
            windows = windows_by_pattern(window, period, config.num_layers)
        return _without_rope_where_all_is_seen(dataclasses.replace(config, windows=windows))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        if not fields.has("attention.sliding_window"):
            return config
        windows = gguf_windows(fields, config.num_layers, 4)
        return _without_rope_where_all_is_seen(dataclasses.replace(config, windows=windows))

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention=load.attention(head_norms=True),
            attention_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
            mlp_norm=load.rms_norm("post_feedforward_layernorm"),
        )


def _without_rope_where_all_is_seen(config: ArchitectureConfig) -> ArchitectureConfig:
    unrotated = frozenset(index for index, window in enumerate(config.windows) if window is None)
    return dataclasses.replace(config, unrotated_layers=unrotated)
