"""`TritonOps`: the interface on CUDA.

Matrix products of many rows are cuBLAS's; those of a few rows, and everything between products, are Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.adapted import AdaptedProduct
from penstock.kernels.chunks import within_chunks
from penstock.kernels.interface import (
    Activation,
    Attend,
    AttentionBatch,
    AttentionLayer,
    ExpertWeights,
    LatentLayer,
    Routing,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.latent import LatentKVStore, attend_entries, choose_tokens, values_of
from penstock.kernels.reference import TorchEmbedding, TorchLinear, TorchOps
from penstock.kernels.tensor_kv import TorchKVPart
from penstock.kernels.triton import packing, products
from penstock.kernels.triton.adapted import BatchedAdapters
from penstock.kernels.triton.channel_delta import channel_delta
from penstock.kernels.triton.channel_scan import channel_scan
from penstock.kernels.triton.decode_attention import decode_attention
from penstock.kernels.triton.device import empty_rows
from penstock.kernels.triton.elementwise import gated, opened, rms_norm
from penstock.kernels.triton.expert_rows import normed_router, routes_rows
from penstock.kernels.triton.experts import StackedExperts, add_experts, pack_experts
from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
from penstock.kernels.triton.int4 import Int4Linear
from penstock.kernels.triton.int8 import Int8Linear
from penstock.kernels.triton.latent_attention import latent_attention, latent_values, write_latents
from penstock.kernels.triton.limited_sampling import redraw_limited_rows
from penstock.kernels.triton.packing import Packed, PackedRows
from penstock.kernels.triton.paged_kv import PagedKV, PagedLayer
from penstock.kernels.triton.prefill_attention import prefill_attention
from penstock.kernels.triton.recurrence import gated_norm, short_conv
from penstock.kernels.triton.rope_cache import rope_and_cache
from penstock.kernels.triton.sampling import chunk_statistics, draw_from_whole_vocabulary
from penstock.kernels.triton.segments import gated_delta, selective_scan


def attention(
    q: Tensor,
    cache: PagedLayer,
    layer: AttentionLayer,
    batch: AttentionBatch,
    flashinfer: FlashInferAttention | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Paged attention. Keys and values are read in place through the block table. Requests with one query token are a
    matter of memory speed, the others of arithmetic, so each has its own kernel. [T, H, D] → [T, H × D], in `out` if
    that is given. The first `batch.num_decodes` requests have one query token each. `flashinfer` computes the prompts
    that it accepts."""
    if out is None:
        out = empty_rows(q.shape[0], q.shape[1] * q.shape[2], q.dtype, q.device).view(q.shape)
    batch = within_chunks(batch, layer.chunk, cache.block_size)
    if batch.num_decodes:
        decode_attention(q, cache, out, layer, batch)
    if batch.num_requests > batch.num_decodes and not (
        flashinfer is not None and flashinfer.attends(q, cache, out, layer, batch)
    ):
        prefill_attention(q, cache, out, layer, batch)
    return out.view(q.shape[0], -1)


class TritonOps:
    name = "triton"
    rounding = ""
    attends_to_trees = True
    short_conv = staticmethod(short_conv)
    selective_scan = staticmethod(selective_scan)
    channel_scan = staticmethod(channel_scan)
    gated_delta = staticmethod(gated_delta)
    channel_delta = staticmethod(channel_delta)
    choose_tokens = staticmethod(choose_tokens)
    gated_norm = staticmethod(gated_norm)
    opened = staticmethod(opened)

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        *,
        flashinfer: FlashInferAttention | None = None,
    ) -> None:
        """`flashinfer` computes attention over the prompts that it accepts."""
        self.flashinfer = flashinfer
        self.device = device
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self._torch = TorchOps(device, dtype)

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> Packed:
        return packing.pack(parts, bias, self.dtype, self.device)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return products.linear(x, weight)

    def normed_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Any) -> Tensor:
        return products.normed_linear(x, norm, eps, weight)

    def normed_gated(
        self, x: Tensor, norm: Tensor, eps: float, gate_up: Any, activation: Activation
    ) -> Tensor:
        if activation in products.UNFUSED_GATES:
            return self.gated(products.normed_linear(x, norm, eps, gate_up), activation)
        return products.normed_gated(x, norm, eps, gate_up, activation)

    def add_linear(self, x: Tensor, weight: Any, residual: Tensor) -> None:
        products.add_linear(x, weight, residual)

    def pack_embedding(self, weight: WeightData, tied: Any = None) -> TorchEmbedding | PackedRows:
        table = self.pack_linear([weight]) if tied is None else tied
        if isinstance(table, Int4Linear | Int8Linear):
            return PackedRows(table, shared=tied is not None)
        if isinstance(table, TorchLinear):
            return TorchEmbedding(table.weight, shared=tied is not None)
        return self._torch.pack_embedding(weight)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        if isinstance(table, PackedRows):
            return table.embed(token_ids, self.dtype)
        return F.embedding(token_ids, table.weight)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        return products.linear(x, head, torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, residual)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> PagedKV:
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        return PagedKV(shape, self.kv_dtype, self.device)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: PagedLayer, batch: AttentionBatch) -> Tensor:
        queries = rope_and_cache(qkv, layer, cache, batch.positions, batch.slots)
        return attention(queries, cache, layer, batch, self.flashinfer)

    def allocate_latents(
        self, num_layers: int, num_blocks: int, block_size: int, width: int
    ) -> LatentKVStore:
        # One block more takes the writes of padding rows.
        shape = (num_layers, num_blocks, block_size, width)
        return LatentKVStore(shape, self.kv_dtype, self.device, spare_blocks=1)

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        layer: LatentLayer,
        cache: TorchKVPart,
        batch: AttentionBatch,
        chosen: Tensor | None = None,
    ) -> Tensor:
        queries = write_latents(query, latent, layer, cache, batch)
        if chosen is not None:
            return values_of(attend_entries(queries, layer, cache, batch, chosen), layer)
        out = torch.empty(*queries.shape[:2], layer.latent_dim, dtype=query.dtype, device=query.device)
        latent_attention(queries, cache, out, layer, batch)
        return latent_values(out, layer)

    def attention(
        self,
        x: Tensor,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> Tensor:
        return self.linear(self.attend(self.linear(x, qkv), layer, cache, batch), output)

    def mlp(self, x: Tensor, gate_up: Any, down: Any, activation: Activation) -> Tensor:
        return self.linear(self.gated(self.linear(x, gate_up), activation), down)

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: Any,
        output: Any,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        projected = products.normed_linear(residual, norm, eps, qkv)
        products.add_linear(self.attend(projected, layer, cache, batch), output, residual)

    def mlp_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: Any,
        down: Any,
        activation: Activation,
    ) -> None:
        if activation in products.UNFUSED_GATES:
            hidden = self.normed_gated(residual, norm, eps, gate_up, activation)
            products.add_linear(hidden, down, residual)
        else:
            products.add_mlp(residual, norm, eps, gate_up, down, activation)

    def router_logits(self, x: Tensor, router: Any) -> Tensor:
        return self.logits(x, router)

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> StackedExperts:
        return pack_experts(experts, self.dtype, self.device)

    def moe(
        self, x: Tensor, logits: Tensor, experts: Any, routing: Routing, activation: Activation
    ) -> Tensor:
        total = torch.zeros_like(x)
        add_experts(x, logits, experts, routing, activation, total)
        return total

    def moe_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: Any,
        experts: Any,
        routing: Routing,
        activation: Activation,
    ) -> None:
        if routes_rows(residual, router, routing):
            normed, logits = normed_router(residual, norm, eps, router)
        else:
            normed = rms_norm(residual, norm, eps)
            logits = self.logits(normed, router)
        add_experts(normed, logits, experts, routing, activation, residual)

    def add_up(self, x: Tensor) -> Tensor:
        return x

    def batched_adapters(self, adapted: Sequence[AdaptedProduct], num_slots: int) -> BatchedAdapters:
        return BatchedAdapters(adapted, num_slots, self.dtype, self.device)

    def cut_at_attention(self, cut: Callable[[Attend], None], queries: Tensor, out: Tensor) -> TritonOps:
        return _CutOps(self, cut, queries, out)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        statistics = chunk_statistics(logits, batch.temperature)
        token_ids = draw_from_whole_vocabulary(logits, batch, statistics)
        if not (batch.all_greedy or batch.whole_vocabulary):
            redraw_limited_rows(logits, batch, statistics, token_ids)
        return token_ids


class _CutOps(TritonOps):
    """Implements `CutsAtAttention`."""

    def __init__(self, ops: TritonOps, cut: Callable[[Attend], None], queries: Tensor, out: Tensor) -> None:
        super().__init__(ops.device, ops.dtype, ops.kv_dtype, flashinfer=ops.flashinfer)
        self._cut = cut
        self._queries = queries
        self._out = out

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: PagedLayer, batch: AttentionBatch) -> Tensor:
        tokens = qkv.shape[0]
        queries, out = self._queries[:tokens], self._out[:tokens]
        rope_and_cache(qkv, layer, cache, batch.positions, batch.slots, queries)
        part = batch.part

        def attend(step: AttentionBatch) -> None:
            step = step if part is None else step.parts[part]
            count = step.positions.shape[0]
            attention(queries[:count], cache, layer, step, self.flashinfer, out[:count])

        self._cut(attend)
        return out.view(tokens, -1)

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        layer: LatentLayer,
        cache: TorchKVPart,
        batch: AttentionBatch,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """The buffers of queries and outputs, [most tokens, H, C + R], are wide enough for both."""
        assert chosen is None, "models that choose tokens are not recorded"
        tokens, heads, size = latent.shape[0], layer.num_heads, layer.latent_dim
        queries = write_latents(query, latent, layer, cache, batch, self._queries[:tokens])
        out = self._out[:tokens].flatten()[: tokens * heads * size].view(tokens, heads, size)

        def attend(step: AttentionBatch) -> None:
            count = step.positions.shape[0]
            latent_attention(queries[:count], cache, out[:count], layer, step)

        self._cut(attend)
        return latent_values(out, layer)
