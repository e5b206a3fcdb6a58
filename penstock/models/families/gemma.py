"""Gemma 3, text: windows on most layers with a rope of their own, norms on both sides of attention and MLP, norms
on query and key heads, and a scaled embedding. Reads the text part of multimodal checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig
from penstock.models.decoder import Decoder
from penstock.models.gguf_config import common_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_windows,
    rope_config,
    rope_parameters,
)
from penstock.models.layers import Attention, GatedMLP, LayerLoader, Norm, RMSNorm
from penstock.models.layout import Layout
from penstock.models.weights import WeightLoader

# Published config.json files leave out values that equal these.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DEFAULT_PATTERN = 6  # every sixth layer sees the whole context
_WHOLE_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
# The 27B model scales attention by its hidden size per head; in GGUF metadata only its depth tells.
_LAYERS_OF_27B = 62


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A layer whose two halves are normed before and after."""

    attention_norm: Norm
    attention: Attention
    after_attention_norm: Norm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    after_mlp_norm: Norm


class Gemma3(Decoder):
    name = "gemma3"
    huggingface_names = (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        "gemma3",
    )
    gguf_names = ("gemma3",)
    mlp_norm_name = "pre_feedforward_layernorm"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        text = fields.raw("text_config")
        given = {key: value for key, value in (text or fields.values).items() if value is not None}
        outer = {key: fields.raw(key) for key in ("eos_token_id", "dtype", "torch_dtype") if fields.has(key)}
        fields = Fields({**_DEFAULTS, **given, **outer}, fields.where)
        rope, local_rope = _ropes(fields)
        # The common part reads one rope for all layers.
        plain = {key: value for key, value in fields.values.items() if not key.startswith("rope_")}
        config = common_huggingface_config(Fields(plain, fields.where), cls.name)
        return dataclasses.replace(
            config,
            rope=rope,
            local_rope=local_rope,
            windows=_windows(fields, config.num_layers),
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            attention_softcap=fields.optional_number("attn_logit_softcapping"),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            qkv_bias=fields.flag("attention_bias", False),
            output_bias=fields.flag("attention_bias", False),
            activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
            norm_offset=1.0,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        fields = metadata_fields(file)
        config = common_gguf_config(file, cls.name)
        scale = config.attention_scale
        if config.num_layers == _LAYERS_OF_27B:
            scale = (config.hidden_size / config.num_heads) ** -0.5
        return dataclasses.replace(
            config,
            rope=RopeConfig(fields.number("rope.freq_base", _WHOLE_THETA), config.rope.scaling),
            local_rope=RopeConfig(fields.number("rope.freq_base_swa", _LOCAL_THETA)),
            windows=_gguf_windows(fields, config.num_layers),
            attention_scale=scale,
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            activation="gelu_tanh",
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(
            {
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            }
        )

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        # Rounded to the compute type, as in training.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=loader.ops.dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).mul_(self._embedding_scale)

    def load_layer(self, load: LayerLoader) -> SandwichLayer:
        return SandwichLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(head_norms=True),
            after_attention_norm=load.rms_norm("post_attention_layernorm"),
            mlp_norm=load.rms_norm("pre_feedforward_layernorm"),
            mlp=load.gated_mlp(),
            after_mlp_norm=load.rms_norm("post_feedforward_layernorm"),
        )

    def run_layer(
        self, layer: SandwichLayer, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        hidden = layer.attention(ops, layer.attention_norm(ops, residual), cache, batch)
        hidden = layer.after_attention_norm(ops, hidden)
        hidden = ops.add_rms_norm(hidden, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
        residual.add_(layer.after_mlp_norm(ops, layer.mlp(ops, hidden)))


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers that see the whole context, and of layers with a window."""
    parameters = rope_parameters(fields)
    sizes = {
        "max_positions": fields.integer("max_position_embeddings"),
        "head_dim": fields.integer("head_dim"),
    }
    whole, local = parameters, None
    if "full_attention" in parameters:
        whole, local = parameters["full_attention"], parameters.get("sliding_attention", {})
    rope = rope_config(whole, fields, **sizes, default_theta=_WHOLE_THETA)
    if local is None:
        return rope, RopeConfig(fields.number("rope_local_base_freq", _LOCAL_THETA))
    return rope, rope_config(local, fields, **sizes, default_theta=_LOCAL_THETA)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window")
    listed = layer_windows(fields, num_layers, window)
    if listed is not None:
        return listed
    pattern = fields.integer(
        "sliding_window_pattern", fields.integer("_sliding_window_pattern", _DEFAULT_PATTERN)
    )
    return _by_pattern(window, pattern, num_layers)


def _gguf_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Read the windows. The pattern is a period, or one flag for each layer; most files leave it out."""
    window = fields.integer("attention.sliding_window")
    flags = fields.raw("attention.sliding_window_pattern")
    if isinstance(flags, list) and len(flags) == num_layers:
        return tuple(window if flag else None for flag in flags)
    return _by_pattern(
        window, fields.integer("attention.sliding_window_pattern", _DEFAULT_PATTERN), num_layers
    )


def _by_pattern(window: int, pattern: int, num_layers: int) -> tuple[int | None, ...]:
    return tuple(None if (index + 1) % pattern == 0 else window for index in range(num_layers))
