"""LFM2: most layers are gated short convolutions, and some are attention. LFM2-MoE has experts after its first
layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields, RecurrentConfig
from penstock.models.experts import FUSED_EXPERTS, ExpertMLP, add_mlp, load_experts, num_experts
from penstock.models.gguf_config import (
    SIGMOID,
    gguf_experts,
    has_tensor,
    hybrid_gguf_config,
    layers_with,
    metadata_fields,
)
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, rotated_rows
from penstock.models.recurrent import (
    GatedConv,
    HybridDecoder,
    LayerCache,
    gated_conv_rows,
    load_gated_conv,
)

NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
GGUF_NAMES = {
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "token_embd_norm": "model.norm",  # the norm behind the last layer, whatever its name says
    "exp_probs_b.bias": "mlp.expert_bias",
}

_LEAST_SUM = 1e-6  # of the weights of experts


@dataclass(frozen=True, slots=True)
class Lfm2Layer:
    norm: RMSNorm
    attention: Attention | None
    mixer: GatedConv | None
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


class Lfm2(HybridDecoder):
    name = "lfm2"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Lfm2ForCausalLM", "lfm2")
    gguf_names: ClassVar[tuple[str, ...]] = ("lfm2",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        mlp_size = _mlp_size(fields)
        fields = Fields({**fields.values, "intermediate_size": mlp_size}, fields.where)
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
        return dataclasses.replace(
            hybrid_gguf_config(file, cls.name),
            recurrent=RecurrentConfig(
                layers=layers_with(file, "shortconv.conv.weight"),
                conv_width=metadata_fields(file).integer("shortconv.l_cache"),
                conv_bias=has_tensor(file, "shortconv.conv.bias"),
                bias=has_tensor(file, "shortconv.in_proj.bias"),
            ),
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_layout(
            GGUF_NAMES,
            cut=gated_conv_rows(config),
            rows=rotated_rows(config),
            num_experts=num_experts(config),
        )

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
            mlp=self.load_mlp(load),
        )

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        return load.gated_mlp()

    def run_layer(
        self, layer: Lfm2Layer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.attention is not None:
            layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
        elif layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)


class Lfm2Moe(Lfm2):
    name = "lfm2_moe"
    huggingface_names = ("Lfm2MoeForCausalLM", "lfm2_moe")
    gguf_names = ("lfm2moe",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = Fields({**fields.values, "block_auto_adjust_ff_dim": False}, fields.where)
        num_dense = fields.raw("num_dense_layers")
        experts = ExpertsConfig(
            count=fields.integer("num_experts", 32),
            per_token=fields.integer("num_experts_per_tok", 4),
            intermediate_size=fields.integer("moe_intermediate_size"),
            normalizes=fields.switch("norm_topk_prob", True),
            dense_layers=frozenset(range(2 if num_dense is None else num_dense)),
            scoring="sigmoid",
            weight_scale=fields.number("routed_scaling_factor", 1.0),
            least_sum=_LEAST_SUM,
        )
        return dataclasses.replace(super().config_from_huggingface(fields), experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        experts = gguf_experts(file, config, normalizes=True, usual_gating=SIGMOID)
        return dataclasses.replace(config, experts=dataclasses.replace(experts, least_sum=_LEAST_SUM))

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return dataclasses.replace(
            super().layout(config), experts=FUSED_EXPERTS, num_experts=num_experts(config)
        )

    def load_mlp(self, load: LayerLoader) -> GatedMLP | ExpertMLP:
        assert load.config.experts is not None
        if load.index in load.config.experts.dense_layers:
            return load.gated_mlp()
        has_bias = load.weights.has(f"{load.prefix}.mlp.expert_bias")
        return load_experts(load, selection_bias="expert_bias" if has_bias else None)


def _mlp_size(fields: Fields) -> int:
    """Return the width of MLPs, which files may state before it is adjusted."""
    size = fields.integer("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple
