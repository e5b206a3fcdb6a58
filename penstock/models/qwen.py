"""Qwen 2 and 2.5 are Llama's layers with a bias on queries, keys and values; Qwen 3 has norms on queries and keys."""

from __future__ import annotations

import dataclasses

from penstock.models.config import (
    ArchitectureConfig,
    Fields,
    common_gguf_config,
    common_huggingface_config,
    qwen_windows,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import PreNormDecoder


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
