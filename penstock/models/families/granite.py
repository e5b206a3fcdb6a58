"""Granite 3, dense."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.families.llama import Llama
from penstock.models.gguf_config import common_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import Block, LayerLoader
from penstock.models.layout import Layout


class Granite(Decoder):
    """Granite 3, dense: Llama with factors for embeddings, attention, residual additions and logits."""

    name = "granite"
    huggingface_names: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM", "granite")
    gguf_names: ClassVar[tuple[str, ...]] = ("granite",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return dataclasses.replace(
            Llama.config_from_huggingface(fields),
            architecture=cls.name,
            attention_scale=fields.number("attention_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1.0 / fields.number("logits_scaling", 1.0),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return with_gguf_scales(common_gguf_config(file, cls.name), file)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return Llama.gguf_layout(config)

    def load_layer(self, load: LayerLoader) -> Block:
        return Block(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        scale = self.config.residual_scale
        hidden = layer.attention(ops, layer.attention_norm(ops, residual), cache, batch)
        residual.add_(hidden, alpha=scale)
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)), alpha=scale)


def with_gguf_scales(config: ArchitectureConfig, file: GGUFFile) -> ArchitectureConfig:
    """Return the settings with Granite's factors, as GGUF files of all its generations name them."""
    fields = metadata_fields(file)
    return dataclasses.replace(
        config,
        attention_scale=fields.number("attention.scale", config.attention_scale),
        embedding_scale=fields.number("embedding_scale", 1.0),
        residual_scale=fields.number("residual_scale", 1.0),
        logit_scale=1.0 / fields.number("logit_scale", 1.0),
    )
