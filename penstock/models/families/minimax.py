"""MiniMax Text 01 and M1: most layers are lightning attention, a scan whose heads decay at fixed speeds, and some are
attention. Layers continue from their normed inputs, and each has experts. The makers' folders and transformers' have
other names for settings, and the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.states import ScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, NotNative, RecurrentConfig, extended
from penstock.models.experts import MIXTRAL_NAMES
from penstock.models.huggingface_config import (
    common_huggingface_config,
    layer_kinds,
    layers_of_kind,
    mixtral_experts,
)
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import StoredRows
from penstock.models.recurrent import HybridDecoder, LayerCache, StateMixer
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

_NORM_EPS = 1e-6  # of lightning attention, whatever the settings say of other norms
_MAKERS_NAMES = ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", "minimax_text_01", "minimax_m1")
_KINDS = ("linear_attention", "full_attention")  # by the number in the makers' list of layers
# The makers' names of factors, for transformers' names.
_MAKERS_FACTORS = {
    f"{name}_{greek}_factor": f"layernorm_{own}_{greek}"
    for name, own in (("linear_attn", "linear_attention"), ("full_attn", "full_attention"), ("mlp", "mlp"))
    for greek in ("alpha", "beta")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(ArchitectureConfig):
    """Factors of what a half of a layer reads, and of what it adds: of lightning attention, attention and experts."""

    linear_factors: tuple[float, float]
    attention_factors: tuple[float, float]
    mlp_factors: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LightningAttention(StateMixer):
    """Lightning attention: the first product gives queries, keys and values, and gates of the normed output."""

    scan: ScanLayer
    head_dim: int
    norm: RMSNorm  # over the heads of all ranks, which have `whole_width` numbers
    whole_width: int

    @property
    def state_shapes(self) -> StateShapes:
        return ((len(self.scan.decay), self.head_dim, self.head_dim),)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        heads = len(self.scan.decay)
        width = heads * self.head_dim
        mixed = F.silu(projected[:, : 3 * width]).unflatten(1, (3, heads, self.head_dim))
        query, key, value = mixed.unbind(1)
        step = projected.new_zeros(len(projected), heads)  # every step is 1
        made = ops.selective_scan(value, step, query, key, self.scan, states[0], batch).flatten(1)
        sums = ops.add_up(made.square().sum(dim=1, keepdim=True))
        normed = made * torch.rsqrt(sums / self.whole_width + self.norm.eps) * self.norm.weight
        return (normed * torch.sigmoid(projected[:, 3 * width :].float())).to(projected.dtype)


class MiniMax(HybridDecoder):
    name = "minimax"
    huggingface_names = ("MiniMaxForCausalLM", "minimax", *_MAKERS_NAMES)
    rotated_norms = "none"
    stored_names: ClassVar[Mapping[str, str]] = {
        **MIXTRAL_NAMES,
        "self_attn.output_gate": "self_attn.gate_proj",
    }
    config: MiniMaxConfig

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        if fields.has("attn_type_list"):
            fields = _renamed(fields)
        fields.require_silu()
        base = common_huggingface_config(fields, cls.name, default_theta=1_000_000.0)
        kinds = layer_kinds(fields, base.num_layers, {"linear_attention", "full_attention"})
        if kinds is None:
            kinds = tuple(
                ("full_attention", "linear_attention")[index % 2] for index in range(base.num_layers)
            )

        def factors(name: str) -> tuple[float, float]:
            return fields.number(f"{name}_alpha_factor", 1.0), fields.number(f"{name}_beta_factor", 1.0)

        return extended(
            base,
            MiniMaxConfig,
            windows=(fields.optional_integer("sliding_window"),) * base.num_layers,
            experts=mixtral_experts(fields.with_usual_for_nulls(num_local_experts=8, num_experts_per_tok=2)),
            recurrent=RecurrentConfig(
                layers=layers_of_kind(kinds, "linear_attention"),
                conv_width=1,
                num_heads=base.num_heads,
                head_dim=base.head_dim,
                num_groups=base.num_heads,
                state_size=base.head_dim,
            ),
            linear_factors=factors("linear_attn"),
            attention_factors=factors("full_attn"),
            mlp_factors=factors("mlp"),
        )

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        """Return the rows of lightning attention, whose queries, keys and values lie side by side for each head."""
        stored, size = "self_attn.qkv_proj", config.num_heads * config.head_dim
        rows = torch.arange(3 * size).view(config.num_heads, 3, config.head_dim)
        return {
            f"self_attn.{part}_proj": StoredRows(stored, 3 * size, rows[:, index].flatten())
            for index, part in enumerate(("query", "key", "value"))
        }

    def load_mixer(self, load: LayerLoader) -> LightningAttention:
        return _load_lightning(load)

    def run_layer(
        self, layer: Any, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        hidden = layer.norm(ops, residual)
        if layer.mixer is not None:
            made, (kept, added) = layer.mixer(ops, hidden, cache.states, batch), self.config.linear_factors
        else:
            assert layer.attention is not None
            made, (kept, added) = layer.attention(ops, hidden, cache.kv, batch), self.config.attention_factors
        hidden = layer.mlp_norm(ops, hidden * kept + made * added)
        kept, added = self.config.mlp_factors
        residual.copy_(hidden * kept + layer.mlp(ops, hidden) * added)


def _renamed(fields: Fields) -> Fields:
    """Return the makers' settings under transformers' names."""
    if not fields.flag("postnorm", False):
        raise NotNative(f"{fields.where} has no postnorm, which every published MiniMax has.")
    if fields.raw("shared_intermediate_size"):
        raise NotNative(f"{fields.where} asks for a shared expert, which no published MiniMax has.")
    kinds = fields.raw("attn_type_list")
    if not isinstance(kinds, list) or not set(kinds) <= {0, 1}:
        raise ModelLoadError(f"{fields.where} has an attn_type_list of other numbers than 0 and 1.")
    head_dim = fields.integer(
        "head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads")
    )
    changed = {
        "layer_types": [_KINDS[kind] for kind in kinds],
        "partial_rotary_factor": fields.integer("rotary_dim", head_dim) / head_dim,
    }
    renamed = fields.renamed(_MAKERS_FACTORS)
    return Fields({**renamed.values, **changed}, fields.where)


def _load_lightning(load: LayerLoader) -> LightningAttention:
    """Load a rank's heads of lightning attention."""
    config, shard, prefix = load.config, load.weights.shard, f"{load.prefix}.self_attn"
    heads = shard.own(config.num_heads, "heads of lightning attention")
    size, own = config.num_heads * config.head_dim, scaled(heads, config.head_dim)
    slopes = (2.0 ** (-8 / config.num_heads)) ** torch.arange(1, config.num_heads + 1)
    slopes = slopes * (1 - load.index / (config.num_layers - 1 + 1e-5) + 1e-5)
    device = load.weights.ops.device
    nothing = torch.zeros(len(heads), device=device)
    weight = load.weights.vector(f"{prefix}.norm.weight", size)[own.start : own.stop]
    return LightningAttention(
        into=load.weights.linear(
            [f"{prefix}.{part}_proj" for part in ("query", "key", "value", "gate")],
            [size] * 4,
            config.hidden_size,
            part=LinearPart(rows=[own] * 4),
        ),
        scan=ScanLayer(
            decay=-slopes[heads.start : heads.stop].to(device),
            skip=nothing,
            step_bias=nothing,
            groups=torch.arange(len(heads), device=device),
            step_limits=(1.0, 1.0),
        ),
        head_dim=config.head_dim,
        norm=RMSNorm(weight, _NORM_EPS),
        whole_width=size,
        output=load.weights.linear(
            [f"{prefix}.out_proj"], [config.hidden_size], size, part=LinearPart(columns=own)
        ),
    )
