"""Defines the layers that decoders share, and loads them. Knows no architecture by name.

A layer holds packed weights, and is called with the operations that run it: those of one device, of one rank among
several, or of a batch with adapters. Forward passes run dozens of times a second over dozens of layers, and each
operation takes microseconds: they create no tensors but the outputs of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops, PackedLinear
from penstock.models.config import ActivationName, ArchitectureConfig
from penstock.models.rope import identity_table, pair_order, rope_table
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, WeightLoader


class Norm(Protocol):
    """A part of a layer that looks at single tokens: a norm, or an MLP."""

    def __call__(self, ops: Ops, x: Tensor) -> Tensor: ...


# An RMS norm; a layer norm with a weight and a bias; one with a weight alone; one with neither.
NormKind = Literal["rms", "layer", "layer without bias", "constant"]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor
    eps: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm that subtracts the mean first. Either of weight and bias may be missing."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: PackedLinear
    layer: AttentionLayer
    output: PackedLinear

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        return ops.attention(x, self.qkv, self.output, self.layer, cache, batch)

    def add_to(self, ops: Ops, residual: Tensor, norm: RMSNorm, cache: Any, batch: AttentionBatch) -> None:
        """Add the output of attention for the normed residual to the residual, in place."""
        ops.attention_block(residual, norm.weight, norm.eps, self.qkv, self.output, self.layer, cache, batch)


@dataclass(frozen=True, slots=True)
class ChangedAttention:
    """Attention whose queries, keys and values, [T, (H + 2G) × D], are changed before they are rotated."""

    inner: Attention
    change: Norm

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        changed = self.change(ops, ops.linear(x, self.inner.qkv))
        made = ops.linear(ops.attend(changed, self.inner.layer, cache, batch), self.inner.output)
        return ops.add_up(made)


@dataclass(frozen=True, slots=True)
class ScaledQueries:
    """Attention whose queries are multiplied by a factor of their position: float32 [max positions]."""

    inner: Attention
    factors: Tensor

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        layer = self.inner.layer
        qkv = ops.linear(x, self.inner.qkv)
        qkv[:, : layer.num_heads * layer.head_dim].mul_(
            self.factors[batch.positions].to(x.dtype).unsqueeze(1)
        )
        return ops.add_up(ops.linear(ops.attend(qkv, layer, cache, batch), self.inner.output))


def query_factors(load: LayerLoader) -> Tensor:
    """Return the factors of queries that grow with their position: float32 [max positions]."""
    config, num_positions = load.config, len(load.rope)
    scaling = config.rope.scaling
    step = config.query_step or (None if scaling is None else scaling.original_max_positions) or num_positions
    steps = torch.arange(num_positions, device=load.weights.ops.device) // step
    return 1.0 + (config.query_growth or 0.0) * torch.log1p(steps.float())


@dataclass(frozen=True, slots=True)
class WideNorms:
    """RMS norms over all query heads together and over all key heads together, of which a rank may have some.

    `share_of_keys` is the rank's part of the sum over keys: ranks may hold the same key head."""

    queries: Tensor
    keys: Tensor
    eps: float
    widths: tuple[int, int]  # of queries and keys of all ranks
    share_of_keys: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        sizes = len(self.queries), len(self.keys)
        query, key, value = torch.split(x, [*sizes, x.shape[1] - sum(sizes)], dim=1)
        wide_query, wide_key = query.float(), key.float()
        sums = torch.stack(
            [wide_query.square().sum(dim=1), wide_key.square().sum(dim=1) * self.share_of_keys], dim=1
        )
        sums = ops.add_up(sums)
        query = wide_query * torch.rsqrt(sums[:, :1] / self.widths[0] + self.eps) * self.queries
        key = wide_key * torch.rsqrt(sums[:, 1:] / self.widths[1] + self.eps) * self.keys
        return torch.cat([query.to(x.dtype), key.to(x.dtype), value], dim=1)


@dataclass(frozen=True, slots=True)
class HeadLayerNorms:
    """Layer norms of single query and key heads, each head with its own weights [heads, D]."""

    queries: Tensor
    keys: Tensor
    eps: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        (heads, size), kv_heads = self.queries.shape, len(self.keys)
        by_head = x.view(x.shape[0], -1, size)
        normed = F.layer_norm(by_head[:, : heads + kv_heads].float(), (size,), eps=self.eps)
        normed = (normed * torch.cat([self.queries, self.keys])).to(x.dtype)
        return torch.cat([normed, by_head[:, heads + kv_heads :]], dim=1).view(x.shape)


@dataclass(frozen=True, slots=True)
class Clipped:
    """Clips values to [-limit, limit]."""

    limit: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return x.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: PackedLinear
    down: PackedLinear
    activation: ActivationName = "silu"

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.mlp(x, self.gate_up, self.down, self.activation)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """An MLP without a gate."""

    up: PackedLinear
    down: PackedLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        active = self.activation(ops.linear(x, self.up).float()).to(x.dtype)
        return ops.add_up(ops.linear(active, self.down))


class Mixer(Protocol):
    """Attention, or a mixer that replaces it."""

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of a layer with one norm for attention and one for the MLP. A family decides the position of the
    norms."""

    attention_norm: Norm
    attention: Mixer
    mlp_norm: Norm
    mlp: Norm


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A layer whose two halves are normed before and after."""

    attention_norm: Norm
    attention: Attention
    after_attention_norm: Norm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    after_mlp_norm: Norm

    def run(self, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        hidden = self.attention(ops, self.attention_norm(ops, residual), cache, batch)
        hidden = self.after_attention_norm(ops, hidden)
        hidden = ops.add_rms_norm(hidden, residual, self.mlp_norm.weight, self.mlp_norm.eps)
        residual.add_(self.after_mlp_norm(ops, self.mlp(ops, hidden)))


class RopeTables:
    """The rotary tables of a model: one for all layers, or one for each kind."""

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, num_positions: int) -> None:
        divisors, rope = None, config.rope
        pairs = (rope.rotary_dim or config.head_dim) // 2
        if loader.has("model.rope_divisors.weight"):
            divisors = loader.vector("model.rope_divisors.weight", pairs)
        if rope.scaling is not None and loader.has("model.rope_divisors_long.weight"):
            short, long = (
                tuple(loader.vector(f"model.rope_divisors_{kind}.weight", pairs).tolist())
                for kind in ("short", "long")
            )
            rope = replace(rope, scaling=replace(rope.scaling, short_divisors=short, long_divisors=long))
        device = loader.ops.device
        self._config = config
        whole = rope_table(rope, config.head_dim, num_positions, divisors)
        self._whole = torch.nn.functional.pad(whole, (0, 0, 0, config.spare_rope_rows)).to(device)
        self._windowed = self._whole
        if config.local_rope is not None:
            self._windowed = rope_table(config.local_rope, config.head_dim, num_positions).to(device)
        self._none = self._whole
        if config.unrotated_layers:
            self._none = identity_table(config.cached_head_dim, num_positions).to(device)

    def of_layer(self, index: int) -> Tensor:
        if index in self._config.unrotated_layers:
            return self._none
        return self._whole if self._config.windows[index] is None else self._windowed


class LayerLoader:
    """Loads the parts of one layer, or of a rank's part of the layer."""

    def __init__(
        self, config: ArchitectureConfig, weights: WeightLoader, ropes: RopeTables, index: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.index = index
        self.prefix = f"model.layers.{index}"
        self.heads = weights.shard.heads(config.num_heads, config.num_kv_heads)
        self._ropes = ropes

    @property
    def rope(self) -> Tensor:
        return self._ropes.of_layer(self.index)

    def norm(self, name: str, kind: NormKind) -> RMSNorm | LayerNorm:
        return load_norm(self.weights, f"{self.prefix}.{name}", self.config, kind)

    def rms_norm(self, name: str) -> RMSNorm:
        return load_rms_norm(self.weights, f"{self.prefix}.{name}", self.config)

    def attention(self, *, head_norms: bool = False, name: str = "self_attn") -> Attention:
        """Load attention. `head_norms` are RMS norms of each query and key head, the same for all heads."""
        config, prefix = self.config, f"{self.prefix}.{name}"
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        queries = scaled(self.heads.queries, config.head_dim)
        keys = scaled(self.heads.keys, config.head_dim)
        return Attention(
            qkv=self.weights.linear(
                [f"{prefix}.{part}_proj" for part in "qkv"],
                [query_size, kv_size, kv_size],
                config.hidden_size,
                bias=config.qkv_bias,
                part=LinearPart(rows=[queries, keys, keys]),
            ),
            layer=self.attention_layer(head_norms=head_norms, name=name),
            output=self.weights.linear(
                [f"{prefix}.o_proj"],
                [config.hidden_size],
                query_size,
                bias=config.output_bias,
                part=LinearPart(columns=queries),
            ),
        )

    def attention_layer(self, *, head_norms: bool = False, name: str = "self_attn") -> AttentionLayer:
        config, prefix = self.config, f"{self.prefix}.{name}"
        q_norm = k_norm = None
        if head_norms:
            q_norm, k_norm = (
                self.weights.vector(f"{prefix}.{part}_norm.weight", config.head_dim, plus=config.norm_offset)
                for part in "qk"
            )
        return AttentionLayer(
            num_heads=len(self.heads.queries),
            num_kv_heads=len(self.heads.keys),
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=self.rope,
            window=config.windows[self.index],
            softcap=config.attention_softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def head_layer_norms(self, *, interleaved: bool) -> HeadLayerNorms:
        """Load layer norms of single heads, stored as one table or as a vector for each head."""
        config, weights, size = self.config, self.weights, self.config.head_dim
        order = pair_order(size, config.rope.rotary_dim or size, interleaved=interleaved)

        def table(part: str, count: int, own: range) -> Tensor:
            name = f"{self.prefix}.self_attn.{part}_norm"
            if weights.has(f"{name}.weight"):
                rows = weights.table(f"{name}.weight", count, size)[own.start : own.stop]
            else:
                rows = torch.stack([weights.vector(f"{name}.{head}.weight", size) for head in own])
            return rows[:, order.to(rows.device)]

        queries = table("q", config.num_heads, self.heads.queries)
        return HeadLayerNorms(queries, table("k", config.num_kv_heads, self.heads.keys), config.norm_eps)

    def wide_norms(self) -> WideNorms:
        """Load norms over all query heads and over all key heads."""
        config, shard, prefix = self.config, self.weights.shard, f"{self.prefix}.self_attn"
        widths = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query, key = (
            self.weights.vector(f"{prefix}.{part}_norm.weight", width, plus=config.norm_offset)
            for part, width in zip("qk", widths, strict=True)
        )
        own = (scaled(heads, config.head_dim) for heads in (self.heads.queries, self.heads.keys))
        query, key = (each[span.start : span.stop] for each, span in zip((query, key), own, strict=True))
        ranks = (replace(shard, tensor_rank=rank) for rank in range(shard.tensor_size))
        parts = [rank.heads(config.num_heads, config.num_kv_heads) for rank in ranks]
        num_sharers = sum(part.keys == self.heads.keys for part in parts)
        return WideNorms(query, key, config.norm_eps, widths, 1.0 / num_sharers)

    def gated_mlp(self, name: str = "mlp", intermediate_size: int | None = None) -> GatedMLP:
        config, prefix = self.config, f"{self.prefix}.{name}"
        inner, outer = intermediate_size or config.intermediate_size, config.hidden_size
        own = self.weights.shard.inner(inner)
        return GatedMLP(
            gate_up=self.weights.linear(
                [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
                [inner] * 2,
                outer,
                bias=config.mlp_bias,
                part=LinearPart(rows=[own, own]),
            ),
            down=self._down(f"{prefix}.down_proj", inner, own),
            activation=config.activation,
        )

    def plain_mlp(
        self,
        name: str = "mlp",
        activation: Callable[[Tensor], Tensor] | None = None,
        intermediate_size: int | None = None,
    ) -> PlainMLP:
        """Load an MLP without a gate."""
        config, prefix = self.config, f"{self.prefix}.{name}"
        inner = intermediate_size or config.intermediate_size
        own = self.weights.shard.inner(inner)
        return PlainMLP(
            up=self.weights.linear(
                [f"{prefix}.up_proj"],
                [inner],
                config.hidden_size,
                bias=config.mlp_bias,
                part=LinearPart(rows=[own]),
            ),
            down=self._down(f"{prefix}.down_proj", inner, own),
            activation=activation or ACTIVATIONS[config.plain_activation],
        )

    def _down(self, name: str, inner: int, own: range) -> PackedLinear:
        config = self.config
        return self.weights.linear(
            [name], [config.hidden_size], inner, bias=config.mlp_bias, part=LinearPart(columns=own)
        )


def load_rms_norm(weights: WeightLoader, name: str, config: ArchitectureConfig) -> RMSNorm:
    weight = weights.vector(f"{name}.weight", config.hidden_size, plus=config.norm_offset)
    return RMSNorm(weight, config.norm_eps)


def load_norm(
    weights: WeightLoader, name: str, config: ArchitectureConfig, kind: NormKind
) -> RMSNorm | LayerNorm:
    if kind == "rms":
        return load_rms_norm(weights, name, config)
    if kind == "constant":
        return LayerNorm(None, None, config.norm_eps)
    weight = weights.vector(f"{name}.weight", config.hidden_size, plus=config.norm_offset)
    bias = weights.vector(f"{name}.bias", config.hidden_size) if kind == "layer" else None
    return LayerNorm(weight, bias, config.norm_eps)
