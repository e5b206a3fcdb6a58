"""Defines the state-space layer of Mamba 1 and loads it. Ranks share out its channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.kernels.states import ChannelScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import StoredRows, fused_rows
from penstock.models.recurrent import ConvWeights, StateMixer, load_conv, taken
from penstock.models.weights import LinearPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Config(RecurrentConfig):
    """Settings of Mamba 1. A channel has `state_size` numbers of state."""

    num_channels: int
    step_rank: int  # numbers of which the steps of all channels are made
    selection_eps: float | None = None  # of norms of step, write and read, where there are any


@dataclass(frozen=True, slots=True)
class Mamba1Mixer(StateMixer):
    """Mamba 1: a projection to input and gate, a short convolution, a projection of its output to step, write and
    read, a scan of each channel, a gate."""

    conv: ConvWeights
    selection: PackedLinear
    selection_norms: tuple[RMSNorm, ...]  # of step, write and read; empty where there are none
    sizes: tuple[int, int, int]  # of step, write and read
    step: PackedLinear
    scan: ChannelScanLayer

    @property
    def state_shapes(self) -> StateShapes:
        return self.conv.history_shape, tuple(self.scan.decay.shape)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        inputs, gate = projected.chunk(2, dim=1)
        inputs = ops.short_conv(inputs, self.conv.weight, self.conv.bias, states[0], batch, silu=True)
        selected = ops.add_up(ops.linear(inputs, self.selection)).split(self.sizes, dim=1)
        parts = [each.contiguous() for each in selected]
        if self.selection_norms:
            parts = [norm(ops, each) for norm, each in zip(self.selection_norms, parts, strict=True)]
        step, write, read = parts
        made = ops.channel_scan(inputs, ops.linear(step, self.step), read, write, self.scan, states[1], batch)
        return ops.gated_norm(made, gate, None, 0.0, 1, gates_first=True)


def mamba1_config(
    fields: Fields, layers: frozenset[int], *, prefix: str = "", selection_eps: float | None = None
) -> Mamba1Config:
    """Read the settings of Mamba 1. Hybrids have other names for them, which begin with `prefix`."""
    hidden = fields.integer("hidden_size")
    fields.require_silu()
    num_channels = fields.integer(f"{prefix}expand", 2) * hidden
    if not prefix:
        num_channels = fields.integer("intermediate_size", num_channels)
    names = ["time_step_rank", "state_size", "conv_kernel", "use_conv_bias", "use_bias"]
    if prefix:
        names = [f"{prefix}{name}" for name in ("dt_rank", "d_state", "d_conv", "conv_bias", "proj_bias")]
    rank_name, state_name, conv_name, conv_bias_name, bias_name = names
    rank = -(-hidden // 16) if fields.raw(rank_name) in (None, "auto") else fields.integer(rank_name)
    has_bias = fields.flag(bias_name, False)
    return Mamba1Config(
        layers=layers,
        conv_width=fields.integer(conv_name, 4),
        conv_bias=fields.flag(conv_bias_name, True),
        bias=has_bias,
        output_bias=has_bias,
        state_size=fields.integer(state_name, 16),
        num_channels=num_channels,
        step_rank=rank,
        selection_eps=selection_eps,
    )


def mamba1_settings(config: ArchitectureConfig) -> Mamba1Config:
    assert isinstance(config.recurrent, Mamba1Config), "families with Mamba 1 read these settings"
    return config.recurrent


def mamba1_rows(config: ArchitectureConfig, name: str) -> dict[str, StoredRows]:
    """Return the rows of input and gate in the stored projection."""
    num_channels = mamba1_settings(config).num_channels
    return fused_rows(
        f"{name}.in_proj", {f"{name}.input_proj": num_channels, f"{name}.gate_proj": num_channels}
    )


def load_input(load: LayerLoader, prefix: str, own: range) -> PackedLinear:
    """Load the projection to a rank's channels, of input and of gate."""
    settings, names = mamba1_settings(load.config), [f"{prefix}.input_proj", f"{prefix}.gate_proj"]
    sizes, part = [settings.num_channels] * 2, LinearPart(rows=[own, own])
    return load.weights.linear(names, sizes, load.config.hidden_size, bias=settings.bias, part=part)


def load_output(load: LayerLoader, prefix: str, own: range) -> PackedLinear:
    """Load the projection from a rank's channels."""
    settings, hidden = mamba1_settings(load.config), load.config.hidden_size
    return load.weights.linear(
        [f"{prefix}.out_proj"],
        [hidden],
        settings.num_channels,
        bias=settings.output_bias,
        part=LinearPart(columns=own),
    )


def load_mamba1(load: LayerLoader, name: str) -> Mamba1Mixer:
    """Load a rank's channels of Mamba 1."""
    settings, weights = mamba1_settings(load.config), load.weights
    prefix, channels = f"{load.prefix}.{name}", settings.num_channels
    own = weights.shard.inner(channels)
    sizes = settings.step_rank, settings.state_size, settings.state_size

    def by_channel(part: str) -> Tensor:
        return taken(weights.vector(f"{prefix}.{part}", channels), [own])

    return Mamba1Mixer(
        into=load_input(load, prefix, own),
        conv=load_conv(load, f"{prefix}.conv1d", channels, [own]),
        selection=weights.linear([f"{prefix}.x_proj"], [sum(sizes)], channels, part=LinearPart(columns=own)),
        selection_norms=_selection_norms(load, prefix, sizes, settings.selection_eps),
        sizes=sizes,
        step=weights.linear(
            [f"{prefix}.dt_proj"], [channels], settings.step_rank, part=LinearPart(rows=[own])
        ),
        scan=ChannelScanLayer(
            decay=-taken(weights.table(f"{prefix}.A_log", channels, settings.state_size), [own]).exp(),
            skip=by_channel("D"),
            step_bias=by_channel("dt_proj.bias"),
        ),
        output=load_output(load, prefix, own),
    )


def _selection_norms(
    load: LayerLoader, prefix: str, sizes: tuple[int, int, int], eps: float | None
) -> tuple[RMSNorm, ...]:
    """Load the norms of step, write and read. Norms of some families have no weights."""
    if eps is None:
        return ()
    norms = []
    for part, size in zip(("dt", "b", "c"), sizes, strict=True):
        name = f"{prefix}.{part}_layernorm.weight"
        has_weight = load.weights.has(name)
        weight = (
            load.weights.vector(name, size)
            if has_weight
            else torch.ones(size, device=load.weights.ops.device)
        )
        norms.append(RMSNorm(weight, eps))
    return tuple(norms)
