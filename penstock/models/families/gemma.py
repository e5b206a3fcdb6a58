"""Gemma 1, 2 and 3, text. Reads the text part of multimodal checkpoints of Gemma 3."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RopeConfig
from penstock.models.decoder import Decoder, PreNormDecoder
from penstock.models.gguf_config import common_gguf_config, gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import (
    read_windows,
    ropes_by_layer_kind,
    windows_by_pattern,
)
from penstock.models.layers import LayerLoader, SandwichLayer
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
_DEFAULT_PATTERN = 6  # every sixth layer has full attention
_WHOLE_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
# The 27B models scale attention by their hidden size per head; in GGUF metadata only their depth tells.
_LAYERS_OF_GEMMA2_27B = 46
_LAYERS_OF_GEMMA3_27B = 62


Settings = TypeVar("Settings", bound=ArchitectureConfig)


def _with_defaults(fields: Fields) -> Fields:
    """Add values that the files leave out."""
    return fields.with_usual(head_dim=256, tie_word_embeddings=True).changed(hidden_act=None)


def rounded_scale(config: Settings, loader: WeightLoader) -> Settings:
    """Scale embeddings by the root of the hidden size, rounded to the compute type as in training."""
    scale = torch.tensor(config.hidden_size**0.5, dtype=loader.ops.dtype)
    return dataclasses.replace(config, embedding_scale=float(scale))


class Gemma(PreNormDecoder):
    """The first Gemma: Llama's layers with a scaled embedding, and norms that are stored less 1."""

    name = "gemma"
    huggingface_names = ("GemmaForCausalLM", "gemma")
    gguf_names = ("gemma",)
    attention_bias = False

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # The first files name exact gelu, and the models were trained with the approximation.
        usual = fields.text("hidden_act", "gelu") == "gelu"
        activation = "gelu_tanh" if usual else fields.activation("hidden_act", "gelu_pytorch_tanh")
        config = super().config_from_huggingface(_with_defaults(fields))
        return dataclasses.replace(config, activation=activation, norm_offset=1.0)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(super().config_from_gguf(file), activation="gelu_tanh")

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(rounded_scale(config, loader), loader, max_model_len)


class Gemma2(Decoder):
    """Gemma 2: norms on both sides of attention and MLP, caps on attention and logits, windows on every second
    layer."""

    name = "gemma2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM", "gemma2")
    gguf_names: ClassVar[tuple[str, ...]] = ("gemma2",)
    attention_bias = False
    mlp_norm_name = "pre_feedforward_layernorm"
    gguf_stored_names: ClassVar[Mapping[str, str]] = {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = _with_defaults(fields)
        config = super().config_from_huggingface(fields)
        return dataclasses.replace(
            config,
            windows=read_windows(fields, config.num_layers, 2, 4096),
            attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=fields.optional_number("attn_logit_softcapping"),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
            norm_offset=1.0,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        fields = metadata_fields(file)
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(
            config,
            windows=windows_by_pattern(
                fields.integer("attention.sliding_window", 4096), 2, config.num_layers
            ),
            attention_scale=_gguf_scale(config, _LAYERS_OF_GEMMA2_27B),
            attention_softcap=fields.number("attn_logit_softcapping", 50.0),
            logit_softcap=fields.number("final_logit_softcapping", 30.0),
            activation="gelu_tanh",
        )

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(rounded_scale(config, loader), loader, max_model_len)

    def load_layer(self, load: LayerLoader) -> SandwichLayer:
        return SandwichLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=self.load_attention(load),
            after_attention_norm=load.rms_norm("post_attention_layernorm"),
            mlp_norm=load.rms_norm("pre_feedforward_layernorm"),
            mlp=load.gated_mlp(),
            after_mlp_norm=load.rms_norm("post_feedforward_layernorm"),
        )

    def run_layer(
        self, layer: SandwichLayer, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        layer.run(residual, ops, cache, batch)


class Gemma3(Gemma2):
    """Gemma 3, text: norms on query and key heads, and layers with a window have a rope of their own."""

    name = "gemma3"
    huggingface_names = (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        "gemma3",
    )
    gguf_names = ("gemma3",)
    has_head_norms = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        text = fields.raw("text_config")
        given = {key: value for key, value in (text or fields.values).items() if value is not None}
        outer = {key: fields.raw(key) for key in ("eos_token_id", "dtype", "torch_dtype") if fields.has(key)}
        fields = Fields({**_DEFAULTS, **given, **outer}, fields.where)
        if fields.raw("use_bidirectional_attention") not in (None, False):
            raise ModelLoadError(
                f"{fields.where} asks for attention in both directions, which a model that writes text does not have."
            )
        rope, local_rope, plain = ropes_by_layer_kind(fields, _WHOLE_THETA, _LOCAL_THETA)
        period = fields.integer(
            "sliding_window_pattern", fields.integer("_sliding_window_pattern", _DEFAULT_PATTERN)
        )
        config = super().config_from_huggingface(plain)
        windows = read_windows(fields, config.num_layers, period)
        return dataclasses.replace(config, rope=rope, local_rope=local_rope, windows=windows)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        fields = metadata_fields(file)
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(
            config,
            rope=RopeConfig(fields.number("rope.freq_base", _WHOLE_THETA), config.rope.scaling),
            local_rope=RopeConfig(fields.number("rope.freq_base_swa", _LOCAL_THETA)),
            windows=gguf_windows(fields, config.num_layers, _DEFAULT_PATTERN),
            attention_scale=_gguf_scale(config, _LAYERS_OF_GEMMA3_27B),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            activation="gelu_tanh",
        )


def _gguf_scale(config: ArchitectureConfig, num_layers_of_27b: int) -> float:
    if config.num_layers == num_layers_of_27b:
        return math.sqrt(config.num_heads / config.hidden_size)
    return config.attention_scale
