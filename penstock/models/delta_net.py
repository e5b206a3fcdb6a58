"""Defines the gated delta net, a layer with a fixed state, and loads its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.states import DeltaLayer, StateShapes
from penstock.models.config import ArchitectureConfig
from penstock.models.layers import LayerLoader
from penstock.models.recurrent import (
    ConvWeights,
    GatedNorm,
    StateMixer,
    load_convs,
    recurrent_settings,
    taken,
)
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(StateMixer):
    """A gated delta net: a projection to query, key, value, gate, rate and step, a short convolution, the gated delta
    rule, a norm of each head, a gate."""

    conv: ConvWeights
    rule: DeltaLayer
    value_dim: int
    norm: GatedNorm

    @property
    def state_shapes(self) -> StateShapes:
        return self.conv.history_shape, (len(self.rule.keys), self.rule.key_dim, self.value_dim)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        heads, mixed_size = len(self.rule.keys), self.conv.weight.shape[0]
        sizes = [mixed_size, heads * self.value_dim, heads, heads]
        mixed, gate, rate, step = projected.split(sizes, dim=1)
        mixed = ops.short_conv(mixed, self.conv.weight, self.conv.bias, states[0], batch, silu=True)
        outputs = ops.gated_delta(mixed, rate, step, self.rule, states[1], batch)
        return self.norm(ops, outputs.flatten(1), gate)


def delta_net_parts(config: ArchitectureConfig) -> dict[str, int]:
    """Return the rows of each part of the projection into a gated delta net."""
    settings = recurrent_settings(config)
    keys, values = settings.num_groups * settings.state_size, settings.num_heads * settings.head_dim
    return {
        "query": keys,
        "key": keys,
        "value": values,
        "gate": values,
        "rate": settings.num_heads,
        "step": settings.num_heads,
    }


def load_delta_net(
    load: LayerLoader,
    *,
    norm_eps: float | None = None,
    largest_rate: float = 1.0,
) -> GatedDeltaNet:
    """Load a rank's key heads of a gated delta net, and the value heads that belong to them."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    prefix, parts = f"{load.prefix}.linear_attn", delta_net_parts(config)
    keys = shard.own(settings.num_groups, "key heads of this model's delta nets")
    per_key = settings.num_heads // settings.num_groups
    heads = scaled(keys, per_key)
    key_rows, value_rows = scaled(keys, settings.state_size), scaled(heads, settings.head_dim)
    in_conv = key_rows, key_rows, value_rows

    def by_head(part: str) -> Tensor:
        return taken(load.weights.vector(f"{prefix}.{part}", settings.num_heads), [heads])

    norm = load.weights.vector(f"{prefix}.norm.weight", settings.head_dim).repeat(len(heads))
    return GatedDeltaNet(
        into=load.weights.linear(
            [f"{prefix}.{part}_proj" for part in parts],
            list(parts.values()),
            config.hidden_size,
            part=LinearPart(rows=[key_rows, key_rows, value_rows, value_rows, heads, heads]),
        ),
        conv=load_convs(load, prefix, [parts[part] for part in ("query", "key", "value")], in_conv),
        rule=DeltaLayer(
            decay=-by_head("A_log").exp(),
            step_bias=by_head("dt_bias"),
            keys=torch.arange(len(heads), device=load.weights.ops.device) // per_key,
            num_keys=len(keys),
            key_dim=settings.state_size,
            largest_rate=largest_rate,
        ),
        value_dim=settings.head_dim,
        norm=GatedNorm(norm, norm_eps or config.norm_eps, settings.head_dim, gates_first=False),
        output=load.weights.linear(
            [f"{prefix}.out_proj"], [config.hidden_size], parts["value"], part=LinearPart(columns=value_rows)
        ),
    )
