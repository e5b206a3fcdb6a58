"""Defines the state-space layers of Mamba 1 and Mamba-2, reads their settings and loads their weights. Ranks share
out the channels of Mamba 1, and the heads of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.kernels.states import ChannelScanLayer, ScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import StoredRows, fused_rows
from penstock.models.recurrent import ConvWeights, GatedNorm, StateMixer, load_conv, recurrent_settings, taken
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart

# The names of modules in folders of Bamba and Falcon-H1.
BAMBA_NAMES = {
    "final_layernorm": "norm",
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
}


@dataclass(frozen=True, slots=True)
class Mamba2Mixer(StateMixer):
    """Mamba-2: a projection to gate, input, write, read and step, a short convolution, a selective scan, a gated
    norm."""

    sizes: tuple[int, int, int]  # of gate; of input, write and read together; of step
    conv: ConvWeights
    scan: ScanLayer
    head_dim: int
    state_size: int
    norm: GatedNorm
    scale: Tensor | None = None  # of the projection, by column

    @property
    def state_shapes(self) -> StateShapes:
        return self.conv.history_shape, (self.sizes[2], self.head_dim, self.state_size)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        if self.scale is not None:
            projected.mul_(self.scale)
        gate, mixed, step = projected.split(self.sizes, dim=1)
        mixed = ops.short_conv(mixed, self.conv.weight, self.conv.bias, states[0], batch, silu=True)
        inner = self.sizes[0]
        width = (self.sizes[1] - inner) // 2
        inputs, write, read = mixed.split([inner, width, width], dim=1)
        scanned = ops.selective_scan(
            inputs.unflatten(1, (-1, self.head_dim)),
            step,
            read.unflatten(1, (-1, self.state_size)),
            write.unflatten(1, (-1, self.state_size)),
            self.scan,
            states[1],
            batch,
        )
        return self.norm(ops, scanned.flatten(1), gate)


def mamba_rows(config: ArchitectureConfig, name: str) -> dict[str, StoredRows]:
    """Return the rows of the parts of Mamba-2's stored projection."""
    return fused_rows(
        f"{name}.in_proj", {f"{name}.{part}_proj": size for part, size in _mamba_parts(config).items()}
    )


def _mamba_parts(config: ArchitectureConfig) -> dict[str, int]:
    settings = recurrent_settings(config)
    inner, width = settings.num_heads * settings.head_dim, settings.num_groups * settings.state_size
    return {"gate": inner, "input": inner, "write": width, "read": width, "step": settings.num_heads}


def load_mamba(
    load: LayerLoader, name: str = "mamba", *, scales: Sequence[float] | None = None
) -> Mamba2Mixer:
    """Load a rank's heads of Mamba-2, and the groups that these heads read. `scales` are factors of the parts of the
    projection, in their order."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    prefix, parts = f"{load.prefix}.{name}", _mamba_parts(config)
    heads = shard.own(settings.num_heads, "heads of Mamba-2")
    per_group = settings.num_heads // settings.num_groups
    groups = range(heads.start // per_group, (heads.stop - 1) // per_group + 1)
    inner, width = scaled(heads, settings.head_dim), scaled(groups, settings.state_size)
    spans = [inner, inner, width, width, heads]
    inner_size = parts["input"]
    in_conv = [inner, *(range(span.start + inner_size, span.stop + inner_size) for span in (width,))]
    in_conv.append(range(in_conv[1].start + parts["write"], in_conv[1].stop + parts["write"]))
    own_groups = torch.tensor([head // per_group - groups.start for head in heads])
    device = load.weights.ops.device

    def by_head(part: str) -> Tensor:
        return taken(load.weights.vector(f"{prefix}.{part}", settings.num_heads), [heads])

    scale = None
    if scales is not None and set(scales) != {1.0}:
        factors = zip(spans, scales, strict=True)
        scale = torch.cat([torch.full((len(span),), factor) for span, factor in factors]).to(device)
    return Mamba2Mixer(
        into=load.weights.linear(
            [f"{prefix}.{part}_proj" for part in parts],
            list(parts.values()),
            config.hidden_size,
            bias=settings.bias,
            part=LinearPart(rows=spans),
        ),
        sizes=(len(inner), len(inner) + 2 * len(width), len(heads)),
        conv=load_conv(load, f"{prefix}.conv1d", inner_size + 2 * parts["write"], in_conv),
        scan=ScanLayer(
            decay=-by_head("A_log").exp(),
            skip=by_head("D"),
            step_bias=by_head("dt_bias"),
            groups=own_groups.to(device),
            step_limits=settings.step_limits,
        ),
        head_dim=settings.head_dim,
        state_size=settings.state_size,
        norm=_mamba_norm(load, f"{prefix}.norm", inner),
        output=load.weights.linear(
            [f"{prefix}.out_proj"],
            [config.hidden_size],
            inner_size,
            bias=settings.output_bias,
            part=LinearPart(columns=inner),
        ),
        scale=scale,
    )


def _mamba_norm(load: LayerLoader, name: str, own: range) -> GatedNorm:
    settings = recurrent_settings(load.config)
    eps = settings.norm_eps or load.config.norm_eps
    if not settings.has_norm:
        return GatedNorm(None, eps)
    size = settings.num_heads * settings.head_dim
    weight = taken(load.weights.vector(f"{name}.weight", size), [own])
    width = size // settings.num_groups
    if len(own) == size or (own.start % width == 0 and own.stop % width == 0):
        return GatedNorm(weight, eps, width, settings.gates_first)
    if settings.num_groups > 1:
        raise ModelLoadError(
            f"The {settings.num_groups} groups of this model's norms cannot be sharded over "
            f"{load.weights.shard.tensor_size} ranks.",
            hint="Lower --tensor-parallel-size.",
        )
    return GatedNorm(weight, eps, width, settings.gates_first, whole_width=size)


def mamba_config(fields: Fields, layers: frozenset[int], hidden_size: int) -> RecurrentConfig:
    """Read the settings of Mamba-2 in hybrid models, which share their names."""
    fields.require_silu()
    num_heads = fields.integer("mamba_n_heads", 128)
    inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * hidden_size)
    head_dim = fields.raw("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // num_heads
    if not isinstance(head_dim, int) or head_dim * num_heads != inner:
        raise ModelLoadError(
            f"{fields.where} has {num_heads} heads of Mamba-2 that do not fill {inner} channels."
        )
    bias = fields.flag("mamba_proj_bias", False)
    return RecurrentConfig(
        layers=layers,
        conv_width=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        output_bias=bias,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.integer("mamba_n_groups", 1),
        state_size=fields.integer("mamba_d_state", 256),
        step_limits=step_limits(fields),
    )


def step_limits(fields: Fields) -> tuple[float, float]:
    """Read the limits of Mamba-2's time steps."""
    limits = fields.raw("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise ModelLoadError(f"{fields.where} has a time_step_limit that is not a pair of numbers.")
    low, high = (float(each["__float__"]) if isinstance(each, dict) else float(each) for each in limits)
    return low, high


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
