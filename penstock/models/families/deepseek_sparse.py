"""DeepSeek V3.2 and GLM 5: as DeepSeek V3, but tokens attend only to the few tokens that an indexer chooses. Contexts
that are no longer need no indexer. Layers of GLM 5 may share what the indexer of an earlier layer chose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, ModelLoadError
from penstock.kernels.interface import AttentionBatch, IndexLayer, KVStore, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, IndexConfig, LatentConfig
from penstock.models.decoder import BeforeLayer
from penstock.models.experts import add_mlp
from penstock.models.families.deepseek import GGUF_NAMES, DeepseekV3, LatentAttention, LatentBlock
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.huggingface_config import layer_kinds
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import StoredRows, by_head
from penstock.models.rope import pair_order
from penstock.models.weights import WeightLoader

_GGUF_INDEX = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small heads that choose tokens: queries are computed from narrow queries, keys and weights of the hidden
    state."""

    query: PackedLinear
    key: PackedLinear
    weights: PackedLinear
    layer: IndexLayer

    def __call__(
        self, ops: Ops, hidden: Tensor, narrow: Tensor, cache: Any, batch: AttentionBatch
    ) -> Tensor | None:
        query, key = ops.linear(narrow, self.query), ops.linear(hidden, self.key)
        # The order of scores would be the same with any positive factor.
        return ops.choose_tokens(
            query, key, ops.router_logits(hidden, self.weights), self.layer, cache, batch
        )


@dataclass(frozen=True, slots=True)
class SparseBlock(LatentBlock):
    indexer: Indexer | None  # None: the layer before has chosen


class DeepseekV32(DeepseekV3):
    name = "deepseek_v32"
    huggingface_names = ("DeepseekV32ForCausalLM", "deepseek_v32")
    gguf_names: ClassVar[tuple[str, ...]] = ("deepseek32",)
    gguf_stored_names: ClassVar[Mapping[str, str]] = {**_GGUF_INDEX, **GGUF_NAMES}
    rotates_neighbours: ClassVar[bool] = False  # in indexers, whose stored pairs are neighbours then

    def __init__(self, config: ArchitectureConfig, loader: WeightLoader, max_model_len: int) -> None:
        index = _settings(config)[1]
        self.is_sparse = max_model_len > index.top_k
        if self.is_sparse and loader.ops.kv_dtype == torch.int8:
            raise ConfigError(
                "A KV cache of 8-bit integers cannot hold the keys of this model's indexer.",
                hint=f"Leave out --kv-cache-dtype, or give --max-model-len {index.top_k}.",
            )
        super().__init__(config, loader, max_model_len)
        if self.is_sparse:
            self.records_graphs = False  # what is chosen depends on the context's length
            self.latent_width += index.head_dim
            self.head_dim = self.latent_width

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        assert config.latent is not None
        if config.latent.query_rank is None:
            raise ModelLoadError(f"{fields.where} has no q_lora_rank, of which the indexer makes queries.")
        index = IndexConfig(
            num_heads=fields.integer("index_n_heads", 64),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 2048),
            shared_layers=cls.shared_layers(fields, config.num_layers),
        )
        return dataclasses.replace(config, latent=dataclasses.replace(config.latent, index=index))

    @classmethod
    def config_from_gguf(cls, file: GGUFFile) -> ArchitectureConfig:
        config, fields = super().config_from_gguf(file), metadata_fields(file)
        assert config.latent is not None
        index = IndexConfig(
            num_heads=fields.integer("attention.indexer.head_count"),
            head_dim=fields.integer("attention.indexer.key_length"),
            top_k=fields.integer("attention.indexer.top_k"),
            shared_layers=_gguf_shared_layers(file, fields, config.num_layers),
        )
        return dataclasses.replace(config, latent=dataclasses.replace(config.latent, index=index))

    @classmethod
    def shared_layers(cls, fields: Fields, num_layers: int) -> frozenset[int]:
        """Return the layers that use what an earlier layer chose."""
        return frozenset()

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return {**super().rows(config, interleaved=interleaved), **cls._index_rows(config)}

    @classmethod
    def _index_rows(cls, config: ArchitectureConfig) -> dict[str, StoredRows]:
        """Return the rows of indexers such that rotated pairs are half of the rotated part apart."""
        latent, index = _settings(config)
        if not cls.rotates_neighbours:
            return {}
        rest = torch.arange(latent.rope_dim, index.head_dim)
        head = torch.cat([pair_order(latent.rope_dim, latent.rope_dim, interleaved=True), rest])
        return {
            f"self_attn.indexer.{part}": StoredRows(
                f"self_attn.indexer.{part}", size, by_head(torch.arange(size), head)
            )
            for part, size in (
                ("wq_b", index.num_heads * index.head_dim),
                ("wk", index.head_dim),
                ("k_norm", index.head_dim),
            )
        }

    def load_layer(self, load: LayerLoader) -> LatentBlock:
        plain, index = super().load_layer(load), _settings(load.config)[1]
        if not self.is_sparse:
            return plain
        is_shared = load.index in index.shared_layers
        if is_shared and load.index == self.layer_indices.start:
            raise ConfigError(
                f"Layer {load.index} begins a stage, and needs what the layer before it has chosen.",
                hint="Use --tensor-parallel-size.",
            )
        return SparseBlock(
            plain.attention_norm,
            plain.attention,
            plain.mlp_norm,
            plain.mlp,
            indexer=None if is_shared else load_indexer(load),
        )

    def run_layer(
        self, layer: LatentBlock, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        self._run(layer, residual, ops, cache, batch, None)

    def _run(
        self,
        layer: LatentBlock,
        residual: Tensor,
        ops: Ops,
        cache: Any,
        batch: AttentionBatch,
        chosen: Tensor | None,
    ) -> Tensor | None:
        """Run a layer on the residual, in place. Takes and returns the tokens that were chosen."""
        if isinstance(layer, SparseBlock):
            chosen = _attend(layer, residual, ops, cache, batch, chosen)
        else:
            layer.attention.add_to(ops, residual, layer.attention_norm, cache, batch)
        add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
        return chosen

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        chosen = None
        for index, layer in self._in_turn(before_layer):
            chosen = self._run(layer, residual, self._ops, kv.layer(index), batch.of_layer(index), chosen)


class GlmMoeDsa(DeepseekV32):
    name = "glm_moe_dsa"
    huggingface_names = ("GlmMoeDsaForCausalLM", "glm_moe_dsa")
    gguf_names = ("glm-dsa",)
    rotates_neighbours = True

    @classmethod
    def shared_layers(cls, fields: Fields, num_layers: int) -> frozenset[int]:
        kinds = layer_kinds(fields, num_layers, {"full", "shared"}, key="indexer_types")
        pattern = fields.raw("index_topk_pattern")
        if kinds is None and pattern is not None:
            names = {"F": "full", "S": "shared"}
            listed = {"indexer_types": [names.get(each, each) for each in pattern]}
            kinds = layer_kinds(
                Fields(listed, fields.where), num_layers, {"full", "shared"}, key="indexer_types"
            )
        if kinds is not None:
            return frozenset(index for index, kind in enumerate(kinds) if kind == "shared")
        period, first = fields.raw("index_topk_freq") or 1, fields.raw("index_skip_topk_offset")
        first = 2 if first is None else first
        return frozenset(index for index in range(num_layers) if max(index - first + 1, 0) % period)


def _gguf_shared_layers(file: GGUFFile, fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the layers without an indexer of their own: by flags for all layers, else by their tensors."""
    flags = fields.raw("attention.indexer.types")
    if isinstance(flags, list) and len(flags) >= num_layers:
        return frozenset(index for index in range(num_layers) if not flags[index])
    return frozenset(
        index for index in range(num_layers) if f"blk.{index}.indexer.attn_k.weight" not in file.tensors
    )


def _settings(config: ArchitectureConfig) -> tuple[LatentConfig, IndexConfig]:
    assert config.latent is not None
    assert config.latent.index is not None
    return config.latent, config.latent.index


def _attend(
    block: SparseBlock, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch, chosen: Tensor | None
) -> Tensor | None:
    """Add the output of attention over chosen tokens for the normed residual to the residual, in place."""
    attention: LatentAttention = block.attention
    norm: RMSNorm | None = attention.query_norm
    assert norm is not None
    assert attention.query is not None
    hidden = block.attention_norm(ops, residual)
    narrow, latent = attention.parts(ops.linear(hidden, attention.down))
    narrow = norm(ops, narrow)
    if block.indexer is not None:
        chosen = block.indexer(ops, hidden, narrow, cache, batch)
    query = ops.linear(narrow, attention.query)
    made = ops.attend_latent(query, latent, attention.layer, cache, batch, chosen)
    ops.add_linear(made, attention.output, residual)
    return chosen


def load_indexer(load: LayerLoader) -> Indexer:
    """Load an indexer, which every rank has whole."""
    (latent, index), weights, prefix = (
        _settings(load.config),
        load.weights,
        f"{load.prefix}.self_attn.indexer",
    )
    assert latent.query_rank is not None
    hidden, width = load.config.hidden_size, index.head_dim
    return Indexer(
        query=weights.linear([f"{prefix}.wq_b"], [index.num_heads * width], latent.query_rank),
        key=weights.linear([f"{prefix}.wk"], [width], hidden),
        weights=weights.linear([f"{prefix}.weights_proj"], [index.num_heads], hidden),
        layer=IndexLayer(
            num_heads=index.num_heads,
            head_dim=width,
            rope_dim=latent.rope_dim,
            top_k=index.top_k,
            column=latent.rank + latent.rope_dim,
            rope=load.rope,
            norm=weights.vector(f"{prefix}.k_norm.weight", width),
            norm_bias=weights.vector(f"{prefix}.k_norm.bias", width),
        ),
    )
