"""Qwen3-Next and Qwen 3.5 (`vision` adds images): most layers are gated delta nets, and some are attention with a
gate on its output. The layers of Qwen3-Next that predict a second token are not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.delta_net import GatedDeltaNet, delta_net_parts, load_delta_net
from penstock.models.experts import SHARED_NAMES
from penstock.models.families.qwen import qwen_experts
from penstock.models.gguf_config import common_gguf_config, gguf_experts, has_tensor
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.gguf_states import gguf_delta_config
from penstock.models.huggingface_config import linear_layers
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows, fused_rows, rotated_rows
from penstock.models.recurrent import HybridDecoder, log_of_decay, recurrent_settings
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

NAMES = {
    "self_attn.q_proj": "self_attn.q_gate_proj",  # queries, and gates of the output
    "linear_attn.in_proj_z": "linear_attn.gate_proj",
    "linear_attn.in_proj_b": "linear_attn.rate_proj",
    "linear_attn.in_proj_a": "linear_attn.step_proj",
}
GGUF_NAMES = {
    "attn_q": "self_attn.q_gate_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.gate_proj",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.rate_proj",
    "ssm_alpha": "linear_attn.step_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
}


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention whose output is multiplied by the sigmoid of a gate."""

    qkv: PackedLinear
    gate: PackedLinear
    layer: AttentionLayer
    output: PackedLinear

    def add_to(self, ops: Ops, residual: Tensor, norm: RMSNorm, cache: Any, batch: AttentionBatch) -> None:
        """Add the output of attention for the normed residual to the residual, in place."""
        normed = norm(ops, residual)
        made = ops.attend(ops.linear(normed, self.qkv), self.layer, cache, batch)
        ops.add_linear(ops.opened(made, ops.linear(normed, self.gate)), self.output, residual)


class Qwen35(HybridDecoder):
    name = "qwen3_5"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM", "qwen3_5_text")
    gguf_names: ClassVar[tuple[str, ...]] = ("qwen35",)
    attention_bias = False
    is_shared_gated = True
    stored_names: ClassVar[Mapping[str, str]] = NAMES
    gguf_stored_names = GGUF_NAMES

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = fields.with_usual(partial_rotary_factor=0.25, head_dim=256)
        fields.require_silu()
        config = super().config_from_huggingface(fields)
        period = fields.integer("full_attention_interval", 4)
        return dataclasses.replace(
            config,
            norm_offset=1.0,
            recurrent=RecurrentConfig(
                layers=linear_layers(fields, config.num_layers, period),
                conv_width=fields.integer("linear_conv_kernel_dim", 4),
                num_heads=fields.integer("linear_num_value_heads", 32),
                head_dim=fields.integer("linear_value_head_dim", 128),
                num_groups=fields.integer("linear_num_key_heads", 16),
                state_size=fields.integer("linear_key_head_dim", 128),
            ),
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = common_gguf_config(file, cls.name)
        # A layer for drafts may be there, and is not read.
        return dataclasses.replace(config, recurrent=gguf_delta_config(file), num_mtp_layers=0)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        return _fused_parts(config)

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        """Return the layout of files that hold first the first value head of each key head, then the second ones."""
        settings, parts, name = recurrent_settings(config), delta_net_parts(config), "linear_attn"
        heads = torch.arange(settings.num_heads).view(-1, settings.num_groups).T.flatten()
        values = (heads[:, None] * settings.head_dim + torch.arange(settings.head_dim)).flatten()
        mixed = torch.cat([torch.arange(2 * parts["key"]), values + 2 * parts["key"]])
        orders = {"value_proj": values, "gate_proj": values, "rate_proj": heads, "step_proj": heads}
        rows = {
            f"{name}.{part}": StoredRows(f"{name}.{part}", len(order), order)
            for part, order in {**orders, "conv1d": mixed}.items()
        }
        return dataclasses.replace(
            super().gguf_layout(config),
            cut=_fused_parts(config),
            rows=rotated_rows(config) | rows,
            columns={f"{name}.out_proj": values},
            changed={
                f"{name}.A_log": lambda decay: log_of_decay(decay)[heads],
                f"{name}.dt_bias": lambda bias: bias[heads],
            },
        )

    def load_attention(self, load: LayerLoader) -> GatedAttention:
        return _load_attention(load)

    def load_mixer(self, load: LayerLoader) -> GatedDeltaNet:
        return load_delta_net(load)


class Qwen35MoE(Qwen35):
    """Qwen 3.5 with experts, and an expert for every token."""

    name = "qwen3_5_moe"
    huggingface_names: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
    gguf_names: ClassVar[tuple[str, ...]] = ("qwen35moe",)
    stored_names: ClassVar[Mapping[str, str]] = {**NAMES, **SHARED_NAMES}

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        # These models have no dense MLP, and files may leave out its size.
        inner = fields.integer("moe_intermediate_size", 512)
        fields = fields.with_usual(intermediate_size=inner, norm_topk_prob=True)
        config = super().config_from_huggingface(fields)
        experts = dataclasses.replace(
            qwen_experts(fields, config.num_layers),
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
        )
        return dataclasses.replace(config, experts=experts)

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        return dataclasses.replace(config, experts=gguf_experts(file, config, normalizes=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Qwen3NextStates(RecurrentConfig):
    # Whether a GGUF file holds the parts of the projection for one key head after the other.
    by_key_head: bool


class Qwen3Next(Qwen35MoE):
    """Qwen3-Next: its projections into delta nets hold their parts for one key head after the other."""

    name = "qwen3_next"
    huggingface_names = ("Qwen3NextForCausalLM", "qwen3_next")
    gguf_names = ("qwen3next",)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        cut = _queries_and_gates(config)
        groups, parts, name = recurrent_settings(config).num_groups, delta_net_parts(config), "linear_attn"
        held = {"in_proj_qkvz": ("query", "key", "value", "gate"), "in_proj_ba": ("rate", "step")}
        for stored, names in held.items():
            sizes = [parts[part] // groups for part in names]
            rows = torch.arange(sum(sizes) * groups).view(groups, -1)
            for part, piece in zip(names, rows.split(sizes, dim=1), strict=True):
                cut[f"{name}.{part}_proj"] = StoredRows(f"{name}.{stored}", rows.numel(), piece.flatten())
        return cut

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = super().config_from_gguf(file)
        states = {
            field.name: getattr(config.recurrent, field.name) for field in dataclasses.fields(RecurrentConfig)
        }
        is_older = has_tensor(file, "ssm_in.weight")
        return dataclasses.replace(config, recurrent=_Qwen3NextStates(**states, by_key_head=is_older))

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        cut = cls.cut(config)
        if not (isinstance(config.recurrent, _Qwen3NextStates) and config.recurrent.by_key_head):
            cut = {**cut, **_fused_parts(config)}
        return gguf_layout(
            GGUF_NAMES,
            cut=cut,
            rows=rotated_rows(config),
            num_experts=config.num_experts,
            changed={"linear_attn.A_log": log_of_decay},
        )


def _fused_parts(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of queries, keys and values of delta nets in one matrix, and those of attention's gates."""
    parts, name = delta_net_parts(config), "linear_attn"
    mixed = {f"{name}.{part}_proj": parts[part] for part in ("query", "key", "value")}
    return fused_rows(f"{name}.in_proj_qkv", mixed) | _queries_and_gates(config)


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
