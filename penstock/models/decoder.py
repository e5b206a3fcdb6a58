"""Runs a decoder: embedding, layers, final norm and head. A family adds how one of its layers is loaded and run."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor

from penstock.kernels.interface import (
    AttentionBatch,
    FindsArgmax,
    GatedLayer,
    JoinsLayers,
    KVStore,
    Ops,
    RunLayers,
)
from penstock.models.config import ArchitectureConfig, Fields, PlainActivationName
from penstock.models.experts import FUSED_EXPERTS, ExpertMLP, add_mlp, load_experts
from penstock.models.gguf_config import common_gguf_config, gguf_experts
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import gguf_layout
from penstock.models.huggingface_config import common_huggingface_config
from penstock.models.layers import (
    Attention,
    Block,
    GatedMLP,
    LayerLoader,
    Norm,
    NormKind,
    RMSNorm,
    RopeTables,
    load_norm,
)
from penstock.models.layout import Layout, RotatedNorms, StackedPart, StoredRows, rotated_rows
from penstock.models.weights import NamedProduct, WeightLoader

BeforeLayer: TypeAlias = (
    Callable[[int], None] | None
)  # is called before each layer, and may change the residual
KERNEL_ALIGNMENT = 16  # bytes; other kernels are compiled for data that is not aligned to it


def _kind(part: object) -> Hashable:
    """Return a key that is the same for layers that differ only in the values of their weights."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.data_ptr() % KERNEL_ALIGNMENT
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    if isinstance(part, Sequence):
        return tuple(_kind(item) for item in part) if not isinstance(part, str) else part
    return part if isinstance(part, Hashable) else id(part)


class Decoder(ABC):
    """A decoder, or a rank's part of it.

    The part is `WeightLoader.shard`. Layers hold a rank's heads and its slice of the MLP, `num_layers` and
    `num_kv_heads` count the rank's part, and the loader's `Ops` add up the results of ranks.

    A family is a subclass with its names in checkpoints, the reading of settings, and one layer: `load_layer` and
    `run_layer`. Class variables say where a family differs only in words.
    """

    name: ClassVar[str]
    huggingface_names: ClassVar[tuple[str, ...]]  # as in `architectures`, and as in `model_type`
    gguf_names: ClassVar[tuple[str, ...]] = ()  # as in `general.architecture`
    gguf_mixtures: ClassVar[
        tuple[str, ...]
    ] = ()  # the same of files with experts, if another family has the name

    # Settings. What a folder means that does not say; None: the family has no such setting.
    attention_bias: ClassVar[bool | None] = None
    mlp_bias: ClassVar[bool | None] = None
    eps_setting: ClassVar[str] = "rms_norm_eps"
    gguf_activation: ClassVar[PlainActivationName] = "gelu"  # of MLPs without a gate, which files do not name
    gguf_experts_normalize: ClassVar[bool | None] = None  # see `gguf_experts`; None: files have no experts
    gguf_gating: ClassVar[int] = 1

    # Layers.
    norm_kind: ClassVar[NormKind] = "rms"
    has_head_norms: ClassVar[bool] = False  # RMS norm of each query and key head before rope
    has_gate: ClassVar[bool] = True  # MLPs
    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"  # of the norm between attention and MLP
    selection_bias: ClassVar[str | None] = None  # see `load_experts`
    is_shared_gated: ClassVar[bool] = False

    # Tensors: the usual name for a stored one, where rotated pairs are neighbours, norms that are rotated with heads,
    # and the tensors that hold the experts of a layer.
    stored_base: ClassVar[str] = "model"
    stored_names: ClassVar[Mapping[str, str]] = {}
    gguf_stored_names: ClassVar[Mapping[str, str]] = {}
    is_interleaved: ClassVar[bool] = False
    is_gguf_interleaved: ClassVar[bool] = False
    rotated_norms: ClassVar[RotatedNorms] = "heads"
    stacked_experts: ClassVar[Mapping[str, StackedPart]] = FUSED_EXPERTS

    implementation = "native"
    records_graphs = True
    _layers: Sequence[Any]

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return common_huggingface_config(
            fields,
            cls.name,
            gated=cls.has_gate,
            eps_setting=cls.eps_setting,
            attention_bias=cls.attention_bias,
            mlp_bias=cls.mlp_bias,
        )

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config = replace(common_gguf_config(file, cls.name), plain_activation=cls.gguf_activation)
        normalizes = cls.gguf_experts_normalize
        if normalizes is None:
            return config
        experts = gguf_experts(file, config, normalizes=normalizes, usual_gating=cls.gguf_gating)
        return replace(config, experts=experts)

    @staticmethod
    def cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        """Return the rows of tensors that folders store in larger ones."""
        return {}

    @staticmethod
    def gguf_cut(config: ArchitectureConfig) -> dict[str, StoredRows]:
        """Return the rows of tensors that GGUF files store in larger ones."""
        return {}

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        """Return the order of rows of tensors whose rotated pairs may be stored as neighbours."""
        return rotated_rows(config, interleaved=interleaved, norms=cls.rotated_norms)

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        """Return how folders of this family store its tensors."""
        return Layout(
            base=cls.stored_base,
            names=cls.stored_names,
            cut=cls.cut(config),
            rows=cls.rows(config, interleaved=cls.is_interleaved),
            experts=cls.stacked_experts if config.experts is not None else {},
            num_experts=config.num_experts,
        )

    @classmethod
    def gguf_layout(cls, config: ArchitectureConfig) -> Layout:
        """Return how GGUF files of this family store its tensors."""
        return gguf_layout(
            cls.gguf_stored_names,
            cut=cls.gguf_cut(config),
            rows=cls.rows(config, interleaved=cls.is_gguf_interleaved),
            num_experts=config.num_experts,
        )

    @abstractmethod
    def load_layer(self, load: LayerLoader) -> Any: ...

    def load_attention(self, load: LayerLoader) -> Any:
        return load.attention(head_norms=self.has_head_norms or self.config.head_norms)

    def load_mlp(self, load: LayerLoader) -> Any:
        """Load experts in the layers that have them, else an MLP."""
        if not self.config.is_dense(load.index):
            return load_experts(
                load, selection_bias=self.selection_bias, is_shared_gated=self.is_shared_gated
            )
        return load.gated_mlp() if self.has_gate else load.plain_mlp()

    @abstractmethod
    def run_layer(self, layer: Any, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        """Run one layer on the residual, in place."""

    def load_final_norm(self, loader: WeightLoader) -> Norm:
        return load_norm(loader, "model.norm", self.config, self.norm_kind)

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        self.config = config
        self.shard = loader.shard
        self._heads = self.shard.heads(config.num_heads, config.num_kv_heads)
        self.layer_indices = self.shard.layers(config.num_layers)
        self.num_layers = len(self.layer_indices)
        self.num_kv_heads = len(self._heads.keys)
        self.head_dim = config.cached_head_dim
        self.max_model_len = max_model_len
        self._ops: Ops = loader.ops
        self._embedding, self._head = loader.embedding_and_head(
            config.vocab_size, config.hidden_size, tied=config.tie_embeddings, head_bias=config.head_bias
        )
        ropes = RopeTables(config, loader, max_model_len)
        self._layers = [
            self.load_layer(LayerLoader(config, loader, ropes, index)) for index in self.layer_indices
        ]
        self._final_norm = self.load_final_norm(loader) if self.shard.is_last_stage else None
        self.num_parameters = loader.num_parameters
        self.weight_bytes = loader.weight_bytes
        layout = self.layout(config)
        self.products: Sequence[NamedProduct] = [layout.with_places(each) for each in loader.products]

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

    def forward_tapped(
        self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        residual, seen = self.embed(token_ids), dict[int, Tensor]()

        def watch(index: int) -> None:
            if index in taps:
                seen[index] = residual.clone()

        self._run_one_by_one(residual, batch, kv, watch)
        watch(len(self._layers))
        return self.normed(residual), torch.cat([seen[index] for index in taps], dim=1)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self._embedding is not None, "the first stage embeds"
        embedded = self._ops.embed(token_ids, self._embedding)
        scale = self.config.embedding_scale
        return embedded if scale == 1.0 else embedded.mul_(scale)

    def rows_replaced(self, token_ids: Tensor, at: Tensor, residual: Tensor) -> None:  # noqa: B027
        """Called after `embed` when the rows `at` of its result were replaced, for decoders that read them again."""

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        self._run_one_by_one(residual, batch, kv)

    def run_layers_with(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: Callable[[int], None]
    ) -> None:
        """Run the layers, with a call before each of them that may change the residual."""
        self._run_one_by_one(residual, batch, kv, before_layer)

    def rope_tables(self) -> list[Tensor]:
        """Return the rope tables of the layers, each once."""
        tables = {id(layer.attention.layer.rope): layer.attention.layer.rope for layer in self._layers}
        return list(tables.values())

    def normed(self, residual: Tensor) -> Tensor:
        assert self._final_norm is not None, "the last stage norms"
        return self._final_norm(self._ops, residual)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        assert self._head is not None, "the last stage has the head"
        logits = self._ops.logits(hidden_rows, self._head)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def argmax(self, hidden_rows: Tensor) -> Tensor | None:
        # A cap, or a scale that rounds, may make different logits equal.
        changes_order = self.config.logit_softcap is not None or math.frexp(self.config.logit_scale)[0] != 0.5
        if changes_order or not isinstance(self._ops, FindsArgmax):
            return None
        assert self._head is not None, "the last stage has the head"
        return self._ops.argmax(hidden_rows, self._head)

    def _in_turn(self, before_layer: BeforeLayer) -> Iterator[tuple[int, Any]]:
        """Return the layers with their numbers. The call before a layer is made when the layer is taken."""
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            yield index, layer

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        ops, run_layer, kv_layer = self._ops, self.run_layer, kv.layer
        for index, layer in self._in_turn(before_layer):
            run_layer(layer, residual, ops, kv_layer(index), batch.of_layer(index))


class BlockDecoder(Decoder):
    """A decoder whose layers have an attention and an MLP, each with the norm before it, that no backend runs in one
    call with the norm. Both may read the same residual, and may share the norm."""

    shares_norm: ClassVar[bool] = False  # where both read the same residual

    def load_layer(self, load: LayerLoader) -> Block:
        norm = load.norm("input_layernorm", self.norm_kind)
        is_shared = self.shares_norm and self.config.parallel_blocks
        return Block(
            attention_norm=norm,
            attention=self.load_attention(load),
            mlp_norm=norm if is_shared else load.norm(self.mlp_norm_name, self.norm_kind),
            mlp=self.load_mlp(load),
        )

    def run_layer(self, layer: Block, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        scale, hidden = self.config.residual_scale, layer.attention_norm(ops, residual)
        attended = layer.attention(ops, hidden, cache, batch)
        if self.config.parallel_blocks:
            if layer.mlp_norm is not layer.attention_norm:
                hidden = layer.mlp_norm(ops, residual)
            residual.add_(attended).add_(layer.mlp(ops, hidden))
        else:
            residual.add_(attended, alpha=scale)
            residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)), alpha=scale)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer in Llama's style: attention and MLP, each with the norm before it."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


@dataclass(frozen=True, slots=True)
class _JoinedLayers:
    """Runs all layers in one call, if these operations can."""

    ops: Ops
    layers: Sequence[DecoderLayer]
    kv: KVStore
    run: RunLayers | None


class PreNormDecoder(Decoder):
    """A decoder in Llama's style: each half of a layer reads the normed residual and adds to it. Backends run such a
    half, or all layers, in one call."""

    _joined: _JoinedLayers | None = None

    def load_layer(self, load: LayerLoader) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=load.rms_norm("input_layernorm"),
            attention=self.load_attention(load),
            mlp_norm=load.rms_norm(self.mlp_norm_name),
            mlp=self.load_mlp(load),
        )

    def run_layer(
        self, layer: DecoderLayer, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        layer.attention.add_to(ops, residual, layer.attention_norm, cache, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)

    def run_layers(self, residual: Tensor, batch: AttentionBatch, kv: KVStore) -> None:
        ops, joined = self._ops, self._joined
        if batch.parts:
            if len(set(batch.part_of_layer)) > 1:  # layers have different block tables
                self._run_one_by_one(residual, batch, kv)
                return
            batch = batch.of_layer(0)
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
            self._run_one_by_one(residual, batch, kv)

    def _join_layers(self, ops: Ops, kv: KVStore) -> RunLayers | None:
        if not isinstance(ops, JoinsLayers):
            return None
        parts = [
            GatedLayer(
                layer.attention_norm.weight,
                layer.attention.qkv,
                layer.attention.layer,
                layer.attention.output,
                layer.mlp_norm.weight,
                layer.mlp.gate_up,
                layer.mlp.down,
            )
            for layer in self._layers
            if isinstance(layer.mlp, GatedMLP)
        ]
        if len(parts) < len(self._layers):
            return None
        return ops.join_layers(parts, self.config.norm_eps, self.config.activation, kv)
