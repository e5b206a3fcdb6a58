"""Decoders with Llama's layers: Llama 2 and 3, and SmolLM2; Mistral, whose layers may have a window; Qwen 2 and 2.5,
with a bias on queries, keys and values; Qwen 3, with norms on queries and keys."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.models.config import (
    ArchitectureConfig,
    Fields,
    common_gguf_config,
    common_huggingface_config,
    qwen_windows,
)
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


class Qwen2(PreNormDecoder):
    name = "qwen2"
    huggingface_names = ("Qwen2ForCausalLM", "qwen2")
    gguf_names = ("qwen2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        return qwen_windows(fields, dataclasses.replace(config, qkv_bias=True))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(common_gguf_config(file, cls.name), qkv_bias=True)


_DEFAULT_HEAD_DIM = 128  # not hidden size / heads


class Qwen3(PreNormDecoder):
    name = "qwen3"
    huggingface_names = ("Qwen3ForCausalLM", "qwen3")
    gguf_names = ("qwen3",)
    has_head_norms = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        head_dim = fields.integer("head_dim", _DEFAULT_HEAD_DIM)
        config = dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            head_dim=head_dim,
            attention_scale=head_dim**-0.5,
            qkv_bias=has_bias,
            output_bias=has_bias,
        )
        return qwen_windows(fields, config)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)
