"""Defines layers that keep a fixed state for each request, loads them, and runs decoders that have such layers.

A state is a tuple of tensors with a slot for each request (`kernels.states`): the newest inputs of a short
convolution, and what a scan remembers. A rank of several has some heads, or some channels, and their states.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops, PackedLinear
from penstock.kernels.states import DeltaLayer, ScanLayer, StateShapes
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GGUFFile
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import StoredRows, fused_rows
from penstock.models.sharding import balanced, scaled
from penstock.models.weights import LinearPart, WeightLoader


class LayerCache(NamedTuple):
    """The memory of one layer: keys and values if it has attention, and states if it has any."""

    kv: Any
    states: tuple[Tensor, ...]


class HybridDecoder(Decoder):
    """A decoder some or all of whose layers keep a fixed state. A loaded layer has a `mixer` with `state_shapes`, an
    `attention`, or both; what a layer lacks is None. `run_layer` gets a `LayerCache`."""

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        self._number_layers()

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        raise ModelLoadError(
            f"{file.path.name} has layers with a fixed state, which are read from safetensors only.",
            hint="Give the folder of the original checkpoint.",
        )

    def _number_layers(self) -> None:
        """Find which layers have keys and values, and which have states."""
        mixers = [layer.mixer for layer in self._layers]
        attends = [layer.attention is not None for layer in self._layers]
        self.state_layers: Sequence[StateShapes] = [each.state_shapes for each in mixers if each is not None]
        self.num_kv_layers = sum(attends)
        self._kv_at = [sum(attends[:index]) if here else None for index, here in enumerate(attends)]
        has_state = [each is not None for each in mixers]
        self._state_at = [sum(has_state[:index]) if here else None for index, here in enumerate(has_state)]

    def rope_tables(self) -> list[Tensor]:
        attentions = [layer.attention.layer for layer in self._layers if layer.attention is not None]
        return list({id(each.rope): each.rope for each in attentions}.values())

    def with_distinct_layers(self) -> Self:
        twin = super().with_distinct_layers()
        twin._number_layers()
        return twin

    def _run_one_by_one(
        self,
        residual: Tensor,
        batch: AttentionBatch,
        kv: KVStore,
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            self.run_layer(layer, residual, self._ops, self.layer_cache(index, kv, batch), batch)

    def layer_cache(self, index: int, kv: KVStore, batch: AttentionBatch) -> LayerCache:
        """Return the memory of a layer in this step."""
        assert batch.states is not None, "a step of a model with states has slots"
        kv_at, state_at = self._kv_at[index], self._state_at[index]
        return LayerCache(
            None if kv_at is None else kv.layer(kv_at),
            () if state_at is None else batch.states.store.layer(state_at),
        )


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A causal convolution of each channel with its newest inputs."""

    weight: Tensor  # float32 [C, K], the newest input last
    bias: Tensor | None

    @property
    def history_shape(self) -> tuple[int, ...]:
        return self.weight.shape[0], self.weight.shape[1] - 1


@dataclass(frozen=True, slots=True)
class StateMixer(ABC):
    """A part of a layer with a fixed state, between two products."""

    into: PackedLinear
    output: PackedLinear

    @abstractmethod
    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        """Compute the input of the second product from the output of the first."""

    def __call__(self, ops: Ops, x: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        made = self.mix(ops, ops.linear(x, self.into), states, batch)
        return ops.add_up(ops.linear(made, self.output))

    def add_to(
        self, ops: Ops, residual: Tensor, norm: RMSNorm, states: tuple[Tensor, ...], batch: AttentionBatch
    ) -> None:
        """Add what the mixer makes of the normed residual to the residual, in place."""
        projected = ops.normed_linear(residual, norm.weight, norm.eps, self.into)
        ops.add_linear(self.mix(ops, projected, states, batch), self.output, residual)


@dataclass(frozen=True, slots=True)
class GatedConv(StateMixer):
    """The short convolution of LFM2: it is gated on both sides. The first product gives the two gates and the
    input of the convolution."""

    conv: ConvWeights

    @property
    def state_shapes(self) -> StateShapes:
        return (self.conv.history_shape,)

    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        before, after, inner = projected.chunk(3, dim=1)
        weight, bias = self.conv.weight, self.conv.bias
        return ops.short_conv(inner, weight, bias, states[0], batch, silu=False, before=before, after=after)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """Gates numbers by SiLU, and norms groups of them, before or after. Without a weight there is no norm.

    With `whole_width`, the one group is spread over ranks, and has so many numbers."""

    weight: Tensor | None
    eps: float
    group_width: int = 1
    gates_first: bool = True
    whole_width: int | None = None

    def __call__(self, ops: Ops, x: Tensor, gate: Tensor) -> Tensor:
        """float32 [T, C] → [T, C] in the type of the gate."""
        if self.weight is None or self.whole_width is None:
            return ops.gated_norm(
                x, gate, self.weight, self.eps, self.group_width, gates_first=self.gates_first
            )
        factor = F.silu(gate.float())
        x = x * factor if self.gates_first else x
        sums = ops.add_up(x.square().sum(dim=1, keepdim=True))
        normed = x * torch.rsqrt(sums / self.whole_width + self.eps) * self.weight
        return (normed if self.gates_first else normed * factor).to(gate.dtype)


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
        made = ops.selective_scan(
            inputs.unflatten(1, (-1, self.head_dim)),
            step,
            read.unflatten(1, (-1, self.state_size)),
            write.unflatten(1, (-1, self.state_size)),
            self.scan,
            states[1],
            batch,
        )
        return self.norm(ops, made.flatten(1), gate)


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
        made = ops.gated_delta(mixed, rate, step, self.rule, states[1], batch)
        return self.norm(ops, made.flatten(1), gate)


def recurrent_settings(config: ArchitectureConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "families with states read these settings"
    return config.recurrent


def load_gated_conv(load: LayerLoader, name: str = "conv") -> GatedConv:
    settings, hidden, prefix = (
        recurrent_settings(load.config),
        load.config.hidden_size,
        f"{load.prefix}.{name}",
    )
    own = load.weights.shard.inner(hidden)
    return GatedConv(
        into=load.weights.linear(
            [f"{prefix}.{part}_proj" for part in ("before", "after", "inner")],
            [hidden] * 3,
            hidden,
            bias=settings.bias,
            part=LinearPart(rows=[own] * 3),
        ),
        conv=load_conv(load, f"{prefix}.conv", hidden, [own]),
        output=load.weights.linear(
            [f"{prefix}.out_proj"], [hidden], hidden, bias=settings.bias, part=LinearPart(columns=own)
        ),
    )


def gated_conv_rows(config: ArchitectureConfig, name: str = "conv") -> dict[str, StoredRows]:
    """Return the rows of the two gates and the input in the stored projection of `GatedConv`."""
    parts = {f"{name}.{part}_proj": config.hidden_size for part in ("before", "after", "inner")}
    return fused_rows(f"{name}.in_proj", parts)


def load_conv(load: LayerLoader, name: str, channels: int, own: Sequence[range]) -> ConvWeights:
    """Load some channels of a convolution."""
    settings = recurrent_settings(load.config)
    weight = load.weights.table(f"{name}.weight", channels, settings.conv_width)
    bias = load.weights.vector(f"{name}.bias", channels) if settings.conv_bias else None
    return ConvWeights(taken(weight, own), None if bias is None else taken(bias, own))


def load_convs(load: LayerLoader, name: str, sizes: Sequence[int], own: Sequence[range]) -> ConvWeights:
    """Load some channels of the convolutions of queries, keys and values, which may be stored as one."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    if load.weights.has(f"{name}.conv1d.weight"):
        spans = [
            range(start + span.start, start + span.stop) for start, span in zip(starts, own, strict=True)
        ]
        return load_conv(load, f"{name}.conv1d", sum(sizes), spans)
    convs = [
        load_conv(load, f"{name}.{part}_conv1d", size, [span])
        for part, size, span in zip("qkv", sizes, own, strict=True)
    ]
    return ConvWeights(torch.cat([each.weight for each in convs]), None)


def taken(whole: Tensor, spans: Sequence[range]) -> Tensor:
    """Return some rows of a tensor, end to end."""
    return torch.cat([whole[span.start : span.stop] for span in spans])


def log_of_decay(decay: Tensor) -> Tensor:
    """Return the logarithm that folders store, made of the negative number that GGUF files store."""
    return (-decay).log()


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
    load: LayerLoader, name: str = "mamba", *, scales: Sequence[float] | None = None, in_scale: float = 1.0
) -> Mamba2Mixer:
    """Load a rank's heads of Mamba-2, and the groups that they read. `scales` are factors of the parts of the
    projection, in their order, and `in_scale` of its input."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    prefix, parts = f"{load.prefix}.{name}", _mamba_parts(config)
    if settings.num_heads < shard.tensor_size:
        raise ModelLoadError(
            f"The {settings.num_heads} heads of Mamba-2 cannot be shared out over {shard.tensor_size} ranks.",
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
    if in_scale != 1.0 or (scales is not None and set(scales) != {1.0}):
        factors = zip(spans, scales or [1.0] * 5, strict=True)
        scale = torch.cat([torch.full((len(span),), factor * in_scale) for span, factor in factors]).to(
            device
        )
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
    settings, eps = recurrent_settings(load.config), load.config.norm_eps
    if not settings.has_norm:
        return GatedNorm(None, eps)
    size = settings.num_heads * settings.head_dim
    weight = taken(load.weights.vector(f"{name}.weight", size), [own])
    width = size // settings.num_groups
    if len(own) == size or (own.start % width == 0 and own.stop % width == 0):
        return GatedNorm(weight, eps, width, settings.gates_first)
    if settings.num_groups > 1:
        raise ModelLoadError(
            f"The {settings.num_groups} groups of this model's norms cannot be shared out over "
            f"{load.weights.shard.tensor_size} ranks.",
            hint="Lower --tensor-parallel-size.",
        )
    return GatedNorm(weight, eps, width, settings.gates_first, whole_width=size)


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
    name: str = "linear_attn",
    *,
    norm_eps: float | None = None,
    largest_rate: float = 1.0,
) -> GatedDeltaNet:
    """Load a rank's key heads of a gated delta net, and the value heads that belong to them."""
    config, settings, shard = load.config, recurrent_settings(load.config), load.weights.shard
    prefix, parts = f"{load.prefix}.{name}", delta_net_parts(config)
    if settings.num_groups < shard.tensor_size:
        raise ModelLoadError(
            f"The {settings.num_groups} key heads of this model's delta nets cannot be shared out over "
            f"{shard.tensor_size} ranks.",
            hint="Lower --tensor-parallel-size.",
        )
    keys = balanced(settings.num_groups, shard.tensor_size)[shard.tensor_rank]
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


def mamba_config(fields: Fields, layers: frozenset[int], hidden_size: int) -> RecurrentConfig:
    """Read the settings of Mamba-2 in hybrids, which name them alike."""
    num_heads = fields.integer("mamba_n_heads", 128)
    inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * hidden_size)
    head_dim = fields.raw("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // num_heads
    if not isinstance(head_dim, int) or head_dim * num_heads != inner:
        raise ModelLoadError(
            f"{fields.where} has {num_heads} heads of Mamba-2 that do not fill {inner} numbers."
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
    """Read the limits of steps of Mamba-2."""
    limits = fields.raw("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise ModelLoadError(f"{fields.where} has a time_step_limit that is not a pair of numbers.")
    low, high = (float(each["__float__"]) if isinstance(each, dict) else float(each) for each in limits)
    return low, high
