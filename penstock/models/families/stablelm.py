"""StableLM 2 and 3B: layer norms with a bias, and heads that are rotated in part. The 12B model has norms of its own
for each head."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder
from penstock.models.gguf_config import common_gguf_config, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Block, ChangedAttention, LayerLoader, Norm, load_layer_norm
from penstock.models.layout import Layout, rotated_rows
from penstock.models.weights import WeightLoader


class StableLM(Decoder):
    name = "stablelm"
    huggingface_names = ("StableLmForCausalLM", "stablelm")
    gguf_names = ("stablelm",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({"partial_rotary_factor": 0.25, **fields.values}, fields.where)
        return dataclasses.replace(
            common_huggingface_config(fields, cls.name),
            norm_eps=fields.number("layer_norm_eps", 1e-5),
            qkv_bias=fields.flag("use_qkv_bias", False),
            parallel_blocks=fields.flag("use_parallel_residual", False),
            head_norms=fields.flag("qk_layernorm", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(
            common_gguf_config(file, cls.name),
            parallel_blocks=metadata_fields(file).flag("use_parallel_residual", False),
            head_norms="blk.0.attn_q_norm.weight" in file.tensors,
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {f"{part}_layernorm.norms": f"{part}_norm" for part in "qk"}
        return Layout(names=names, rows=rotated_rows(config, head_norms=False))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(rows=rotated_rows(config, head_norms=False))

    def load_layer(self, load: LayerLoader) -> Block:
        norm = load.layer_norm("input_layernorm")
        attention: Any = load.attention()
        if self.config.head_norms:
            attention = ChangedAttention(attention, load.head_layer_norms(interleaved=False))
        return Block(
            attention_norm=norm,
            attention=attention,
            mlp_norm=norm if self.config.parallel_blocks else load.layer_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        hidden = layer.attention_norm(ops, residual)
        attended = layer.attention(ops, hidden, cache, batch)
        if self.config.parallel_blocks:
            residual.add_(attended).add_(layer.mlp(ops, hidden))
        else:
            residual.add_(attended)
            residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))
