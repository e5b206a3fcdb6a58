"""gpt-oss: attention with sinks and a window in every second layer, and experts with biases and a clamped gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from penstock.kernels.interface import SWIGLU_ALPHA, SWIGLU_LIMIT
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.decoder import DecoderLayer, PreNormDecoder
from penstock.models.experts import ExpertMLP, load_experts
from penstock.models.gguf_config import gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import mixtral_experts, read_windows
from penstock.models.layers import LayerLoader
from penstock.models.layout import StackedPart

_GATE_UP = ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias")
_EXPERTS = {
    "gate_proj": StackedPart(*_GATE_UP, 0, 2, interleaved=True, transposed=True),
    "up_proj": StackedPart(*_GATE_UP, 1, 2, interleaved=True, transposed=True),
    "down_proj": StackedPart("mlp.experts.down_proj", "mlp.experts.down_proj_bias", transposed=True),
}


class GptOss(PreNormDecoder):
    name = "gpt_oss"
    huggingface_names = ("GptOssForCausalLM", "gpt_oss")
    gguf_names = ("gpt-oss",)
    attention_bias = True
    gguf_experts_normalize = True
    stored_names: ClassVar[Mapping[str, str]] = {"router": "gate"}
    gguf_stored_names: ClassVar[Mapping[str, str]] = {
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    }
    stacked_experts = _EXPERTS

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        limits = fields.number("swiglu_limit", SWIGLU_LIMIT), fields.number("swiglu_alpha", SWIGLU_ALPHA)
        if limits != (SWIGLU_LIMIT, SWIGLU_ALPHA):
            raise NotNative(
                f"{fields.where} clamps gates in another way than gpt-oss: limit and alpha {limits}."
            )
        config = super().config_from_huggingface(fields)
        return dataclasses.replace(
            config,
            windows=read_windows(fields, config.num_layers, 2, 128),
            activation="clamped_swiglu",
            experts=mixtral_experts(fields),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        rope = config.rope
        if rope.scaling is not None:
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
        windows = gguf_windows(metadata_fields(file), config.num_layers, 2)
        return dataclasses.replace(config, rope=rope, windows=windows, activation="clamped_swiglu")

    def load_layer(self, load: LayerLoader) -> DecoderLayer:
        layer = super().load_layer(load)
        sinks = load.weights.vector(f"{load.prefix}.self_attn.sinks", self.config.num_heads)
        own = load.heads.queries
        attention = dataclasses.replace(layer.attention.layer, sinks=sinks[own.start : own.stop].contiguous())
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, layer=attention))

    def load_mlp(self, load: LayerLoader) -> ExpertMLP:
        return load_experts(load, bias=True)
