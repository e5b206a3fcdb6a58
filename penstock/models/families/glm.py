"""GLM 4, dense: rotary pairs of neighbours in half of each head, and gate and up stored as one matrix."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import Decoder, PreNormDecoder
from penstock.models.gguf_config import common_gguf_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import LayerLoader, SandwichLayer
from penstock.models.layout import Layout, fused_gate_up, fused_qkv, rotated_rows


class _GlmCheckpoints:
    """The settings and the folders of both releases."""

    name: ClassVar[str]

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return glm_config(fields, cls.name)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        return common_gguf_config(file, cls.name)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(
            cut=fused_gate_up(config.intermediate_size), rows=rotated_rows(config, interleaved=True)
        )


class Glm(_GlmCheckpoints, PreNormDecoder):
    """Models of the first release, with Llama's layers."""

    name = "glm"
    huggingface_names = ("GlmForCausalLM", "glm")
    gguf_names = ("chatglm",)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        # Files converted from the makers' first folders hold queries, keys and values as one matrix.
        cut = fused_gate_up(config.intermediate_size) | fused_qkv(config)
        rows = rotated_rows(config, interleaved=True)
        return gguf_layout({"ffn_up": "mlp.gate_up_proj"}, cut=cut, rows=rows)


class Glm4(_GlmCheckpoints, Decoder):
    """Models of the second release, with one more norm after attention and after the MLP."""

    name = "glm4"
    huggingface_names = ("Glm4ForCausalLM", "glm4")
    gguf_names = ("glm4",)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        names = {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
        # The converter puts the halves of rotary pairs apart in models with positions in three dimensions (GLM 4.1V).
        rows = rotated_rows(config, interleaved=not config.rope_axes)
        return gguf_layout(names, cut=fused_gate_up(config.intermediate_size), rows=rows)

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
    fields = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
    config = common_huggingface_config(fields, name)
    return dataclasses.replace(config, qkv_bias=fields.flag("attention_bias", name == "glm"))
