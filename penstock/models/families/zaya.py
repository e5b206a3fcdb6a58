"""Zaya: queries and keys go through two short convolutions before attention, half of the values are those of the
token before, and the router of a layer reads that of the layer before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops, PackedExperts, PackedLinear, Routing
from penstock.kernels.states import StateShapes
from penstock.models.config import (
    ActivationName,
    ArchitectureConfig,
    ExpertsConfig,
    Fields,
    RecurrentConfig,
    extended,
)
from penstock.models.decoder import BeforeLayer
from penstock.models.experts import PARTS, expert_routing
from penstock.models.huggingface_config import (
    layer_kinds,
    rope_parameters,
    ropes_by_layer_kind,
)
from penstock.models.layers import Attention, LayerLoader, RMSNorm
from penstock.models.layout import StoredRows
from penstock.models.recurrent import ConvWeights, HybridDecoder, LayerCache, taken
from penstock.models.rope import pair_order
from penstock.models.sharding import scaled
from penstock.models.weights import ExpertNames, LinearPart, WeightLoader

_ROPES: dict[str, dict[str, Any]] = {
    "hybrid": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZayaConfig(ArchitectureConfig):
    conv_widths: tuple[int, int]  # of the convolution of each channel, and of that of each head
    router_size: int


@dataclass(frozen=True, slots=True)
class ConvProjection:
    """Makes queries, keys and values.

    The second convolution mixes the channels of a head. It sees the bias of the first one in all of its inputs, also
    in those in front of a text, so that this part of its output is a constant."""

    into: PackedLinear  # queries and keys of this rank's heads, and all values: of the token, and for the next one
    conv: ConvWeights  # without its bias
    mixing: Tensor  # [K, heads, D, D] in the compute type, of the newest input first
    constant: Tensor  # float32 [heads, D]
    older_taps: Tensor  # of `_taps`, for the older inputs of the second convolution
    next_taps: Tensor  # ... and for the values of the token before
    next_bias: Tensor  # of the values for the next token, in the compute type
    key_scales: Tensor  # float32 [key heads, 1]
    order: Tensor  # of the numbers of a head, so that rotated pairs are half a head apart
    num_queries: int  # heads
    values: range  # of all values, those of this rank

    @property
    def state_shapes(self) -> StateShapes:
        older, channels = len(self.mixing) - 1, self.conv.weight.shape[0]
        return self.conv.history_shape, (channels * older, older), (len(self.next_bias), 1)

    def __call__(self, ops: Ops, x: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        num_heads, size = self.constant.shape
        width = num_heads * size
        raw, values, following = ops.linear(x, self.into).tensor_split(
            [width, width + len(self.next_bias)], dim=1
        )
        heads = self._convolved(ops, raw.contiguous(), states, batch)
        by_head = raw.view(-1, num_heads, size).float()
        queries, keys = by_head[:, : self.num_queries], by_head[:, self.num_queries :]
        group = self.num_queries // keys.shape[1]
        middle = (queries + keys.repeat_interleave(group, dim=1)) * 0.5
        added = torch.cat([middle, middle.unflatten(1, (-1, group)).mean(dim=2)], dim=1)
        heads = heads + added
        heads = heads * (size**0.5 / heads.norm(dim=2, keepdim=True).clamp_min(torch.finfo(x.dtype).eps))
        heads = torch.cat(
            [heads[:, : self.num_queries], heads[:, self.num_queries :] * self.key_scales], dim=1
        )
        following = following - self.next_bias
        before = (
            ops.short_conv(following, self.next_taps, None, states[2], batch, silu=False) + self.next_bias
        )
        own = torch.cat([values, before], dim=1)[:, self.values.start : self.values.stop]
        return torch.cat([heads[:, :, self.order].flatten(1).to(x.dtype), own], dim=1)

    def _convolved(self, ops: Ops, raw: Tensor, states: tuple[Tensor, ...], batch: AttentionBatch) -> Tensor:
        """[T, heads × D] → float32 [T, heads, D]."""
        num_heads, size = self.constant.shape
        inner = ops.short_conv(raw, self.conv.weight, None, states[0], batch, silu=False)
        inputs, older = [inner], len(self.mixing) - 1
        if older:
            copies = inner.repeat(1, older)
            delayed = ops.short_conv(copies, self.older_taps, None, states[1], batch, silu=False)
            inputs += delayed.chunk(older, dim=1)
        made = self.constant
        for each, matrices in zip(inputs, self.mixing, strict=True):
            by_head = each.reshape(-1, num_heads, size).transpose(0, 1)
            made = made + torch.bmm(by_head, matrices.transpose(1, 2)).transpose(0, 1).float()
        return made


def _taps(steps: int, channels: int, device: torch.device) -> Tensor:
    """Return the convolutions of `steps` copies of some channels that give the inputs 1 to `steps` tokens ago."""
    weight = torch.eye(steps + 1, device=device)[:steps].flip(0)  # the oldest input comes first
    return weight.repeat_interleave(channels, dim=0)


@dataclass(frozen=True, slots=True)
class ScaledSum:
    """Adds two vectors, each after a bias and a factor for each number."""

    added_bias: Tensor
    added_scale: Tensor
    residual_bias: Tensor
    residual_scale: Tensor

    def add_to(self, residual: Tensor, added: Tensor) -> None:
        """Add to the residual, in place."""
        whole = (residual + self.residual_bias) * self.residual_scale
        residual.copy_((added + self.added_bias) * self.added_scale + whole)


@dataclass(frozen=True, slots=True)
class ZayaExperts:
    """Experts of which a token has one at most: the last class of the router stands for none."""

    down: PackedLinear
    scale: Tensor | None  # of the narrow vectors of the layer before
    norm: RMSNorm
    inner: tuple[PackedLinear, PackedLinear]
    classes: PackedLinear
    biases: Tensor  # float32 [experts + 1], of the choice
    experts: PackedExperts
    routing: Routing
    activation: ActivationName

    def __call__(self, ops: Ops, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the experts make, and the narrow vectors for the next layer."""
        narrow = ops.linear(x, self.down)
        if before is not None and self.scale is not None:
            narrow = narrow + before * self.scale.to(x.dtype)
        hidden = self.norm(ops, narrow)
        for each in self.inner:
            hidden = F.gelu(ops.linear(hidden, each))
        shares = ops.linear(hidden, self.classes).float().softmax(dim=1)
        takes_one = (shares + self.biases).argmax(dim=1, keepdim=True) < shares.shape[1] - 1
        # Sigmoids of these are the shares, and 0 for tokens without an expert.
        logits = torch.where(takes_one, torch.logit(shares[:, :-1]), -torch.inf)
        return ops.moe(x, logits, self.experts, self.routing, self.activation), narrow


@dataclass(frozen=True, slots=True)
class ZayaLayer:
    attention_norm: RMSNorm
    mixer: ConvProjection
    attention: Attention  # whose first product is the mixer's
    attention_sum: ScaledSum
    mlp_norm: RMSNorm
    mlp: ZayaExperts
    mlp_sum: ScaledSum


class Zaya(HybridDecoder):
    name = "zaya"
    huggingface_names = ("ZayaForCausalLM", "zaya")
    attention_bias = False

    def __init__(self, config: ZayaConfig, loader: WeightLoader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len)
        bias, scale = (
            loader.vector(f"model.input_hidden_states_{part}", config.hidden_size)
            for part in ("bias", "scale")
        )
        self._input_bias, self._input_scale = bias.to(loader.ops.dtype), scale.to(loader.ops.dtype)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        ropes = rope_parameters(fields) or _ROPES
        kinds = {"full_attention": "hybrid", "sliding_attention": "hybrid_sliding"}
        named = {usual: {**_ROPES[own], **(ropes.get(own) or {})} for usual, own in kinds.items()}
        inner = fields.integer("moe_intermediate_size")
        changed = fields.changed(rope_parameters=named, intermediate_size=inner)
        rope, local_rope, plain = ropes_by_layer_kind(changed, 5_000_000.0, 10_000.0)
        config = super().config_from_huggingface(plain)
        listed = layer_kinds(fields, config.num_layers, set(_ROPES)) or ("hybrid",) * config.num_layers
        window = fields.integer("sliding_window") if "hybrid_sliding" in listed else None
        widths = fields.integer("cca_time0", 2), fields.integer("cca_time1", 2)
        return extended(
            config,
            ZayaConfig,
            rope=rope,
            local_rope=local_rope,
            windows=tuple(window if kind == "hybrid_sliding" else None for kind in listed),
            norm_eps=fields.number("rms_norm_eps", 1e-5),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            head_bias=fields.flag("lm_head_bias", False),
            experts=ExpertsConfig(
                count=fields.integer("num_experts"),
                per_token=fields.integer("num_experts_per_tok", 1),
                intermediate_size=inner,
                normalizes=False,
                scoring="sigmoid",
            ),
            recurrent=RecurrentConfig(layers=frozenset(range(config.num_layers)), conv_width=widths[0]),
            conv_widths=widths,
            router_size=fields.integer("router_hidden_size", 256),
        )

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return {}  # `ConvProjection` orders heads

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).add_(self._input_bias).mul_(self._input_scale)

    def load_layer(self, load: LayerLoader) -> ZayaLayer:
        config, size = self.config, self.config.head_dim
        assert isinstance(config, ZayaConfig)
        queries = scaled(load.heads.queries, size)
        mixer = _load_projection(load, config)
        return ZayaLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            mixer=mixer,
            attention=Attention(
                mixer.into,
                load.attention_layer(),
                load.weights.linear(
                    [f"{load.prefix}.self_attn.o_proj"],
                    [config.hidden_size],
                    config.num_heads * size,
                    bias=config.output_bias,
                    part=LinearPart(columns=queries),
                ),
            ),
            attention_sum=_load_sum(load, "post_attention_residual_scale"),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=_load_experts(load, config),
            mlp_sum=_load_sum(load, "post_mlp_residual_scale"),
        )

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        ops, narrow = self._ops, None
        for index, layer in self._in_turn(before_layer):
            cache = self.layer_cache(index, kv, batch)
            qkv = layer.mixer(ops, layer.attention_norm(ops, residual), cache.states, batch)
            attended = ops.attend(qkv, layer.attention.layer, cache.kv, batch)
            layer.attention_sum.add_to(residual, ops.add_up(ops.linear(attended, layer.attention.output)))
            made, narrow = layer.mlp(ops, layer.mlp_norm(ops, residual), narrow)
            layer.mlp_sum.add_to(residual, made)

    def run_layer(
        self, layer: Any, residual: Tensor, ops: Ops, cache: LayerCache, batch: AttentionBatch
    ) -> None:
        raise NotImplementedError("a router reads that of the layer before, so layers run together")


def _load_projection(load: LayerLoader, config: ZayaConfig) -> ConvProjection:
    weights, heads, size = load.weights, load.heads, config.head_dim
    if weights.shard.tensor_size > config.num_kv_heads:
        raise ConfigError(
            f"The {config.num_kv_heads} key-value heads of this model cannot be shared out to "
            f"{weights.shard.tensor_size} ranks.",
            hint="Lower --tensor-parallel-size.",
        )
    prefix, half = f"{load.prefix}.self_attn.qkv_proj", config.num_kv_heads * size // 2
    widths = config.num_heads * size, config.num_kv_heads * size
    own = scaled(heads.queries, size), scaled(heads.keys, size)
    channels, spans = sum(widths), [own[0], range(widths[0] + own[1].start, widths[0] + own[1].stop)]
    first, second = config.conv_widths
    bias = taken(weights.vector(f"{prefix}.conv_qk_depthwise.bias", channels), spans)
    mixing = weights.table(f"{prefix}.conv_qk_grouped.weight", channels * size, second)
    # For each head: outputs, inputs, tokens.
    mixing = taken(mixing.view(channels, size, second), spans).view(-1, size, size, second)
    constant = taken(weights.vector(f"{prefix}.conv_qk_grouped.bias", channels), spans).view(-1, size)
    constant = constant + torch.einsum("hoik,hi->ho", mixing, bias.view(-1, size))
    next_bias = torch.zeros(half, device=weights.ops.device)
    if config.qkv_bias:
        next_bias = weights.vector(f"{prefix}.v_proj_delayed.bias", half)
    scales = weights.vector(f"{load.prefix}.self_attn.qk_norm.temp", config.num_kv_heads)
    rope = config.rope if config.windows[load.index] is None else config.local_rope
    assert rope is not None
    return ConvProjection(
        into=weights.linear(
            [f"{prefix}.{part}" for part in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")],
            [*widths, half, half],
            config.hidden_size,
            bias=config.qkv_bias,
            part=LinearPart(rows=[*own, range(half), range(half)]),
        ),
        conv=ConvWeights(
            taken(weights.table(f"{prefix}.conv_qk_depthwise.weight", channels, first), spans), None
        ),
        mixing=mixing.permute(3, 0, 1, 2).flip(0).to(weights.ops.dtype).contiguous(),
        constant=constant,
        older_taps=_taps(second - 1, sum(map(len, own)), weights.ops.device),
        next_taps=_taps(1, half, weights.ops.device),
        next_bias=next_bias.to(weights.ops.dtype),
        key_scales=scales[heads.keys.start : heads.keys.stop].unsqueeze(1),
        order=pair_order(size, rope.rotary_dim or size, interleaved=False).to(weights.ops.device),
        num_queries=len(heads.queries),
        values=own[1],
    )


def _load_sum(load: LayerLoader, name: str) -> ScaledSum:
    parts = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
    size, dtype = load.config.hidden_size, load.weights.ops.dtype
    return ScaledSum(*(load.weights.vector(f"{load.prefix}.{name}.{part}", size).to(dtype) for part in parts))


def _load_experts(load: LayerLoader, config: ZayaConfig) -> ZayaExperts:
    weights, experts, size = load.weights, config.experts, config.router_size
    assert experts is not None
    gate, prefix = f"{load.prefix}.mlp.gate", f"{load.prefix}.mlp.experts"
    names = [ExpertNames(*(f"{prefix}.{number}.{part}" for part in PARTS)) for number in range(experts.count)]
    biases = weights.vector(f"{gate}.balancing_biases", experts.count + 1)
    mlp = f"{gate}.router_mlp"
    return ZayaExperts(
        down=weights.linear([f"{gate}.down_proj"], [size], config.hidden_size, bias=True),
        scale=weights.vector(f"{gate}.router_states_scale", size) if load.index else None,
        norm=RMSNorm(weights.vector(f"{mlp}.norm.weight", size), config.norm_eps),
        inner=(
            weights.linear([f"{mlp}.fc1"], [size], size, bias=True),
            weights.linear([f"{mlp}.fc2"], [size], size, bias=True),
        ),
        classes=weights.linear([f"{mlp}.out_proj"], [experts.count + 1], size),
        biases=biases,
        experts=weights.experts(names, experts.intermediate_size, config.hidden_size),
        routing=expert_routing(experts, biases[:-1].contiguous()),
        activation=config.activation,
    )
