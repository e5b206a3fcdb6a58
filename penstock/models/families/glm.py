"""GLM 4, dense: rotary pairs of neighbours in half of each head, and gate and up stored as one matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder, PreNormDecoder
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import LayerLoader, SandwichLayer
from penstock.models.layout import Layout, StoredRows, fused_gate_up, fused_qkv


class Glm(PreNormDecoder):
    """Models of the first release, with Llama's layers."""

    name = "glm"
    huggingface_names = ("GlmForCausalLM", "glm")
    gguf_names = ("chatglm",)
    gguf_stored_names: ClassVar[Mapping[str, str]] = {"ffn_up": "mlp.gate_up_proj"}
    is_interleaved = True
    is_gguf_interleaved = True

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return glm_config(fields, cls.name)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return fused_gate_up(config.intermediate_size)

    @staticmethod
    def gguf_cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        # Files converted from the makers' first folders hold queries, keys and values as one matrix.
        return fused_gate_up(config.intermediate_size) | fused_qkv(config)


class Glm4(Decoder):
    """Models of the second release, with one more norm after attention and after the MLP."""

    name = "glm4"
    huggingface_names = ("Glm4ForCausalLM", "glm4")
    gguf_names = ("glm4",)
    is_interleaved = True
    gguf_stored_names: ClassVar[Mapping[str, str]] = {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return glm_config(fields, cls.name)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return fused_gate_up(config.intermediate_size)

    gguf_cut = cut

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # The converter puts the halves of rotary pairs apart in models with positions in three dimensions (GLM 4.1V).
        rows = cls.rows(config, interleaved=not config.rope_axes)
        return dataclasses.replace(super().gguf_layout(config), rows=rows)

    def load_layer(self, load: LayerLoader) -> SandwichLayer:
        return SandwichLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=load.attention(),
            after_attention_norm=load.rms_norm("post_self_attn_layernorm"),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
            after_mlp_norm=load.rms_norm("post_mlp_layernorm"),
        )

    def run_layer(
        self, layer: SandwichLayer, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        layer.run(residual, ops, cache, batch)


def glm_config(fields: Fields, name: str) -> ArchitectureConfig:
    config = common_huggingface_config(fields.with_usual(partial_rotary_factor=0.5), name)
    return dataclasses.replace(config, qkv_bias=fields.flag("attention_bias", name == "glm"))
