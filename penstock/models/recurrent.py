"""Defines layers that keep a fixed state for each request, loads them, and runs decoders that have such layers.

A state is a tuple of tensors with a slot for each request (`kernels.states`): the newest inputs of a short
convolution, and the state of a scan. Each of several ranks has some heads or channels, and their states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, KVStore, Ops, PackedLinear
from penstock.kernels.states import StateShapes
from penstock.models.config import ArchitectureConfig, RecurrentConfig
from penstock.models.decoder import BeforeLayer, Decoder
from penstock.models.experts import ExpertMLP, add_mlp
from penstock.models.layers import GatedMLP, LayerLoader, RMSNorm
from penstock.models.layout import StoredRows, fused_rows
from penstock.models.weights import LinearPart, WeightLoader


class LayerCache(NamedTuple):
    """The memory of one layer: keys and values if it has attention, and states if it has any."""

    kv: Any
    states: tuple[Tensor, ...]


class HybridDecoder(Decoder):
    """A decoder some or all of whose layers keep a fixed state. A loaded layer has a `mixer` with `state_shapes`, an
    `attention`, or both; what a layer lacks is None. `run_layer` gets a `LayerCache`.

    Most families have the layers of `HybridLayer`, and say how attention and mixer are loaded."""

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        self._number_layers()

    def load_layer(self, load: LayerLoader) -> Any:
        settings = load.config.recurrent
        has_state = settings is not None and load.index in settings.layers
        return HybridLayer(
            norm=load.rms_norm("input_layernorm"),
            attention=None if has_state else self.load_attention(load),
            mixer=self.load_mixer(load) if has_state else None,
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=self.load_mlp(load),
        )

    def load_mixer(self, load: LayerLoader) -> StateMixer:
        raise NotImplementedError("a family without this has layers of its own")

    def run_layer(self, layer: Any, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        scale = self.config.residual_scale
        if scale == 1.0:
            if layer.attention is not None:
                layer.attention.add_to(ops, residual, layer.norm, cache.kv, batch)
            elif layer.mixer is not None:
                layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
            if layer.mlp is not None:
                add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
            return
        normed = layer.norm(ops, residual)
        if layer.attention is not None:
            residual.add_(layer.attention(ops, normed, cache.kv, batch), alpha=scale)
        elif layer.mixer is not None:
            residual.add_(layer.mixer(ops, normed, cache.states, batch), alpha=scale)
        residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)), alpha=scale)

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
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        for index, layer in self._in_turn(before_layer):
            self.run_layer(layer, residual, self._ops, self.layer_cache(index, kv, batch), batch)

    def layer_cache(self, index: int, kv: KVStore, batch: AttentionBatch) -> LayerCache:
        """Return the memory of a layer in this step."""
        kv_at, state_at = self._kv_at[index], self._state_at[index]
        states: tuple[Tensor, ...] = ()
        if state_at is not None:
            assert batch.states is not None, "a step of a model with states has slots"
            states = batch.states.store.layer(state_at)
        return LayerCache(None if kv_at is None else kv.layer(kv_at), states)


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
    """A part of a layer with a fixed state, between two matrix products."""

    into: PackedLinear
    output: PackedLinear

    @abstractmethod
    def mix(self, ops: Ops, projected: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        """Compute the input of the second product from the output of the first."""

    def __call__(self, ops: Ops, x: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        mixed = self.mix(ops, ops.linear(x, self.into), states, batch)
        return ops.add_up(ops.linear(mixed, self.output))

    def add_to(
        self, ops: Ops, residual: Tensor, norm: RMSNorm, states: tuple[Tensor, ...], batch: AttentionBatch
    ) -> None:
        """Add the mixer's output for the normed residual to the residual, in place."""
        projected = ops.normed_linear(residual, norm.weight, norm.eps, self.into)
        ops.add_linear(self.mix(ops, projected, states, batch), self.output, residual)


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """A layer with attention or a mixer, and mostly an MLP, each with the norm before it."""

    norm: RMSNorm
    attention: Any | None
    mixer: StateMixer | None
    mlp_norm: RMSNorm | None = None
    mlp: GatedMLP | ExpertMLP | None = None


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
    """Gates values by SiLU, and normalizes groups of them, before or after. Without a weight there is no norm.

    `whole_width` is the size of a single group that is spread over ranks."""

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


def recurrent_settings(config: ArchitectureConfig) -> RecurrentConfig:
    assert config.recurrent is not None, "families with states read these settings"
    return config.recurrent


def load_gated_conv(load: LayerLoader) -> GatedConv:
    settings, hidden = recurrent_settings(load.config), load.config.hidden_size
    prefix = f"{load.prefix}.conv"
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


def gated_conv_rows(config: ArchitectureConfig) -> dict[str, StoredRows]:
    """Return the rows of the two gates and the input in the stored projection of `GatedConv`."""
    parts = {f"conv.{part}_proj": config.hidden_size for part in ("before", "after", "inner")}
    return fused_rows("conv.in_proj", parts)


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
    """Return the logarithm that folders store, computed from the negative value that GGUF files store."""
    return (-decay).log()
