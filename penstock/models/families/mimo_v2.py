"""MiMo V2 Flash: attention whose values are shorter than its keys; layers with a window have sinks and more key-value
heads than layers with full attention; experts are chosen as in DeepSeek V3.

All layers share one KV cache, whose heads are those of layers with a window. The fewer key-value heads of the other
layers are repeated, and values are padded with zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, NotNative, extended
from penstock.models.decoder import BlockDecoder
from penstock.models.huggingface_config import (
    common_huggingface_config,
    grouped_experts,
    layer_windows,
    ropes_by_layer_kind,
)
from penstock.models.layers import LayerLoader
from penstock.models.layout import StoredRows
from penstock.models.rope import pair_order
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

_PERIOD = 6  # every sixth layer, and the first one, has full attention
_SAME_SIZES = {"swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim",
               "swa_v_head_dim": "v_head_dim"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoV2Config(ArchitectureConfig):
    """`num_kv_heads` are those of layers with a window."""

    whole_kv_heads: int  # of layers with full attention
    value_dim: int
    value_scale: float

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that its methods were written in.
        ArchitectureConfig.__post_init__(self)
        if self.value_dim > self.head_dim or self.num_kv_heads % self.whole_kv_heads:
            raise ModelLoadError(
                f"The model has keys of {self.head_dim} numbers with values of {self.value_dim}, and "
                f"{self.num_kv_heads} or {self.whole_kv_heads} key-value heads, which cannot share a cache."
            )

    @property
    def has_equal_kv_heads(self) -> bool:
        return self.num_kv_heads == self.whole_kv_heads


@dataclass(frozen=True, slots=True)
class MiMoV2Attention:
    qkv: PackedLinear
    key_columns: Tensor  # int64: of what `qkv` makes for keys, the column of each number in the cache
    num_kv_heads: int  # that `qkv` makes; `layer` has those of the cache
    value_dim: int
    value_scale: float
    layer: AttentionLayer
    output: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer, count = self.layer, len(x)
        sizes = [layer.num_heads * layer.head_dim, self.num_kv_heads * layer.head_dim]
        made = ops.linear(x, self.qkv)
        query, key, value = made.split([*sizes, self.num_kv_heads * self.value_dim], dim=1)
        value = (value * self.value_scale).view(count, self.num_kv_heads, self.value_dim)
        value = value.repeat_interleave(layer.num_kv_heads // self.num_kv_heads, dim=1)
        value = F.pad(value, (0, layer.head_dim - self.value_dim)).flatten(1)
        made = ops.attend(torch.cat([query, key[:, self.key_columns], value], dim=1), layer, cache, batch)
        made = made.view(count, layer.num_heads, layer.head_dim)[..., : self.value_dim].flatten(1)
        return ops.add_up(ops.linear(made, self.output))


class MiMoV2Flash(BlockDecoder):
    name = "mimo_v2_flash"
    huggingface_names = ("MiMoV2FlashForCausalLM", "mimo_v2_flash")
    selection_bias = "gate.e_score_correction_bias"
    stored_names: ClassVar[Mapping[str, str]] = {"self_attn.attention_sink_bias": "self_attn.sinks"}
    rotated_norms = "none"
    config: MiMoV2Config

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        fields = _plain_fields(fields)
        _refuse_other_sizes(fields)
        rope, local_rope, plain = ropes_by_layer_kind(fields, 5_000_000.0, 10_000.0)
        config = common_huggingface_config(_without_share(plain), cls.name)
        if local_rope.rotary_dim != rope.rotary_dim:
            raise NotNative(f"{fields.where} rotates other parts of heads in layers with a window.")
        window = fields.integer("sliding_window", 129)
        return extended(
            config,
            MiMoV2Config,
            rope=rope,
            local_rope=local_rope,
            windows=layer_windows(fields, config.num_layers, window)
            or tuple(
                None if index == 0 or (index + 1) % _PERIOD == 0 else window
                for index in range(config.num_layers)
            ),
            num_kv_heads=fields.integer("swa_num_key_value_heads", 2 * config.num_kv_heads),
            qkv_bias=fields.flag("attention_bias", False),
            experts=grouped_experts(
                fields.changed(first_k_dense_replace=1, moe_layer_freq=None), config.num_layers
            ),
            whole_kv_heads=config.num_kv_heads,
            value_dim=fields.integer("v_head_dim", 128),
            value_scale=fields.number("attention_value_scale", 1.0),
        )

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        rows = super().rows(config, interleaved=interleaved)
        rows.pop("self_attn.k_proj", None)  # attention reorders keys, of which layers have different numbers
        return rows

    def load_attention(self, load: LayerLoader) -> MiMoV2Attention:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.self_attn"
        has_window = config.windows[load.index] is not None
        count = config.num_kv_heads if has_window else config.whole_kv_heads
        own, size = weights.shard.heads(config.num_heads, count), config.head_dim
        queries = scaled(load.heads.queries, size)
        sinks = None
        if has_window:
            sinks = weights.vector(f"{prefix}.sinks", config.num_heads)
            sinks = sinks[load.heads.queries.start : load.heads.queries.stop].contiguous()
        order = pair_order(size, config.rope.rotary_dim or size, interleaved=False)
        repeats = len(load.heads.keys) // len(own.keys)
        heads = torch.arange(len(own.keys)).repeat_interleave(repeats)
        return MiMoV2Attention(
            qkv=weights.linear(
                [f"{prefix}.{part}_proj" for part in "qkv"],
                [config.num_heads * size, count * size, count * config.value_dim],
                config.hidden_size,
                bias=config.qkv_bias,
                part=LinearPart(rows=[queries, scaled(own.keys, size), scaled(own.keys, config.value_dim)]),
            ),
            key_columns=(heads.unsqueeze(1) * size + order).flatten().to(weights.ops.device),
            num_kv_heads=len(own.keys),
            value_dim=config.value_dim,
            value_scale=config.value_scale,
            layer=dataclasses.replace(load.attention_layer(), sinks=sinks),
            output=weights.linear(
                [f"{prefix}.o_proj"],
                [config.hidden_size],
                config.num_heads * config.value_dim,
                part=LinearPart(columns=scaled(load.heads.queries, config.value_dim)),
            ),
        )


def _without_share(fields: Fields) -> Fields:
    """Return the settings without the rotated part of heads, which the two ropes have."""
    kept = {key: value for key, value in fields.values.items() if key != "partial_rotary_factor"}
    return Fields(kept, fields.where)


def _plain_fields(fields: Fields) -> Fields:
    """Return the settings under the names of transformers, where the makers' files have others."""
    usual = {
        "partial_rotary_factor": 0.334,
        "rope_local_base_freq": fields.raw("swa_rope_theta"),
        "rms_norm_eps": fields.raw("layernorm_epsilon"),
        "layer_types": _listed(fields, "hybrid_layer_pattern", "full_attention", "sliding_attention"),
        "mlp_layer_types": _listed(fields, "moe_layer_freq", "dense", "sparse"),
    }
    values = usual | {key: value for key, value in fields.values.items() if value is not None}
    if fields.has("sliding_window_size"):  # tokens before the token itself
        values["sliding_window"] = fields.integer("sliding_window_size") + 1
    return Fields(values, fields.where)


def _listed(fields: Fields, key: str, no: str, yes: str) -> list[str] | None:
    """Return kinds of layers that the makers list as zeros and ones."""
    flags = fields.raw(key)
    if flags is None:
        return None
    if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
        raise ModelLoadError(f"{fields.where} has {key} that is not a list of zeros and ones.")
    return [yes if flag else no for flag in flags]


def _refuse_other_sizes(fields: Fields) -> None:
    for key, other in _SAME_SIZES.items():
        if fields.has(key) and fields.raw(key) != fields.raw(other):
            raise NotNative(
                f"{fields.where} has {key} {fields.raw(key)!r}, and {other} {fields.raw(other)!r}."
            )
    if fields.flag("add_full_attention_sink_bias", False) or not fields.flag(
        "add_swa_attention_sink_bias", True
    ):
        raise NotNative(f"{fields.where} has sinks in other layers than those with a window.")
    if fields.raw("n_shared_experts"):
        raise NotNative(f"{fields.where} has shared experts, which no published MiMo V2 Flash has.")
