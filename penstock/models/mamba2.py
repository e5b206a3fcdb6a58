"""Defines the Mamba-2 part of a layer, reads its settings and loads its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.states import ScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.layers import LayerLoader
from penstock.models.layout import StoredRows, fused_rows
from penstock.models.recurrent import ConvWeights, GatedNorm, StateMixer, load_conv, recurrent_settings, taken
from penstock.models.sharding import balanced, scaled
from penstock.models.weights import LinearPart


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
    if settings.num_heads < shard.tensor_size:
        raise ModelLoadError(
            f"The {settings.num_heads} heads of Mamba-2 cannot be sharded over {shard.tensor_size} ranks.",
            hint="Lower --tensor-parallel-size.",
        )
    heads = balanced(settings.num_heads, shard.tensor_size)[shard.tensor_rank]
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
