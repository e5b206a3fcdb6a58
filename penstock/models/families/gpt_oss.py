"""gpt-oss: attention with sinks and a window in every second layer, and experts with biases and a clamped gate."""

from __future__ import annotations

import dataclasses

from penstock.kernels.interface import SWIGLU_ALPHA, SWIGLU_LIMIT
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, NotNative
from penstock.models.decoder import DecoderLayer, PreNormDecoder
from penstock.models.experts import ExpertMLP, expert_layout, load_experts, num_experts
from penstock.models.gguf_config import common_gguf_config, gguf_experts, gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_windows, windows_by_pattern
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, StackedPart

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

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        limits = fields.number("swiglu_limit", SWIGLU_LIMIT), fields.number("swiglu_alpha", SWIGLU_ALPHA)
        if limits != (SWIGLU_LIMIT, SWIGLU_ALPHA):
            raise NotNative(
                f"{fields.where} clamps gates in another way than gpt-oss: limit and alpha {limits}."
            )
        config = common_huggingface_config(fields, cls.name)
        window = fields.integer("sliding_window", 128)
        has_bias = fields.flag("attention_bias", True)
        return dataclasses.replace(
            config,
            windows=layer_windows(fields, config.num_layers, window) or _windows(window, config.num_layers),
            qkv_bias=has_bias,
            output_bias=has_bias,
            activation="clamped_swiglu",
            experts=ExpertsConfig(
                count=fields.integer("num_local_experts"),
                per_token=fields.integer("num_experts_per_tok"),
                intermediate_size=fields.integer("intermediate_size"),
                normalizes=True,  # the softmax of the chosen logits
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        rope = config.rope
        if rope.scaling is not None:
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, truncate=False))
        flags = gguf_windows(metadata_fields(file), config.num_layers, 2)
        return dataclasses.replace(
            config,
            rope=rope,
            windows=flags,
            activation="clamped_swiglu",
            experts=gguf_experts(file, config, normalizes=True),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return expert_layout(config, {"router": "gate"}, _EXPERTS)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "attn_sinks.weight": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
        }
        return gguf_layout(names, num_experts=num_experts(config))

    def load_layer(self, load: LayerLoader) -> DecoderLayer:
        layer = super().load_layer(load)
        sinks = load.weights.vector(f"{load.prefix}.self_attn.sinks", self.config.num_heads)
        own = load.heads.queries
        attention = dataclasses.replace(layer.attention.layer, sinks=sinks[own.start : own.stop].contiguous())
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, layer=attention))

    def load_mlp(self, load: LayerLoader) -> ExpertMLP:
        return load_experts(load, bias=True)


def _windows(window: int, num_layers: int) -> tuple[int | None, ...]:
    return windows_by_pattern(window, 2, num_layers)
