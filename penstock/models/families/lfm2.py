"""LFM2: most layers are gated short convolutions, and some are attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.experts import add_mlp
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, rotated_rows
from penstock.models.recurrent import (
    GatedConv,
    HybridDecoder,
    LayerCache,
    gated_conv_rows,
    load_gated_conv,
    no_gguf,
)

NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Lfm2Layer:
    norm: RMSNorm
    attention: Attention | None
    mixer: GatedConv | None
    mlp_norm: RMSNorm
    mlp: GatedMLP


class Lfm2(HybridDecoder):
    name = "lfm2"
    huggingface_names = ("Lfm2ForCausalLM", "lfm2")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = common_huggingface_config(fields, cls.name, default_theta=1_000_000.0)
        kinds = layer_kinds(fields, config.num_layers, {"full_attention", "conv"})
        if kinds is None:
            attends = fields.token_ids("full_attn_idxs") or range(config.num_layers)
            kinds = tuple(
                "full_attention" if index in attends else "conv" for index in range(config.num_layers)
            )
        has_bias = fields.flag("conv_bias", False)
        return dataclasses.replace(
            config,
            norm_eps=fields.number("norm_eps", 1e-5),
            intermediate_size=_mlp_size(fields),
            tie_embeddings=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
            recurrent=RecurrentConfig(
                layers=frozenset(index for index, kind in enumerate(kinds) if kind == "conv"),
                conv_width=fields.integer("conv_L_cache", 3),
                conv_bias=has_bias,
                bias=has_bias,
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise no_gguf(file)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(names=NAMES, cut=gated_conv_rows(config), rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> Lfm2Layer:
        is_conv = load.config.recurrent is not None and load.index in load.config.recurrent.layers
        return Lfm2Layer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_conv else load.attention(head_norms=True),
            mixer=load_gated_conv(load) if is_conv else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def run_layer(
        self, layer: Lfm2Layer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.attention is not None:
            layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
        elif layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)


def _mlp_size(fields: Fields) -> int:
    """Return the width of MLPs, which files may state before it is adjusted."""
    size = fields.integer("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
