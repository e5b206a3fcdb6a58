"""Defines the layers that decoders share, built on `Ops` alone. Knows no architecture by name.

Forward passes run dozens of times a second over dozens of layers, and each operation takes microseconds: they bind
functions to local names and create no tensors but the outputs of operations.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from penstock.kernels.interface import (
    AttentionBatch,
    AttentionLayer,
    FindsArgmax,
    GatedLayer,
    JoinsLayers,
    KVStore,
    Ops,
    PackedExperts,
    PackedLinear,
    Routing,
    RunLayers,
)
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFLayout
from penstock.models.rope import rope_table
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, NamedProduct, WeightLoader

KERNEL_ALIGNMENT = 16  # bytes; other kernels are compiled for data that is not aligned to it


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert for every token. `gate` gives each token's share of it, as a logit."""

    mlp: GatedMLP
    gate: PackedLinear


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Many gated MLPs, of which a router picks a few for each token."""

    router: PackedLinear
    experts: PackedExperts
    routing: Routing
    shared: SharedExpert | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and MLP, each with the norm in front of it."""

    attention_norm: Tensor
    qkv: PackedLinear
    attention: AttentionLayer
    output: PackedLinear
    mlp_norm: Tensor
    mlp: GatedMLP | ExpertMLP


def _kind(part: object) -> Hashable:
    """Return a key that is the same for layers that differ only in the values of their weights."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.data_ptr() % KERNEL_ALIGNMENT
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    if isinstance(part, Sequence):
        return tuple(_kind(item) for item in part) if not isinstance(part, str) else part
    return part if isinstance(part, Hashable) else id(part)


class RopeTables:
    """The rotary tables of a model, one for all layers or one for each kind."""

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, num_positions: int) -> None:
        divisors = None
        if loader.has("model.rope_divisors.weight"):
            divisors = loader.vector("model.rope_divisors.weight", config.head_dim // 2)
        device = loader.ops.device
        self._whole = rope_table(config.rope, config.head_dim, num_positions, divisors).to(device)
        self._windowed = self._whole
        if config.local_rope is not None:
            self._windowed = rope_table(config.local_rope, config.head_dim, num_positions).to(device)

    def of_layer(self, window: int | None) -> Tensor:
        return self._whole if window is None else self._windowed


class Decoder(ABC):
    """A decoder: embedding, layers, final norm and head; or a rank's part of them.

    The part is `WeightLoader.shard`. Layers hold a rank's heads and its slice of the MLP, `num_layers` and
    `num_kv_heads` count the rank's part, and the loader's `Ops` add up the results of ranks.

    An architecture is a subclass, with its names in checkpoints, the reading of settings, and the loading and running
    of a layer.
    """

    name: ClassVar[str]
    huggingface_names: ClassVar[tuple[str, ...]]  # as in `architectures`, and as in `model_type`
    gguf_names: ClassVar[tuple[str, ...]]  # as in `general.architecture`
    has_head_norms: ClassVar[bool] = False  # RMS norm of each query and key head before rope
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"  # of the norm between attention and MLP
    _layers: Sequence[Any]

    @classmethod
    @abstractmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig: ...

    @classmethod
    @abstractmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig: ...

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> GGUFLayout:
        return GGUFLayout()

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        self.config = config
        self.shard = loader.shard
        self._heads = self.shard.heads(config.num_heads, config.num_kv_heads)
        self.layer_indices = self.shard.layers(config.num_layers)
        self.num_layers = len(self.layer_indices)
        self.num_kv_heads = len(self._heads.keys)
        self.head_dim = config.head_dim
        self.max_model_len = max_model_len
        self._ops: Ops = loader.ops
        self._embedding, self._head = loader.embedding_and_head(
            config.vocab_size, config.hidden_size, tied=config.tie_embeddings
        )
        self._ropes = RopeTables(config, loader, max_model_len)
        self._load_layers(loader)
        self._final_norm = self._norm("model.norm", loader) if self.shard.is_last_stage else None
        self.num_parameters = loader.num_parameters
        self.weight_bytes = loader.weight_bytes
        self.products: Sequence[NamedProduct] = loader.products

    def with_ops(self, ops: Ops) -> Self:
        """Return a model with the same weights, run by other operations."""
        twin = copy.copy(self)
        twin._ops = ops
        return twin

    def with_distinct_layers(self) -> Self:
        twin = copy.copy(self)
        twin._layers = list({_kind(layer): layer for layer in self._layers}.values())
        twin.num_layers = len(twin._layers)
        return twin

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        residual = self.embed(token_ids)
        self.run_layers(residual, batch, kv)
        return self.normed(residual)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self._embedding is not None, "the first stage embeds"
        return self._ops.embed(token_ids, self._embedding)

    @abstractmethod
    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None: ...

    def normed(self, residual: Tensor) -> Tensor:
        assert self._final_norm is not None, "the last stage norms"
        return self._ops.rms_norm(residual, self._final_norm, self.config.norm_eps)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        assert self._head is not None, "the last stage has the head"
        logits = self._ops.logits(hidden_rows, self._head)
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        # A cap may make different logits equal.
        if self.config.logit_softcap is not None or not isinstance(self._ops, FindsArgmax):
            return None
        assert self._head is not None, "the last stage has the head"
        return self._ops.argmax(hidden_rows, self._head)

    @abstractmethod
    def _load_layers(self, loader: WeightLoader) -> None: ...

    def _load_layer(self, index: int, loader: WeightLoader) -> DecoderLayer:
        config = self.config
        prefix = f"model.layers.{index}"
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        queries = scaled(self._heads.queries, config.head_dim)
        keys = scaled(self._heads.keys, config.head_dim)
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm", loader),
            qkv=loader.linear(
                [f"{prefix}.self_attn.{part}_proj" for part in "qkv"],
                [query_size, kv_size, kv_size],
                config.hidden_size,
                bias=config.qkv_bias,
                part=LinearPart(rows=[queries, keys, keys]),
            ),
            attention=self._attention_layer(index, loader),
            output=loader.linear(
                [f"{prefix}.self_attn.o_proj"],
                [config.hidden_size],
                query_size,
                bias=config.output_bias,
                part=LinearPart(columns=queries),
            ),
            mlp_norm=self._norm(f"{prefix}.{self.mlp_norm_name}", loader),
            mlp=self._load_mlp(f"{prefix}.mlp", index, loader),
        )

    def _load_mlp(self, prefix: str, index: int, loader: WeightLoader) -> GatedMLP | ExpertMLP:
        return self._load_gated_mlp(prefix, loader)

    def _load_gated_mlp(
        self, prefix: str, loader: WeightLoader, intermediate_size: int | None = None
    ) -> GatedMLP:
        config = self.config
        inner, outer = intermediate_size or config.intermediate_size, config.hidden_size
        own = self.shard.inner(inner)
        return GatedMLP(
            gate_up=loader.linear(
                [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
                [inner] * 2,
                outer,
                bias=config.mlp_bias,
                part=LinearPart(rows=[own, own]),
            ),
            down=loader.linear(
                [f"{prefix}.down_proj"],
                [outer],
                inner,
                bias=config.mlp_bias,
                part=LinearPart(columns=own),
            ),
        )

    def _attention_layer(self, index: int, loader: WeightLoader) -> AttentionLayer:
        config = self.config
        window = config.windows[index]
        q_norm = k_norm = None
        if self.has_head_norms:
            prefix = f"model.layers.{index}.self_attn"
            q_norm = loader.vector(f"{prefix}.q_norm.weight", config.head_dim, plus=config.norm_offset)
            k_norm = loader.vector(f"{prefix}.k_norm.weight", config.head_dim, plus=config.norm_offset)
        return AttentionLayer(
            num_heads=len(self._heads.queries),
            num_kv_heads=len(self._heads.keys),
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=self._ropes.of_layer(window),
            window=window,
            softcap=config.attention_softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def _norm(self, name: str, loader: WeightLoader) -> Tensor:
        return loader.vector(f"{name}.weight", self.config.hidden_size, plus=self.config.norm_offset)


@dataclass(frozen=True, slots=True)
class _JoinedLayers:
    """Runs all layers in one call, if these operations can."""

    ops: Ops
    layers: Sequence[DecoderLayer]
    kv: KVStore
    run: RunLayers | None


class PreNormDecoder(Decoder):
    """A decoder in Llama's style: each half of a layer reads the normed residual and adds to it."""

    _joined: _JoinedLayers | None = None

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        ops, joined = self._ops, self._joined
        if (
            joined is None
            or joined.ops is not ops
            or joined.layers is not self._layers
            or joined.kv is not kv
        ):
            joined = self._joined = _JoinedLayers(ops, self._layers, kv, self._join_layers(ops, kv))
        if joined.run is not None:
            joined.run(residual, batch)
        else:
            self._run_one_by_one(ops, residual, batch, kv)

    def forward_tapped(
        self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        residual, seen = self.embed(token_ids), dict[int, Tensor]()

        def watch(index: int) -> None:
            if index in taps:
                seen[index] = residual.clone()

        self._run_one_by_one(self._ops, residual, batch, kv, watch)
        watch(len(self._layers))
        return self.normed(residual), torch.cat([seen[index] for index in taps], dim=1)

    def _run_one_by_one(
        self,
        ops: Ops,
        residual: Tensor,
        batch: AttentionBatch,
        kv: KVStore,
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        attention_block, mlp_block, moe_block = ops.attention_block, ops.mlp_block, ops.moe_block
        eps, activation, kv_layer = self.config.norm_eps, self.config.activation, kv.layer
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            attention_block(
                residual,
                layer.attention_norm,
                eps,
                layer.qkv,
                layer.output,
                layer.attention,
                kv_layer(index),
                batch,
            )
            norm, mlp = layer.mlp_norm, layer.mlp
            if isinstance(mlp, GatedMLP):
                mlp_block(residual, norm, eps, mlp.gate_up, mlp.down, activation)
            else:
                shared = None if mlp.shared is None else self._run_shared(mlp.shared, residual, norm)
                moe_block(residual, norm, eps, mlp.router, mlp.experts, mlp.routing, activation)
                if shared is not None:
                    residual.add_(shared)

    def _join_layers(self, ops: Ops, kv: KVStore) -> RunLayers | None:
        if not isinstance(ops, JoinsLayers):
            return None
        parts = [
            GatedLayer(
                layer.attention_norm,
                layer.qkv,
                layer.attention,
                layer.output,
                layer.mlp_norm,
                layer.mlp.gate_up,
                layer.mlp.down,
            )
            for layer in self._layers
            if isinstance(layer.mlp, GatedMLP)
        ]
        if len(parts) < len(self._layers):
            return None
        return ops.join_layers(parts, self.config.norm_eps, self.config.activation, kv)

    def _run_shared(self, expert: SharedExpert, residual: Tensor, norm: Tensor) -> Tensor:
        ops, config = self._ops, self.config
        normed = ops.rms_norm(residual, norm, config.norm_eps)
        made = ops.mlp(normed, expert.mlp.gate_up, expert.mlp.down, config.activation)
        share = torch.sigmoid(ops.linear(normed, expert.gate).float())
        return (made * share).to(residual.dtype)

    def _load_layers(self, loader: WeightLoader) -> None:
        self._layers: list[DecoderLayer] = [self._load_layer(index, loader) for index in self.layer_indices]
