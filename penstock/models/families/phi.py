"""Phi 3 and 4; and families whose attention and MLP read the same normed residual: Phi 1 and 2, StableLM 2 (some
sizes), Command R and R+, and Command R7B and A."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from penstock.models.config import ArchitectureConfig, Fields, NotNative
from penstock.models.decoder import BlockDecoder, PreNormDecoder
from penstock.models.gguf_config import gguf_windows, longrope_of, metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import read_windows, rotated_in_windows
from penstock.models.layers import (
    Attention,
    ChangedAttention,
    LayerLoader,
)
from penstock.models.layout import StoredRows, fused_gate_up, fused_qkv


def _cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
    return fused_qkv(config) | fused_gate_up(config.intermediate_size)


class Phi3(PreNormDecoder):
    """Llama's layers, with queries, keys and values stored as one matrix, and gate and up as one."""

    name = "phi3"
    huggingface_names = ("Phi3ForCausalLM", "phi3")
    gguf_names = ("phi3",)
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"ffn_up": "mlp.gate_up_proj"}
    cut = staticmethod(_cut)
    gguf_cut = staticmethod(_cut)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        windows = (fields.optional_integer("sliding_window"),) * config.num_layers
        return dataclasses.replace(config, windows=windows)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        window = fields.raw("attention.sliding_window") or None
        rope = config.rope
        if rope.scaling is None and "rope_factors_long.weight" in file.tensors:
            rope = dataclasses.replace(rope, scaling=longrope_of(fields))
        return dataclasses.replace(config, rope=rope, windows=(window,) * config.num_layers)


class Phi(BlockDecoder):
    """Attention and MLP read the same normed residual. Heads are rotated in part, and every product has a bias."""

    name = "phi"
    huggingface_names = ("PhiForCausalLM", "phi")
    gguf_names: ClassVar[tuple[str, ...]] = ("phi2",)
    eps_setting = "layer_norm_eps"
    norm_kind = "layer"
    shares_norm = True
    has_gate = False
    gguf_activation = "gelu_tanh"
    stored_names: ClassVar[Mapping[str, str]] = {
        "dense": "o_proj",
        "fc1": "up_proj",
        "fc2": "down_proj",
        "final_layernorm": "norm",
    }
    gguf_cut = staticmethod(fused_qkv)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual(partial_rotary_factor=0.5, hidden_act="gelu_new")
        if fields.flag("qk_layernorm", False):
            raise NotNative(f"{fields.where} asks for qk_layernorm, which no published Phi model has.")
        return _with_biases(super().config_from_huggingface(fields))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return _with_biases(super().config_from_gguf(file))


def _with_biases(config: ArchitectureConfig) -> ArchitectureConfig:
    """Return settings of a model with a bias for every product, and with one norm for attention and MLP."""
    return dataclasses.replace(
        config, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True, parallel_blocks=True
    )


class StableLM(BlockDecoder):
    name = "stablelm"
    huggingface_names = ("StableLmForCausalLM", "stablelm")
    gguf_names = ("stablelm",)
    eps_setting = "layer_norm_eps"
    norm_kind = "layer"
    shares_norm = True
    stored_names: ClassVar[Mapping[str, str]] = {f"{part}_layernorm.norms": f"{part}_norm" for part in "qk"}
    rotated_norms = "none"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return dataclasses.replace(
            super().config_from_huggingface(fields.with_usual(partial_rotary_factor=0.25)),
            qkv_bias=fields.flag("use_qkv_bias", False),
            parallel_blocks=fields.flag("use_parallel_residual", False),
            head_norms=fields.flag("qk_layernorm", False),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(
            super().config_from_gguf(file),
            parallel_blocks=metadata_fields(file).flag("use_parallel_residual", False),
            head_norms="blk.0.attn_q_norm.weight" in file.tensors,
        )

    def load_attention(self, load: LayerLoader) -> Attention | ChangedAttention:
        if not self.config.head_norms:
            return load.attention()
        return ChangedAttention(load.attention(), load.head_layer_norms(interleaved=False))


class Cohere(BlockDecoder):
    """Command R, and Command R+ with norms of its own for each query and key head. Rotary pairs are neighbours."""

    name = "cohere"
    huggingface_names: ClassVar[tuple[str, ...]] = ("CohereForCausalLM", "cohere")
    gguf_names: ClassVar[tuple[str, ...]] = ("command-r",)
    attention_bias = False
    eps_setting = "layer_norm_eps"
    norm_kind = "layer without bias"
    shares_norm = True
    is_interleaved = True
    is_gguf_interleaved = True
    rotated_norms = "none"

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields.with_usual(tie_word_embeddings=True))
        return dataclasses.replace(
            config,
            # max_position_embeddings is shorter than the context that the models were made for.
            max_positions=fields.integer("model_max_length", config.max_positions),
            logit_scale=fields.number("logit_scale", 0.0625),
            parallel_blocks=True,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return dataclasses.replace(
            super().config_from_gguf(file),
            logit_scale=metadata_fields(file).number("logit_scale", 1.0),
            parallel_blocks=True,
        )

    def load_attention(self, load: LayerLoader) -> Attention | ChangedAttention:
        if not load.weights.has(f"{load.prefix}.self_attn.q_norm.weight"):
            return load.attention()
        return ChangedAttention(load.attention(), load.head_layer_norms(interleaved=True))


class Cohere2(Cohere):
    """Command R7B and A: windows on most layers; the others rotate no heads."""

    name = "cohere2"
    huggingface_names = ("Cohere2ForCausalLM", "cohere2")
    gguf_names = ("cohere2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config, period = super().config_from_huggingface(fields), fields.integer("sliding_window_pattern", 4)
        return rotated_in_windows(config, read_windows(fields, config.num_layers, period, 4096))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        return rotated_in_windows(config, gguf_windows(metadata_fields(file), config.num_layers, 4))
