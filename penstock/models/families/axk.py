"""A.X K1 and K2 of SK Telecom: DeepSeek V3 with a norm behind the experts, and DeepSeek V3.2 with gates: on what
attention makes, and on what the norms before attention and experts make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.models.config import ArchitectureConfig, Fields, extended
from penstock.models.decoder import Decoder
from penstock.models.experts import ExpertMLP, add_mlp
from penstock.models.families.deepseek import DeepseekV3, LatentAttention, LatentBlock, load_latent_attention
from penstock.models.families.deepseek_sparse import DeepseekV32, Indexer, load_indexer
from penstock.models.layers import GatedMLP, LayerLoader, Norm, RMSNorm
from penstock.models.layout import StoredRows, by_head
from penstock.models.rope import pair_order
from penstock.models.sharding import scaled
from penstock.models.weights import LinearPart


@dataclass(frozen=True, slots=True)
class NormedExperts(LatentBlock):
    added_norm: RMSNorm  # of what the experts make


class AxK1(DeepseekV3):
    name = "axk1"
    huggingface_names = ("AXK1ForCausalLM", "axk1")
    has_selection_bias = False  # in the published folders

    def load_layer(self, load: LayerLoader) -> LatentBlock:
        plain = super().load_layer(load)
        if isinstance(plain.mlp, GatedMLP):
            return plain
        parts = plain.attention_norm, plain.attention, plain.mlp_norm, plain.mlp
        return NormedExperts(*parts, added_norm=load.rms_norm("post_mlp_layernorm"))

    def run_layer(
        self, layer: LatentBlock, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch
    ) -> None:
        if not isinstance(layer, NormedExperts):
            super().run_layer(layer, residual, ops, cache, batch)
            return
        layer.attention.add_to(ops, residual, layer.attention_norm, cache, batch)
        made = layer.mlp(ops, layer.mlp_norm(ops, residual))
        residual.add_(layer.added_norm(ops, made))


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """A norm whose output is multiplied by the sigmoid of a narrow MLP of it."""

    norm: RMSNorm
    down: PackedLinear
    up: PackedLinear

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        normed = self.norm(ops, x)
        gate = ops.linear(F.silu(ops.linear(normed, self.down)), self.up)
        return (normed * torch.sigmoid(gate.float())).to(x.dtype)


@dataclass(frozen=True, slots=True)
class GatedBlock:
    attention_norm: GatedNorm
    attention: LatentAttention  # without the product that makes queries
    query_gate: PackedLinear  # makes queries and gates of narrow queries, with and without their norm
    indexer: Indexer | None  # None: contexts are so short that all tokens are attended to
    mlp_norm: Norm
    mlp: GatedMLP | ExpertMLP

    def attend(self, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        """Add the output of attention for the normed residual to the residual, in place."""
        attention, norm = self.attention, self.attention.query_norm
        assert norm is not None, "narrow queries are normed"
        hidden = self.attention_norm(ops, residual)
        raw, latent = attention.parts(ops.linear(hidden, attention.down))
        narrow = norm(ops, raw)
        chosen = self.indexer(ops, hidden, narrow, cache, batch) if self.indexer is not None else None
        both = ops.linear(torch.cat([narrow, raw], dim=1), self.query_gate)
        by_query = both.view(len(hidden), attention.layer.num_heads, -1)
        value_dim = attention.layer.value_up.shape[-1]
        query, gate = by_query[..., :-value_dim].flatten(1), by_query[..., -value_dim:].flatten(1)
        made = ops.attend_latent(query, latent, attention.layer, cache, batch, chosen)
        ops.add_linear(ops.opened(made, gate), attention.output, residual)


class AxK2(DeepseekV32):
    name = "axk2"
    huggingface_names = ("AXK2ForCausalLM", "axk2")
    gguf_names = ()

    @classmethod
    def config_from_huggingface(cls, fields: Fields) -> ArchitectureConfig:
        config = super().config_from_huggingface(fields)
        return extended(config, AxK2Config, gate_rank=fields.integer("gated_norm_rank", 16))

    @classmethod
    def rows(cls, config: ArchitectureConfig, *, interleaved: bool) -> dict[str, StoredRows]:
        usual, latent = super().rows(config, interleaved=interleaved), config.latent
        assert latent is not None
        order = pair_order(latent.rope_dim, latent.rope_dim, interleaved=latent.interleaved)
        query = torch.cat([torch.arange(latent.plain_dim), latent.plain_dim + order])
        head = torch.cat([query, len(query) + torch.arange(latent.value_dim)])
        name, size = "self_attn.q_b_proj", config.num_heads * len(head)
        return {**usual, name: StoredRows(name, size, by_head(torch.arange(size), head))}

    def load_layer(self, load: LayerLoader) -> Any:
        latent = self.config.latent
        assert latent is not None
        assert latent.query_rank is not None
        width = latent.plain_dim + latent.rope_dim + latent.value_dim
        return GatedBlock(
            attention_norm=self._gated_norm(load, "input_layernorm"),
            attention=load_latent_attention(load, has_query=False),
            query_gate=load.weights.linear(
                [f"{load.prefix}.self_attn.q_b_proj"],
                [self.config.num_heads * width],
                2 * latent.query_rank,
                part=LinearPart(rows=[scaled(load.heads.queries, width)]),
            ),
            indexer=load_indexer(load) if self.is_sparse else None,
            mlp_norm=load.rms_norm("post_attention_layernorm")
            if self.config.is_dense(load.index)
            else self._gated_norm(load, "post_attention_layernorm"),
            mlp=self.load_mlp(load),
        )

    def _gated_norm(self, load: LayerLoader, name: str) -> GatedNorm:
        assert isinstance(self.config, AxK2Config)
        prefix, rank, hidden = f"{load.prefix}.{name}", self.config.gate_rank, self.config.hidden_size
        return GatedNorm(
            load.rms_norm(f"{name}.norm"),
            load.weights.linear([f"{prefix}.W_down"], [rank], hidden),
            load.weights.linear([f"{prefix}.W_up"], [hidden], rank),
        )

    _run_one_by_one = Decoder._run_one_by_one  # layers share nothing that was chosen

    def run_layer(self, layer: Any, residual: Tensor, ops: Ops, cache: Any, batch: AttentionBatch) -> None:
        assert isinstance(layer, GatedBlock)
        layer.attend(residual, ops, cache, batch)
        if isinstance(layer.mlp_norm, RMSNorm):
            add_mlp(ops, residual, layer.mlp_norm, layer.mlp)
        else:
            residual.add_(layer.mlp(ops, layer.mlp_norm(ops, residual)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AxK2Config(ArchitectureConfig):
    gate_rank: int  # of the narrow MLPs of gated norms
