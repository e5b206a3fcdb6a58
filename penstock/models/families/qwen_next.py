"""Qwen 3.5, text only: most layers are gated delta nets, and some are attention with a gate on its output."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows, fused_rows, rotated_rows
from penstock.models.recurrent import (
    GatedDeltaNet,
    HybridDecoder,
    LayerCache,
    delta_net_parts,
    load_delta_net,
    no_gguf,
    recurrent_settings,
)
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

NAMES = {"self_attn.q_proj": "self_attn.q_gate_proj"}  # queries, and gates of the output


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention whose output is multiplied by the sigmoid of a gate."""

    qkv: PackedLinear
    gate: PackedLinear
    layer: AttentionLayer
    output: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        made = ops.attend(ops.linear(x, self.qkv), self.layer, cache, batch)
        gated = (made * torch.sigmoid(ops.linear(x, self.gate).float())).to(x.dtype)
        return ops.add_up(ops.linear(gated, self.output))


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    norm: RMSNorm
    attention: GatedAttention | None
    mixer: GatedDeltaNet | None
    mlp_norm: RMSNorm
    mlp: GatedMLP


class Qwen35(HybridDecoder):
    name = "qwen3_5"
    huggingface_names = ("Qwen3_5ForCausalLM", "qwen3_5_text")

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        values = {"partial_rotary_factor": 0.25, "head_dim": 256, **fields.values}
        fields = Fields(values, fields.where)
        config = common_huggingface_config(fields, cls.name)
        kinds = layer_kinds(fields, config.num_layers, {"linear_attention", "full_attention"})
        if kinds is None:
            period = fields.integer("full_attention_interval", 4)
            kinds = tuple(
                "linear_attention" if (index + 1) % period else "full_attention"
                for index in range(config.num_layers)
            )
        has_bias = fields.flag("attention_bias", False)
        return dataclasses.replace(
            config,
            qkv_bias=has_bias,
            output_bias=has_bias,
            norm_offset=1.0,
            recurrent=RecurrentConfig(
                layers=frozenset(index for index, kind in enumerate(kinds) if kind == "linear_attention"),
                conv_width=fields.integer("linear_conv_kernel_dim", 4),
                num_heads=fields.integer("linear_num_value_heads", 32),
                head_dim=fields.integer("linear_value_head_dim", 128),
                num_groups=fields.integer("linear_num_key_heads", 16),
                state_size=fields.integer("linear_key_head_dim", 128),
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise no_gguf(file)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        parts, name = delta_net_parts(config), "linear_attn"
        mixed = {f"{name}.{part}_proj": parts[part] for part in ("query", "key", "value")}
        names = {
            **NAMES,
            f"{name}.in_proj_z": f"{name}.gate_proj",
            f"{name}.in_proj_b": f"{name}.rate_proj",
            f"{name}.in_proj_a": f"{name}.step_proj",
        }
        cut = fused_rows(f"{name}.in_proj_qkv", mixed) | _queries_and_gates(config)
        return Layout(names=names, cut=cut, rows=rotated_rows(config))

    def load_layer(self, load: LayerLoader) -> DeltaLayer:
        is_delta = load.index in recurrent_settings(load.config).layers
        return DeltaLayer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if is_delta else _load_attention(load),
            mixer=load_delta_net(load) if is_delta else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=load.gated_mlp(),
        )

    def run_layer(
        self, layer: DeltaLayer, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        normed = layer.norm(ops, residual)
        if layer.attention is not None:
            residual += layer.attention(ops, normed, cache.kv, batch)
        elif layer.mixer is not None:
            residual += layer.mixer(ops, normed, cache.states, batch)
        residual += layer.mlp(ops, layer.mlp_norm(ops, residual))


def _queries_and_gates(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of queries and gates, which are stored side by side for each head."""
    size = config.num_heads * config.head_dim
    rows = torch.arange(2 * size).view(config.num_heads, 2, config.head_dim)
    return {
        f"self_attn.{part}_proj": StoredRows("self_attn.q_gate_proj", 2 * size, rows[:, index].flatten())
        for index, part in enumerate(("q", "gate"))
    }


def _load_attention(load: LayerLoader) -> GatedAttention:
    config = load.config
    inner, size = load.attention(head_norms=True), config.num_heads * config.head_dim
    gate = load.weights.linear(
        [f"{load.prefix}.self_attn.gate_proj"],
        [size],
        config.hidden_size,
        bias=config.qkv_bias,
        part=LinearPart(rows=[scaled(load.heads.queries, config.head_dim)]),
    )
    return GatedAttention(inner.qkv, gate, inner.layer, inner.output)
