"""LFM3: most layers are gated short convolutions, and some are attention, with a window or without. Each head has a
gate, and what a layer adds is normed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_kinds,
    rope_parameters,
    ropes_by_layer_kind,
)
from penstock.models.layers import Attention, GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, rotated_rows
from penstock.models.recurrent import (
    GatedConv,
    HybridDecoder,
    LayerCache,
    gated_conv_rows,
    load_gated_conv,
    recurrent_settings,
)
from penstock.models.weights import LinearPart

NAMES = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_KINDS = {"conv", "full_attention", "sliding_attention"}
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm3Config(ArchitectureConfig):
    gates_heads: bool
    norms_added: bool  # what a layer adds


@dataclass(frozen=True, slots=True)
class GatedHeads:
    """Attention whose heads are multiplied by the sigmoid of a gate each."""

    inner: Attention
    gate: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer = self.inner.layer
        made = ops.attend(ops.linear(x, self.inner.qkv), layer, cache, batch)
        gates = torch.sigmoid(ops.linear(x, self.gate)).unsqueeze(-1)
        gated = (made.unflatten(1, (layer.num_heads, layer.head_dim)) * gates).flatten(1)
        return ops.add_up(ops.linear(gated, self.inner.output))


@dataclass(frozen=True, slots=True)
class Lfm3Layer:
    norm: RMSNorm
    attention: Attention | GatedHeads | None
    mixer: GatedConv | None
    added_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    added_mlp_norm: RMSNorm | None


class Lfm3(HybridDecoder):
    name = "lfm3"
    huggingface_names = ("Lfm3ForCausalLM", "lfm3")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        ropes = rope_parameters(fields) or _ROPES
        fields = Fields({**fields.values, "rope_parameters": ropes}, fields.where)
        rope, local_rope, plain = ropes_by_layer_kind(fields, 1_000_000.0, 10_000.0)
        config = common_huggingface_config(plain, cls.name)
        kinds = layer_kinds(fields, config.num_layers, _KINDS) or tuple(
            map(_usual_kind, range(config.num_layers))
        )
        window = fields.integer("sliding_window", 256)
        has_bias = fields.flag("conv_bias", False)
        config = dataclasses.replace(
            config,
            rope=rope,
            local_rope=local_rope,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            norm_eps=fields.number("norm_eps", 1e-5),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            qkv_bias=fields.flag("attention_bias", False),
            output_bias=fields.flag("attention_bias", False),
            recurrent=RecurrentConfig(
                layers=frozenset(index for index, kind in enumerate(kinds) if kind == "conv"),
                conv_width=fields.integer("conv_L_cache", 7),
                conv_bias=has_bias,
                bias=has_bias,
            ),
        )
        return Lfm3Config(
            **{each.name: getattr(config, each.name) for each in dataclasses.fields(config)},
            gates_heads=fields.flag("use_attention_gate", True),
            norms_added=fields.flag("use_sandwich_norm", True),
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return Layout(names=NAMES, cut=gated_conv_rows(config), rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> Lfm3Layer:
        config = load.config
        assert isinstance(config, Lfm3Config)
        is_conv = load.index in recurrent_settings(config).layers
        return Lfm3Layer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_conv else _load_attention(load, gates_heads=config.gates_heads),
            mixer=load_gated_conv(load) if is_conv else None,
            added_norm=load.rms_norm("post_operator_norm") if config.norms_added else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
            added_mlp_norm=load.rms_norm("post_ffn_norm") if config.norms_added else None,
        )

    def run_layer(
        self, layer: Lfm3Layer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        normed = layer.norm(ops, residual)
        if layer.attention is not None:
            _add(ops, residual, layer.attention(ops, normed, cache.kv, batch), layer.added_norm)
        elif layer.mixer is not None:
            _add(ops, residual, layer.mixer(ops, normed, cache.states, batch), layer.added_norm)
        _add(ops, residual, layer.mlp(ops, layer.mlp_norm(ops, residual)), layer.added_mlp_norm)


def _add(ops: Ops, residual: Tensor, made: Tensor, norm: RMSNorm | None) -> None:
    residual.add_(made if norm is None else norm(ops, made))


def _usual_kind(index: int) -> str:
    if index % 4 == 2:
        return "full_attention"
    return "sliding_attention" if index % 4 == 0 and index > 0 else "conv"


def _load_attention(load: LayerLoader, *, gates_heads: bool) -> Attention | GatedHeads:
    attention, config = load.attention(head_norms=True), load.config
    if not gates_heads:
        return attention
    names, rows = [f"{load.prefix}.self_attn.gate_proj"], LinearPart(rows=[load.heads.queries])
    return GatedHeads(
        attention, load.weights.linear(names, [config.num_heads], config.hidden_size, part=rows)
    )
