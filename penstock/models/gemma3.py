"""Gemma 3, text: windows on most layers with a rope of their own, norms on both sides of attention and MLP, norms
on query and key heads, and a scaled embedding. Reads the text part of multimodal checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.config import (
    ArchitectureConfig,
    Fields,
    RopeConfig,
    common_gguf_config,
    common_huggingface_config,
    layer_windows,
    metadata_fields,
    rope_config,
    rope_parameters,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFLayout
from penstock.models.layers import Decoder, DecoderLayer, GatedMLP
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
    """A layer whose two halves are normed once more before they are added."""

    inner: DecoderLayer
    mlp: GatedMLP
    after_attention_norm: Tensor
    after_mlp_norm: Tensor


class Gemma3(Decoder):
    name = "gemma3"
    huggingface_names = (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        "gemma3",
    )
    gguf_names = ("gemma3",)
    has_head_norms = True
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
    def gguf_layout(cls, config: ArchitectureConfig) -> GGUFLayout:
        return GGUFLayout(
            layer_names={
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

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        ops = self._ops
        attention, mlp = ops.attention, ops.mlp
        rms_norm, add_rms_norm = ops.rms_norm, ops.add_rms_norm
        norm_eps, activation, kv_layer = self.config.norm_eps, self.config.activation, kv.layer
        for index, sandwich in enumerate(self._layers):
            layer = sandwich.inner
            hidden = rms_norm(residual, layer.attention_norm, norm_eps)
            hidden = attention(hidden, layer.qkv, layer.output, layer.attention, kv_layer(index), batch)
            hidden = rms_norm(hidden, sandwich.after_attention_norm, norm_eps)
            hidden = add_rms_norm(hidden, residual, layer.mlp_norm, norm_eps)
            hidden = mlp(hidden, sandwich.mlp.gate_up, sandwich.mlp.down, activation)
            residual.add_(rms_norm(hidden, sandwich.after_mlp_norm, norm_eps))

    def _load_layers(self, loader: WeightLoader) -> None:
        self._layers: list[SandwichLayer] = [
            self._load_sandwich(index, loader) for index in self.layer_indices
        ]

    def _load_sandwich(self, index: int, loader: WeightLoader) -> SandwichLayer:
        inner = self._load_layer(index, loader)
        assert isinstance(inner.mlp, GatedMLP)
        return SandwichLayer(
            inner=inner,
            mlp=inner.mlp,
            after_attention_norm=self._norm(f"model.layers.{index}.post_attention_layernorm", loader),
            after_mlp_norm=self._norm(f"model.layers.{index}.post_feedforward_layernorm", loader),
        )


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers that see the whole context, and of layers with a window."""
    max_positions = fields.integer("max_position_embeddings")
    parameters = rope_parameters(fields)
    if "full_attention" in parameters:
        return (
            rope_config(parameters["full_attention"], fields, max_positions, default_theta=_WHOLE_THETA),
            rope_config(
                parameters.get("sliding_attention", {}), fields, max_positions, default_theta=_LOCAL_THETA
            ),
        )
    whole = rope_config(parameters, fields, max_positions, default_theta=_WHOLE_THETA)
    return whole, RopeConfig(fields.number("rope_local_base_freq", _LOCAL_THETA))


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
