"""Decoders with Llama's layers: Llama 2 and 3, and SmolLM2; Mistral, whose layers may have a window; Mixtral, a
Mistral with a mixture of experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.decoder import PreNormDecoder
from penstock.models.experts import ExpertMLP, load_experts
from penstock.models.gguf_config import common_gguf_config, mixture_in_gguf
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import LayerLoader
from penstock.models.layout import Layout, rotated_rows


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
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # Rows of queries and keys are stored in the order of interleaved rotary pairs.
        return gguf_layout(rows=rotated_rows(config, interleaved=True))


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


class Mixtral(Mistral):
    name = "mixtral"
    huggingface_names = ("MixtralForCausalLM", "mixtral")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        experts = ExpertsConfig(
            count=fields.integer("num_local_experts"),
            per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            normalizes=True,
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise mixture_in_gguf(file)

    def load_mlp(self, load: LayerLoader) -> ExpertMLP:
        return load_experts(load, "block_sparse_moe", ("w1", "w3", "w2"))
