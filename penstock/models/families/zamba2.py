"""Zamba 2: every layer is Mamba-2, and some have attention and an MLP in front, which read the residual beside the
embedding. Such blocks are few, and layers share them; each layer adds narrow products of its own to the block's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import AttentionBatch, AttentionLayer, KVStore, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, RecurrentConfig, extended
from penstock.models.decoder import BeforeLayer
from penstock.models.huggingface_config import common_huggingface_config, layer_kinds
from penstock.models.layers import ACTIVATIONS, LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows, fused_gate_up, fused_rows
from penstock.models.mamba import load_mamba, mamba_rows
from penstock.models.recurrent import HybridDecoder, StateMixer
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, WeightLoader

BLOCK = "shared_transformer"
BEHIND = "mamba_decoder"  # the rest of a layer with a block
_LONG_CONTEXT = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(ArchitectureConfig):
    hybrid_layers: tuple[int, ...]  # that have a block in front
    num_blocks: int  # which take turns
    adapter_rank: int  # of products beside the MLP's; 0 for none
    adapts_attention: bool

    def block_layer(self, index: int) -> int:
        """Return the first layer with the block of a layer. Checkpoints keep the block there. Models whose head is
        not tied to the embedding, as transformers makes them, do not share blocks either."""
        if not self.tie_embeddings:
            return index
        return self.hybrid_layers[self.hybrid_layers.index(index) % self.num_blocks]


class ZambaCache(NamedTuple):
    """The memory of one layer, and the embedding of the step's tokens."""

    kv: Any
    states: tuple[Tensor, ...]
    embedded: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """Narrow products beside wide ones: the first gives a few numbers for each of the second."""

    narrow: PackedLinear
    wide: tuple[PackedLinear, ...]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        parts = ops.linear(x, self.narrow).chunk(len(self.wide), dim=1)
        made = [ops.linear(part.contiguous(), wide) for part, wide in zip(parts, self.wide, strict=True)]
        return torch.cat(made, dim=1)


@dataclass(frozen=True, slots=True)
class SharedProducts:
    """The products of a block, which its layers share."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm: RMSNorm  # of the residual beside the embedding
    mlp_norm: RMSNorm


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """One layer's use of a block: its attention, with a KV cache of its own, and its MLP."""

    products: SharedProducts
    layer: AttentionLayer
    adapter: Adapter | None
    mlp_adapter: Adapter | None
    activation: Callable[[Tensor], Tensor]
    linear: PackedLinear  # after the block

    def __call__(self, ops: Ops, both: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        products = self.products
        x = products.norm(ops, both)
        qkv = ops.linear(x, products.qkv)
        if self.adapter is not None:
            qkv += self.adapter(ops, x)
        made = ops.add_up(ops.linear(ops.attend(qkv, self.layer, cache, batch), products.output))
        x = products.mlp_norm(ops, made)
        both = ops.linear(x, products.gate_up)
        if self.mlp_adapter is not None:
            both += self.mlp_adapter(ops, x)
        gate, up = both.chunk(2, dim=1)
        active = (self.activation(gate.float()) * up.float()).to(x.dtype)
        return ops.linear(ops.add_up(ops.linear(active, products.down)), self.linear)


@dataclass(frozen=True, slots=True)
class Zamba2Layer:
    attention: SharedBlock | None
    norm: RMSNorm
    mixer: StateMixer


class Zamba2(HybridDecoder):
    name = "zamba2"
    huggingface_names = ("Zamba2ForCausalLM", "zamba2")
    config: Zamba2Config

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        self._blocks: dict[int, SharedProducts] = {}  # by the layer that a checkpoint keeps them in
        super().__init__(config, loader, max_model_len)

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        given = fields.with_usual_for_nulls(
            intermediate_size=4 * hidden, rms_norm_eps=1e-5, tie_word_embeddings=True
        )
        # A gate with another curve is run below.
        given = given.changed(head_dim=2 * hidden // heads, hidden_act="silu")
        if fields.flag("use_long_context", False):
            given = given.changed(max_position_embeddings=_LONG_CONTEXT)
        common = common_huggingface_config(given, cls.name)
        adapts_attention = fields.flag("use_shared_attention_adapter", False)
        if adapts_attention and common.num_kv_heads != common.num_heads:
            raise ModelLoadError(
                f"{fields.where} has adapters of attention, which need as many key-value heads as heads."
            )
        layers = frozenset(range(common.num_layers))
        has_bias = fields.flag("add_bias_linear", False)
        num_states = fields.integer("n_mamba_heads", 8)
        return extended(
            common,
            Zamba2Config,
            attention_scale=(common.head_dim / 2) ** -0.5,
            unrotated_layers=frozenset() if fields.flag("use_mem_rope", False) else layers,
            mlp_bias=has_bias,
            plain_activation=fields.plain_activation("hidden_act", "gelu"),
            recurrent=RecurrentConfig(
                layers=layers,
                conv_width=fields.integer("mamba_d_conv", 4),
                conv_bias=True,
                bias=has_bias,
                output_bias=has_bias,
                num_heads=num_states,
                head_dim=fields.integer("mamba_expand", 2) * hidden // num_states,
                num_groups=fields.integer("mamba_ngroups", 1),
                state_size=fields.integer("mamba_d_state", 64),
                step_limits=(fields.number("time_step_min", 0.001), math.inf),
                norm_eps=1e-5,  # whatever rms_norm_eps says
            ),
            hybrid_layers=hybrid_layers(fields, common.num_layers),
            num_blocks=fields.integer("num_mem_blocks", 1),
            adapter_rank=fields.integer("adapter_rank", 128),
            adapts_attention=adapts_attention,
        )

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        assert isinstance(config, Zamba2Config)
        inner, mlp = config.intermediate_size, f"{BLOCK}.feed_forward"
        cut: dict[str, StoredRows] = mamba_rows(config, "mamba") | mamba_rows(config, f"{BEHIND}.mamba")
        halves = fused_gate_up(inner, f"{mlp}.gate_up_proj")
        cut |= {f"{BLOCK}.{part}": rows for part, rows in halves.items()}
        for turn in range(len(config.hybrid_layers)):
            parts = {f"{mlp}.adapter.{turn}.{part}_proj": inner for part in ("gate", "up")}
            cut |= fused_rows(f"{mlp}.gate_up_proj_adapter_list.{turn}.1", parts)
        return Layout(names={"final_layernorm": "norm"}, cut=cut)

    def load_layer(self, load: LayerLoader) -> Zamba2Layer:
        if load.index not in self.config.hybrid_layers:
            return Zamba2Layer(None, load.rms_norm("input_layernorm"), self.load_named_mixer(load, "mamba"))
        norm, mixer = (
            load.rms_norm(f"{BEHIND}.input_layernorm"),
            self.load_named_mixer(load, f"{BEHIND}.mamba"),
        )
        return Zamba2Layer(self._load_block(load), norm, mixer)

    def load_named_mixer(self, load: LayerLoader, name: str) -> StateMixer:
        return load_mamba(load, name)

    def _load_block(self, load: LayerLoader) -> SharedBlock:
        config, weights, hidden = self.config, load.weights, self.config.hidden_size
        at = config.block_layer(load.index)
        num_products = len(weights.products)
        if at not in self._blocks:
            self._blocks[at] = self._load_products(load, f"model.layers.{at}.{BLOCK}")
        turn, prefix = config.hybrid_layers.index(load.index), f"model.layers.{at}.{BLOCK}"
        block = SharedBlock(
            products=self._blocks[at],
            layer=load.attention_layer(),
            adapter=self._load_adapter(load, f"{prefix}.self_attn", turn)
            if config.adapts_attention
            else None,
            mlp_adapter=self._load_mlp_adapter(load, f"{prefix}.feed_forward", turn)
            if config.adapter_rank
            else None,
            activation=ACTIVATIONS[config.plain_activation],
            linear=weights.linear([f"{load.prefix}.linear"], [hidden], hidden),
        )
        # PEFT changes a shared product for each layer by itself, which one product cannot follow.
        del weights.products[num_products:]
        return block

    def _load_products(self, load: LayerLoader, prefix: str) -> SharedProducts:
        config, weights = self.config, load.weights
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = (scaled(heads, config.head_dim) for heads in (load.heads.queries, load.heads.keys))
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp, own = f"{prefix}.self_attn", f"{prefix}.feed_forward", weights.shard.inner(inner)
        return SharedProducts(
            qkv=weights.linear(
                [f"{attention}.{part}_proj" for part in "qkv"],
                [query_size, key_size, key_size],
                2 * hidden,
                part=LinearPart(rows=[queries, keys, keys]),
            ),
            output=weights.linear(
                [f"{attention}.o_proj"], [hidden], query_size, part=LinearPart(columns=queries)
            ),
            gate_up=weights.linear(
                [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")],
                [inner] * 2,
                hidden,
                bias=config.mlp_bias,
                part=LinearPart(rows=[own, own]),
            ),
            down=weights.linear(
                [f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias, part=LinearPart(columns=own)
            ),
            norm=RMSNorm(weights.vector(f"{prefix}.input_layernorm.weight", 2 * hidden), config.norm_eps),
            mlp_norm=RMSNorm(weights.vector(f"{prefix}.pre_ff_layernorm.weight", hidden), config.norm_eps),
        )

    def _load_mlp_adapter(self, load: LayerLoader, prefix: str, turn: int) -> Adapter:
        config, rank = self.config, self.config.adapter_rank
        own = load.weights.shard.inner(config.intermediate_size)
        wide = load.weights.linear(
            [f"{prefix}.adapter.{turn}.{part}_proj" for part in ("gate", "up")],
            [config.intermediate_size] * 2,
            rank,
            part=LinearPart(rows=[own, own]),
        )
        narrow = load.weights.linear(
            [f"{prefix}.gate_up_proj_adapter_list.{turn}.0"], [rank], config.hidden_size
        )
        return Adapter(narrow, (wide,))

    def _load_adapter(self, load: LayerLoader, prefix: str, turn: int) -> Adapter:
        config, width = self.config, 2 * self.config.hidden_size
        own = scaled(load.heads.queries, config.head_dim)
        names = [f"{prefix}.linear_{part}_adapter_list.{turn}" for part in "qkv"]
        return Adapter(
            load.weights.linear([f"{name}.0" for name in names], [config.adapter_rank] * 3, width),
            tuple(
                load.weights.linear([f"{name}.1"], [width], config.adapter_rank, part=LinearPart(rows=[own]))
                for name in names
            ),
        )

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        embedded = residual.clone()
        for index, layer in self._in_turn(before_layer):
            cache = ZambaCache(*self.layer_cache(index, kv, batch), embedded)
            self.run_layer(layer, residual, self._ops, cache, batch)

    def run_layer(
        self, layer: Zamba2Layer, residual: Tensor, ops: Ops, cache: ZambaCache, batch: AttentionBatch
    ) -> None:
        if layer.attention is None:
            layer.mixer.add_to(ops, residual, layer.norm, cache.states, batch)
            return
        both = torch.cat([residual, cache.embedded], dim=1)
        inputs = layer.norm(ops, residual + layer.attention(ops, both, cache.kv, batch))
        residual.add_(layer.mixer(ops, inputs, cache.states, batch))


def hybrid_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a block in front, as the settings list them."""
    known = {"mamba", "linear_attention", "hybrid"}
    kinds = layer_kinds(fields, num_layers, known, key="layers_block_type")
    if kinds is None or "hybrid" not in kinds:
        raise ModelLoadError(f"{fields.where} lists no hybrid layer in layers_block_type.")
    return tuple(index for index, kind in enumerate(kinds) if kind == "hybrid")
