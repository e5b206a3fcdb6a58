"""Qwen 2 and 2.5: Llama's layers with a bias on queries, keys and values."""

from __future__ import annotations

import dataclasses

from penstock.models import gguf_config, huggingface_config
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import PreNormDecoder


class Qwen2(PreNormDecoder):
    name = "qwen2"
    huggingface_names = ("Qwen2ForCausalLM", "qwen2")
    gguf_names = ("qwen2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = huggingface_config.common_config(fields, cls.name)
        return huggingface_config.qwen_windows(fields, dataclasses.replace(config, qkv_bias=True))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(gguf_config.common_config(file, cls.name), qkv_bias=True)
