"""Llama 2 and 3, SmolLM2 and all that share their layers; Mistral, whose layers may have a window."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.models.config import ArchitectureConfig, Fields, common_gguf_config, common_huggingface_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFLayout
from penstock.models.layers import PreNormDecoder


class Llama(PreNormDecoder):
    name = "llama"
    huggingface_names = ("LlamaForCausalLM", "llama")
    gguf_names: ClassVar[tuple[str, ...]] = ("llama",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> GGUFLayout:
        return GGUFLayout(interleaved_heads={"attn_q": config.num_heads, "attn_k": config.num_kv_heads})


class Mistral(Llama):
    """GGUF files call these models "llama" too, and never had their windows."""

    name = "mistral"
    huggingface_names = ("MistralForCausalLM", "mistral")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        # The first release has the key; later ones set it to null to say that there is no window.
        if not fields.has("sliding_window"):
            return config
        window = fields.integer("sliding_window")
        return dataclasses.replace(config, windows=(window,) * config.num_layers)
