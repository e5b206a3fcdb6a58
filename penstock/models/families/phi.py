"""Phi 3 and 4, and Phi 1 and 2."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.decoder import Decoder, PreNormDecoder
from penstock.models.gguf_config import common_gguf_config, longrope_of, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Block, LayerLoader, Norm, load_layer_norm
from penstock.models.layout import Layout, StoredRows, fused_gate_up, fused_qkv, rotated_rows
from penstock.models.weights import WeightLoader


class Phi3(PreNormDecoder):
    """Llama's layers, with queries, keys and values stored as one matrix, and gate and up as one."""

    name = "phi3"
    huggingface_names = ("Phi3ForCausalLM", "phi3")
    gguf_names = ("phi3",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name)
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        return dataclasses.replace(config, windows=(window,) * config.num_layers)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = common_gguf_config(file, cls.name), metadata_fields(file)
        window = fields.raw("attention.sliding_window") or None
        rope = config.rope
        if rope.scaling is None and "rope_factors_long.weight" in file.tensors:
            rope = dataclasses.replace(rope, scaling=longrope_of(fields))
        return dataclasses.replace(config, rope=rope, windows=(window,) * config.num_layers)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(cut=cls._cut(config), rows=rotated_rows(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"ffn_up": "mlp.gate_up_proj"}
        return gguf_layout(names, cut=cls._cut(config), rows=rotated_rows(config))

    @staticmethod
    def _cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return fused_qkv(config) | fused_gate_up(config.intermediate_size)


class Phi(Decoder):
    """Attention and MLP read the same normed residual. Heads are rotated in part, and every product has a bias."""

    name = "phi"
    huggingface_names = ("PhiForCausalLM", "phi")
    gguf_names: ClassVar[tuple[str, ...]] = ("phi2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields(
            {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", **fields.values}, fields.where
        )
        if fields.flag("qk_layernorm", False):
            raise NotNative(f"{fields.where} asks for qk_layernorm, which no published Phi model has.")
        return _with_biases(
            dataclasses.replace(
                common_huggingface_config(fields, cls.name, gated=False),
                norm_eps=fields.number("layer_norm_eps", 1e-5),
            )
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = dataclasses.replace(common_gguf_config(file, cls.name), plain_activation="gelu_tanh")
        return _with_biases(config)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        names = {"dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj", "final_layernorm": "norm"}
        return Layout(names=names, rows=rotated_rows(config))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(cut=fused_qkv(config), rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> Block:
        norm = load.layer_norm("input_layernorm")
        return Block(attention_norm=norm, attention=load.attention(), mlp_norm=norm, mlp=load.plain_mlp())

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_layer_norm(loader, "model.norm", self.config)

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        hidden = layer.attention_norm(ops, residual)
        residual.add_(layer.attention(ops, hidden, cache, batch)).add_(layer.mlp(ops, hidden))


def _with_biases(config: ArchitectureConfig) -> ArchitectureConfig:
    return dataclasses.replace(config, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True)
