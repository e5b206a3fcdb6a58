"""Ministral 3: Mistral with queries that grow with their position."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, yarn_amplitude
from penstock.models.decoder import Decoder
from penstock.models.families.llama import Llama, Mistral
from penstock.models.gguf_config import common_gguf_config, has_experts, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import growth_of_queries, rope_parameters
from penstock.models.layers import Block, LayerLoader, ScaledQueries, query_factors
from penstock.models.layout import Layout

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(Decoder):
    name = "ministral3"
    huggingface_names = ("Ministral3ForCausalLM", "ministral3")
    gguf_names = ("mistral3",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        rope = {**_DEFAULT_ROPE, **rope_parameters(fields)}
        fields = Fields({**fields.values, "rope_parameters": rope}, fields.where)
        config = Mistral.config_from_huggingface(fields)
        return dataclasses.replace(config, architecture=cls.name, **growth_of_queries(rope, fields.where))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        if has_experts(file):
            raise ModelLoadError(f"{file.path.name} has experts, which are not supported for Mistral 3.")
        rope, scaling = config.rope, config.rope.scaling
        if scaling is not None and scaling.kind == "yarn":
            # Cosines and sines have two factors. Files state the factor in the denominator; the other factor is 1.
            key = "rope.scaling.yarn_log_multiplier"
            below = fields.number(key) if fields.raw(key) else 0.0
            amplitude = yarn_amplitude(scaling.factor) / yarn_amplitude(scaling.factor, below)
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(scaling, attention_factor=amplitude))
        growth = fields.optional_number("attention.temperature_scale")
        return dataclasses.replace(config, rope=rope, query_growth=growth)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return Llama.gguf_layout(config)

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=ScaledQueries(load.attention(), query_factors(load)),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        residual.add_(layer.attention(ops, layer.attention_norm(ops, residual), cache, batch))
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))
