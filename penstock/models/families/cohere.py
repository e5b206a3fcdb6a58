"""Command R and R+, and Command R7B and A: attention and MLP read the same normed residual."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.gguf_config import common_gguf_config, gguf_windows, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_windows, windows_by_pattern
from penstock.models.layers import (
    Block,
    ChangedAttention,
    LayerLoader,
    Norm,
    load_layer_norm,
)
from penstock.models.layout import Layout, rotated_rows
from penstock.models.weights import WeightLoader


class Cohere(Decoder):
    """Command R, and Command R+ with norms of its own for each query and key head. Rotary pairs are neighbours."""

    name = "cohere"
    huggingface_names: ClassVar[tuple[str, ...]] = ("CohereForCausalLM", "cohere")
    gguf_names: ClassVar[tuple[str, ...]] = ("command-r",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        has_bias = fields.flag("attention_bias", False)
        fields = Fields({"tie_word_embeddings": True, **fields.values}, fields.where)
        config = common_huggingface_config(fields, cls.name)
        return dataclasses.replace(
            config,
            norm_eps=fields.number("layer_norm_eps", 1e-5),
            # max_position_embeddings is shorter than the context that the models were made for.
            max_positions=fields.integer("model_max_length", config.max_positions),
            logit_scale=fields.number("logit_scale", 0.0625),
            qkv_bias=has_bias,
            output_bias=has_bias,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        return dataclasses.replace(config, logit_scale=metadata_fields(file).number("logit_scale", 1.0))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(rows=rotated_rows(config, interleaved=True, head_norms=False))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(rows=rotated_rows(config, interleaved=True, head_norms=False))

    def load_layer(self, load: LayerLoader) -> Block:
        norm = load.layer_norm("input_layernorm", bias=False)
        attention: Any = load.attention()
        if load.weights.has(f"{load.prefix}.self_attn.q_norm.weight"):
            attention = ChangedAttention(attention, load.head_layer_norms(interleaved=True))
        return Block(attention_norm=norm, attention=attention, mlp_norm=norm, mlp=load.gated_mlp())

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config, bias=False)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        hidden = layer.attention_norm(ops, residual)
        residual.add_(layer.attention(ops, hidden, cache, batch)).add_(layer.mlp(ops, hidden))


class Cohere2(Cohere):
    """Command R7B and A: windows on most layers; the others rotate no heads."""

    name = "cohere2"
    huggingface_names = ("Cohere2ForCausalLM", "cohere2")
    gguf_names = ("cohere2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        window = fields.integer("sliding_window", 4096)
        windows = layer_windows(fields, config.num_layers, window)
        if windows is None:
            period = fields.integer("sliding_window_pattern", 4)
            windows = windows_by_pattern(window, period, config.num_layers)
        return _with_windows(config, windows)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        return _with_windows(config, gguf_windows(metadata_fields(file), config.num_layers, 4))


def _with_windows(config: ArchitectureConfig, windows: tuple[int | None, ...]) -> ArchitectureConfig:
    unrotated = frozenset(index for index, window in enumerate(windows) if window is None)
    return dataclasses.replace(config, windows=windows, unrotated_layers=unrotated)
