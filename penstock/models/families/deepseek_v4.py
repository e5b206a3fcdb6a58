"""DeepSeek V4: several residual streams (hyper-connections), attention over a window and over compressed entries
(`compressed.py`), and experts that the first layers choose by the token alone.

Layers of one kind compress every four tokens and have an indexer that chooses among the entries. Layers of the other
kind compress many tokens, and attend to all entries."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, KVStore, Ops, PackedLinear
from penstock.models.compressed import (
    Chunk,
    Compressor,
    EntryMaker,
    Indexer,
    Spans,
    WindowLayer,
    chunks_of,
    find_spans,
    rotate_last,
)
from penstock.models.config import ArchitectureConfig, Fields
from penstock.models.decoder import BeforeLayer
from penstock.models.experts import MIXTRAL_NAMES, ExpertMLP, load_experts
from penstock.models.families.deepseek import SELECTION_BIAS
from penstock.models.families.deepseek_v4_config import (
    HEAVY,
    SPARSE,
    WINDOW,
    DeepseekV4Config,
    huggingface_config,
)
from penstock.models.layers import LayerLoader, RMSNorm
from penstock.models.layout import Layout, StoredRows
from penstock.models.recurrent import HybridDecoder, LayerCache
from penstock.models.rope import rope_table
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart, WeightLoader

# As in the makers' files.
_NAMES = {
    "attn": "self_attn",
    "ffn": "mlp",
    "embed": "embed_tokens",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{
        f"hc_{part}_{each}": f"{part}_hc.{each}"
        for part in ("attn", "ffn")
        for each in ("fn", "base", "scale")
    },
    **{f"hc_head_{each}": f"hc_head.hc_{each}" for each in ("fn", "base", "scale")},
    "attn_sink": "sinks",
    "indexer.compressor": "compressor.indexer",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "self_attn.norm": "self_attn.kv_norm",  # as transformers writes it
    "compressor.norm": "compressor.kv_norm",
    "compressor.indexer.norm": "compressor.indexer.kv_norm",
    "ape": "position_bias",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "q_norm": "q_a_norm",
    "gate.bias": f"{SELECTION_BIAS}",
    **{name: part for name, part in MIXTRAL_NAMES.items() if name != "block_sparse_moe"},
}


@dataclass(frozen=True, slots=True)
class Streams:
    """Weights of residual streams, computed from all streams of a token: of what a block reads, of where its output
    goes, and of each old stream in each new one."""

    weight: Tensor  # float32
    bias: Tensor
    scale: Tensor
    count: int
    rounds: int
    eps: float
    norm_eps: float

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, S, H] → what a block reads, [T, H], and float32 weights of its output, [T, S], and of streams,
        [T, S old, S new]."""
        count, eps = self.count, self.eps
        raw = F.linear(_normed(streams.flatten(1).float(), self.norm_eps), self.weight)
        taken, given, mixing = raw.split([count, count, count * count], dim=1)
        biases = self.bias.split([count, count, count * count])
        mixing = torch.softmax((mixing * self.scale[2] + biases[2]).view(-1, count, count), dim=2) + eps
        mixing = mixing / (mixing.sum(dim=1, keepdim=True) + eps)
        for _ in range(self.rounds - 1):
            mixing = mixing / (mixing.sum(dim=2, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(dim=1, keepdim=True) + eps)
        taken = torch.sigmoid(taken * self.scale[0] + biases[0]) + eps
        given = 2 * torch.sigmoid(given * self.scale[1] + biases[1])
        return _weighted(streams, taken), given, mixing


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The weights with which streams add up at the end."""

    weight: Tensor
    bias: Tensor
    scale: Tensor
    eps: float
    norm_eps: float

    def __call__(self, streams: Tensor) -> Tensor:
        raw = F.linear(_normed(streams.flatten(1).float(), self.norm_eps), self.weight)
        return _weighted(streams, torch.sigmoid(raw * self.scale + self.bias) + self.eps)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(2) * streams).sum(dim=1).to(streams.dtype)


def _mixed(streams: Tensor, made: Tensor, given: Tensor, mixing: Tensor) -> Tensor:
    """Return the streams after a block."""
    kept = mixing.to(streams.dtype).transpose(1, 2) @ streams
    return kept + given.to(made.dtype).unsqueeze(2) * made.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class StreamAttention:
    """Attention with one vector for each token, whose output goes through a small matrix for each group of heads."""

    down: PackedLinear  # narrow queries, and the vector
    query_norm: RMSNorm
    query: PackedLinear
    vector_norm: RMSNorm
    layer: WindowLayer
    indexer: Indexer | None
    groups: tuple[PackedLinear, ...]  # that this rank's heads belong to
    heads_of_groups: tuple[int, ...]
    output: PackedLinear

    def __call__(
        self,
        ops: Ops,
        hidden: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        chunks: list[Chunk],
        mixer: Compressor | None,
        spans: Spans | None,
    ) -> Tensor:
        size, rope = self.layer.size, self.layer.rope
        narrow, vector = ops.linear(hidden, self.down).tensor_split([-size], dim=1)
        narrow = self.query_norm(ops, narrow.contiguous())
        query = ops.linear(narrow, self.query).unflatten(1, (-1, size))
        query = _normed(query.float(), self.query_norm.eps).to(hidden.dtype)
        query = rotate_last(query, rope, batch.positions)
        vector = self.vector_norm(ops, vector.contiguous()).unsqueeze(1)
        cache.kv.write(batch.slots.long(), rotate_last(vector, rope, batch.positions))
        if mixer is not None and spans is not None:
            mixer.write(ops, hidden, cache.states[0], spans, cache.kv, batch)
        indexed = None
        if self.indexer is not None:
            indexed = self.indexer.queries(ops, hidden, narrow, batch.positions)
        made = self.layer.attend(query, cache.kv, batch, chunks, self.indexer, indexed)
        by_group = made.split(self.heads_of_groups, dim=1)
        parts = [ops.linear(part.flatten(1), each) for part, each in zip(by_group, self.groups, strict=True)]
        return ops.add_up(ops.linear(torch.cat(parts, dim=1), self.output))


@dataclass(frozen=True, slots=True)
class StreamExperts:
    """Experts whose scores are the roots of softplus. Layers with a table take experts by the token."""

    inner: ExpertMLP
    bias: Tensor | None
    table: Tensor | None  # int64 [vocabulary, experts of a token]

    def __call__(self, ops: Ops, x: Tensor, token_ids: Tensor) -> Tensor:
        inner = self.inner
        scores = F.softplus(ops.router_logits(x, inner.router)).sqrt()
        if self.table is not None:
            chosen = self.table[token_ids.long()]
        else:
            ranked = scores if self.bias is None else scores + self.bias
            order = torch.sort(ranked, dim=1, descending=True, stable=True).indices
            chosen = order[:, : inner.routing.top_k]
        # The softmax of these are the scores of the chosen experts, scaled to sum to 1.
        taken = scores.gather(1, chosen).log()
        logits = torch.full_like(scores, -torch.inf).scatter_(1, chosen, taken)
        made = ops.moe(x, logits, inner.experts, inner.routing, inner.activation)
        assert inner.shared is not None
        return made.add_(inner.shared(ops, x))


@dataclass(frozen=True, slots=True)
class StreamLayer:
    attention_streams: Streams
    norm: RMSNorm
    attention: StreamAttention
    mixer: Compressor | None
    mlp_streams: Streams
    mlp_norm: RMSNorm
    mlp: StreamExperts


class DeepseekV4(HybridDecoder):
    name = "deepseek_v4"
    huggingface_names: ClassVar[tuple[str, ...]] = ("DeepseekV4ForCausalLM", "deepseek_v4")
    stored_names = _NAMES
    records_graphs = False  # what is attended to depends on the context's length
    config: DeepseekV4Config

    def __init__(self, config: DeepseekV4Config, loader: WeightLoader, max_model_len: int) -> None:
        if loader.ops.kv_dtype == torch.int8:
            raise ConfigError(
                "A KV cache of 8-bit integers cannot hold the entries of this model.",
                hint="Leave out --kv-cache-dtype.",
            )
        config = dataclasses.replace(config, num_mtp_layers=0)  # these layers are not native
        device = loader.ops.device
        self._ropes = {
            kind: rope_table(rope, config.head_dim, max_model_len).to(device)
            for kind, rope in ((WINDOW, config.rope), (SPARSE, config.compressed_rope))
        }
        self._ropes[HEAVY] = self._ropes[SPARSE]
        super().__init__(config, loader, max_model_len)
        # One vector for each token, which all ranks have, and beside it what layers of its kind keep.
        self.num_kv_heads = 1
        self.latent_width = config.vector_size * (2 if config.recurrent is not None else 1)
        self.latent_width += config.index_size if SPARSE in config.kinds else 0
        self.head_dim = self.latent_width
        size, count = config.hidden_size, config.num_streams
        self._stream_head = StreamHead(
            weight=loader.table("model.hc_head.hc_fn", count, count * size),
            bias=loader.vector("model.hc_head.hc_base", count),
            scale=loader.vector("model.hc_head.hc_scale", 1),
            eps=config.stream_eps,
            norm_eps=config.norm_eps,
        )
        self.num_parameters, self.weight_bytes = loader.num_parameters, loader.weight_bytes
        self._token_ids: Tensor | None = None  # of the step

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        return huggingface_config(fields, cls.name)

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        return {}

    @classmethod
    def layout(cls, config: ArchitectureConfig) -> Layout:
        return dataclasses.replace(super().layout(config), has_usual_adapters=True)

    def rope_tables(self) -> list[Tensor]:
        return list({id(each): each for each in self._ropes.values()}.values())

    def embed(self, token_ids: Tensor) -> Tensor:
        self._token_ids = token_ids
        return super().embed(token_ids)

    def load_layer(self, load: LayerLoader) -> StreamLayer:
        kind = self.config.kinds[load.index]
        return StreamLayer(
            attention_streams=self._streams(load, "attn_hc"),
            norm=load.rms_norm("input_layernorm"),
            attention=self._attention(load, kind),
            mixer=None if kind == WINDOW else self._compressor(load, kind),
            mlp_streams=self._streams(load, "ffn_hc"),
            mlp_norm=load.rms_norm("post_attention_layernorm"),
            mlp=self._experts(load),
        )

    def _streams(self, load: LayerLoader, name: str) -> Streams:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.{name}"
        count = config.num_streams
        total = (2 + count) * count
        return Streams(
            weight=weights.table(f"{prefix}.fn", total, count * config.hidden_size),
            bias=weights.vector(f"{prefix}.base", total),
            scale=weights.vector(f"{prefix}.scale", 3),
            count=count,
            rounds=config.stream_rounds,
            eps=config.stream_eps,
            norm_eps=config.norm_eps,
        )

    def _attention(self, load: LayerLoader, kind: str) -> StreamAttention:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.self_attn"
        size, rank, heads = config.vector_size, config.query_rank, load.heads.queries
        width = config.num_heads // config.output_groups
        own = {
            group: range(max(heads.start, group * width), min(heads.stop, (group + 1) * width))
            for group in range(heads.start // width, -(-heads.stop // width))
        }
        inner = config.output_groups * config.output_rank
        sinks = weights.vector(f"{prefix}.sinks", config.num_heads)
        return StreamAttention(
            down=weights.linear(
                [f"{prefix}.q_a_proj", f"{prefix}.kv_proj"], [rank, size], config.hidden_size
            ),
            query_norm=RMSNorm(weights.vector(f"{prefix}.q_a_norm.weight", rank), config.norm_eps),
            query=weights.linear(
                [f"{prefix}.q_b_proj"],
                [config.num_heads * size],
                rank,
                part=LinearPart(rows=[scaled(heads, size)]),
            ),
            vector_norm=RMSNorm(weights.vector(f"{prefix}.kv_norm.weight", size), config.norm_eps),
            layer=WindowLayer(
                size=size,
                scale=config.attention_scale,
                window=config.window,
                rate=config.rates.get(kind),
                sinks=sinks[heads.start : heads.stop],
                rope=self._ropes[kind],
            ),
            indexer=self._indexer(load) if kind == SPARSE else None,
            groups=tuple(
                weights.linear(
                    [f"{prefix}.o_a_proj"],
                    [inner],
                    width * size,
                    part=LinearPart(
                        rows=[scaled(range(group, group + 1), config.output_rank)],
                        columns=scaled(range(part.start - group * width, part.stop - group * width), size),
                    ),
                )
                for group, part in own.items()
            ),
            heads_of_groups=tuple(len(part) for part in own.values()),
            output=weights.linear(
                [f"{prefix}.o_b_proj"],
                [config.hidden_size],
                inner,
                part=LinearPart(columns=scaled(range(min(own), max(own) + 1), config.output_rank)),
            ),
        )

    def _indexer(self, load: LayerLoader) -> Indexer:
        config, weights, prefix = self.config, load.weights, f"{load.prefix}.self_attn.compressor.indexer"
        return Indexer(
            query=weights.linear(
                [f"{prefix}.q_b_proj"], [config.index_heads * config.index_size], config.query_rank
            ),
            weights=weights.linear(
                [f"{prefix}.scorer.weights_proj"], [config.index_heads], config.hidden_size
            ),
            num_heads=config.index_heads,
            top_k=config.index_top_k,
            rope=self._ropes[SPARSE],
        )

    def _compressor(self, load: LayerLoader, kind: str) -> Compressor:
        config, prefix = self.config, f"{load.prefix}.self_attn.compressor"
        rate, times = config.rates[kind], 2 if kind == SPARSE else 1
        widths = {prefix: config.vector_size}
        if kind == SPARSE:
            widths[f"{prefix}.indexer"] = config.index_size
        makers = [
            EntryMaker(
                bias=load.weights.table(f"{name}.position_bias", rate, times * width),
                norm=load.weights.vector(f"{name}.kv_norm.weight", width),
                eps=config.norm_eps,
                rope=self._ropes[kind],
            )
            for name, width in widths.items()
        ]
        return Compressor(
            into=load.weights.linear(
                [f"{name}.{part}_proj" for name in widths for part in ("kv", "gate")],
                [times * width for width in widths.values() for _ in range(2)],
                config.hidden_size,
            ),
            rate=rate,
            entries=makers[0],
            keys=makers[1] if kind == SPARSE else None,
        )

    def _experts(self, load: LayerLoader) -> StreamExperts:
        config, gate = self.config, f"{load.prefix}.mlp.gate"
        assert config.experts is not None
        count, taken = config.experts.count, config.experts.per_token
        bias = table = None
        if load.index in config.hashed_layers:
            table = load.weights.indices(f"{gate}.tid2eid", config.vocab_size, taken, count)
        elif load.weights.has(f"{load.prefix}.mlp.{SELECTION_BIAS}"):
            bias = load.weights.vector(f"{load.prefix}.mlp.{SELECTION_BIAS}", count)
        return StreamExperts(load_experts(load), bias, table)

    def run_layer(self, layer: Any, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        raise NotImplementedError("layers of this family read and write several streams")

    def _run_one_by_one(
        self, residual: Tensor, batch: AttentionBatch, kv: KVStore, before_layer: BeforeLayer = None
    ) -> None:
        assert self._token_ids is not None, "`embed` comes first"
        ops, config, chunks = self._ops, self.config, chunks_of(batch)
        spans = {
            (each.rate, each.num_tokens): find_spans(chunks, each.rate, each.num_tokens, residual.device)
            for layer in self._layers
            if (each := layer.mixer) is not None
        }
        streams = residual.unsqueeze(1).repeat(1, config.num_streams, 1)
        for index, layer in self._in_turn(before_layer):
            taken, given, mixing = layer.attention_streams.read(streams)
            mixer, cache = layer.mixer, self.layer_cache(index, kv, batch)
            own = None if mixer is None else spans[mixer.rate, mixer.num_tokens]
            made = layer.attention(ops, layer.norm(ops, taken), cache, batch, chunks, mixer, own)
            streams = _mixed(streams, made, given, mixing)
            taken, given, mixing = layer.mlp_streams.read(streams)
            made = layer.mlp(ops, layer.mlp_norm(ops, taken), self._token_ids)
            streams = _mixed(streams, made, given, mixing)
        residual.copy_(self._stream_head(streams))
