"""Jamba: layers are Mamba 1 or attention without positions, each before an MLP or of experts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.models.config import ArchitectureConfig, ExpertsConfig, Fields
from penstock.models.experts import FUSED_EXPERTS, ExpertMLP, add_mlp, load_experts, num_experts
from penstock.models.gguf_config import gguf_experts, has_tensor, hybrid_gguf_config
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_states import gguf_mamba1_config, gguf_mamba_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout
from penstock.models.mamba1 import Mamba1Mixer, load_mamba1, mamba1_config, mamba1_rows, mamba1_settings
from penstock.models.recurrent import HybridDecoder, LayerCache

NAMES = {
    "final_layernorm": "norm",
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "mlp.router": "mlp.gate",
}


_CONTEXT = 262144  # tokens


@dataclass(frozen=True, slots=True)
class JambaLayer:
    norm: RMSNorm
    attention: Attention | None
    mixer: Mamba1Mixer | None
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


class Jamba(HybridDecoder):
    name = "jamba"
    huggingface_names = ("JambaForCausalLM", "jamba")
    gguf_names = ("jamba",)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # The first files state the context under another name, or leave it to the class.
        context = fields.raw("n_ctx") or _CONTEXT
        fields = Fields(
            {**fields.values, "max_position_embeddings": fields.integer("max_position_embeddings", context)},
            fields.where,
        )
        config = common_huggingface_config(fields, cls.name)
        every = frozenset(range(config.num_layers))
        attends = _layers(fields, "attn_layer", config.num_layers, period=8, offset=4)
        experts = None
        if fields.integer("num_experts", 16) > 1:
            experts = ExpertsConfig(
                count=fields.integer("num_experts", 16),
                per_token=fields.integer("num_experts_per_tok", 2),
                intermediate_size=config.intermediate_size,
                normalizes=False,
                dense_layers=every - _layers(fields, "expert_layer", config.num_layers, period=2, offset=1),
            )
        return dataclasses.replace(
            config,
            unrotated_layers=every,
            recurrent=mamba1_config(fields, every - attends, prefix="mamba_", selection_eps=config.norm_eps),
            experts=experts,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = hybrid_gguf_config(file, cls.name, has_rope=False)
        mixes = has_tensor(file, "ffn_gate_inp.weight")  # files without experts may still count one
        return dataclasses.replace(
            config,
            recurrent=gguf_mamba1_config(file, config.norm_eps),
            experts=gguf_experts(file, config, normalizes=False) if mixes else None,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        return gguf_mamba_layout(config, "mamba")

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(
            names=NAMES,
            cut=mamba1_rows(config, "mamba"),
            experts=FUSED_EXPERTS,
            num_experts=num_experts(config),
        )

    def load_layer(self, load: LayerLoader) -> JambaLayer:
        experts, is_mamba = load.config.experts, load.index in mamba1_settings(load.config).layers
        is_dense = experts is None or load.index in experts.dense_layers
        return JambaLayer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_mamba else load.attention(),
            mixer=load_mamba1(load, "mamba") if is_mamba else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp() if is_dense else load_experts(load),
        )

    def run_layer(
        self, layer: JambaLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        if layer.attention is not None:
            layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
        elif layer.mixer is not None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)


def _layers(fields: Fields, name: str, num_layers: int, *, period: int, offset: int) -> frozenset[int]:
    """Return the layers that come back after each period."""
    period = fields.integer(f"{name}_period", period)
    first = fields.raw(f"{name}_offset")
    first = offset if first is None else first
    return frozenset(index for index in range(num_layers) if index % period == first)
