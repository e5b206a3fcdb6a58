"""The operations of models. Models call nothing else on tensors.

A backend implements the primitive operations. It inherits all others from `ComposedOps` (blocks.py), which composes
them of primitives, and may override any of them by a fused kernel with the same result. A wrapper of a backend
(`DelegatingOps`) overrides the products that it changes. Arguments of several operations are in `operands`.

Shapes: T tokens of this step, R requests of this step, S sampled rows, H query heads, G KV heads, D head size, V
vocabulary. Activations are in the backend's compute type. Row i of an output depends only on row i of the input and
on the cache of its request. The order of summation does not depend on T or R. So an answer does not depend on the
other requests of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.operands import SILU_LIMIT as SILU_LIMIT
from penstock.kernels.operands import SWIGLU_ALPHA as SWIGLU_ALPHA
from penstock.kernels.operands import SWIGLU_LIMIT as SWIGLU_LIMIT
from penstock.kernels.operands import TREE_PLACES as TREE_PLACES
from penstock.kernels.operands import Activation as Activation
from penstock.kernels.operands import AttendsToTrees as AttendsToTrees
from penstock.kernels.operands import AttentionBatch as AttentionBatch
from penstock.kernels.operands import AttentionLayer as AttentionLayer
from penstock.kernels.operands import DenseWeight as DenseWeight
from penstock.kernels.operands import ExpertGroups as ExpertGroups
from penstock.kernels.operands import ExpertWeights as ExpertWeights
from penstock.kernels.operands import Float8Weight as Float8Weight
from penstock.kernels.operands import GroupQuantWeight as GroupQuantWeight
from penstock.kernels.operands import HalvesBlocks as HalvesBlocks
from penstock.kernels.operands import IndexLayer as IndexLayer
from penstock.kernels.operands import KVRegion as KVRegion
from penstock.kernels.operands import KVStore as KVStore
from penstock.kernels.operands import LatentLayer as LatentLayer
from penstock.kernels.operands import MovesTokens as MovesTokens
from penstock.kernels.operands import PackedEmbedding as PackedEmbedding
from penstock.kernels.operands import PackedExperts as PackedExperts
from penstock.kernels.operands import PackedLinear as PackedLinear
from penstock.kernels.operands import Routing as Routing
from penstock.kernels.operands import SamplingBatch as SamplingBatch
from penstock.kernels.operands import WeightData as WeightData
from penstock.kernels.operands import with_common_order as with_common_order
from penstock.kernels.states import ChannelDeltaLayer, ChannelScanLayer, DeltaLayer, ScanLayer


class Ops(Protocol):
    """A backend: every operation that a model calls, on one device and in one type of activations."""

    name: str
    device: torch.device
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype  # of cached keys and values

    @property
    def rounding(self) -> str:
        """Return what the products packed so far round, in a few words for the operator; empty where `dtype` says it
        all."""
        ...

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> PackedLinear:
        """Stack `parts` along their outputs (Q, K and V, say) and lay them out for `linear`. Done once, at load;
        the parts may be freed afterwards."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """[T, in] → [T, out]"""
        ...

    def normed_linear(self, x: Tensor, norm: Tensor, eps: float, weight: PackedLinear) -> Tensor:
        """[T, in] → [T, out]: linear(rms_norm(x, norm, eps), weight)"""
        ...

    def normed_gated(
        self, x: Tensor, norm: Tensor, eps: float, gate_up: PackedLinear, activation: Activation
    ) -> Tensor:
        """[T, in] → [T, width]: gated(linear(rms_norm(x, norm, eps), gate_up), activation)"""
        ...

    def add_linear(self, x: Tensor, weight: PackedLinear, residual: Tensor) -> None:
        """residual += add_up(linear(x, weight)), in place."""
        ...

    def pack_embedding(self, weight: WeightData, tied: PackedLinear | None = None) -> PackedEmbedding:
        """`tied` is the same matrix packed as an output head, which the backend may share."""
        ...

    def embed(self, token_ids: Tensor, table: PackedEmbedding) -> Tensor:
        """int32 [T] → [T, hidden]"""
        ...

    def logits(self, x: Tensor, head: PackedLinear) -> Tensor:
        """[S, hidden] → float32 [S, V]"""
        ...

    def router_logits(self, x: Tensor, router: PackedLinear) -> Tensor:
        """[T, hidden] → float32 [T, E]. Every rank has the whole router."""
        ...

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> PackedExperts:
        """Packs one expert after the other, so that a source need not hold all of them."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x, in place; returns rms_norm(residual)."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2 × width] → activation(first half) × second half"""
        ...

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> KVStore: ...

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Any, batch: AttentionBatch) -> Tensor:
        """[T, (H + 2G) × D] → [T, H × D]: head norms, rope, writing K and V to their slots, then causal attention of
        every token over the blocks of its request. All writes of the step come before any read."""
        ...

    def allocate_latents(self, num_layers: int, num_blocks: int, block_size: int, width: int) -> KVStore:
        """KV memory of a model whose layers are `LatentLayer`s: one vector of `width` = C + R for each token, or
        C + R + I with an indexer."""
        ...

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        layer: LatentLayer,
        cache: Any,
        batch: AttentionBatch,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """[T, H × (N + R)] and [T, C + R] → [T, H × V]: norm and rope, writing latents to their slots, then causal
        attention over the latents of each token's request, or of those that `choose_tokens` chose."""
        ...

    def choose_tokens(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        layer: IndexLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> Tensor | None:
        """[T, heads × I], [T, I] and float32 [T, heads] → int64 [T, top_k]: the positions that each token attends to,
        -1 for none. Writes the keys to their slots. None where no context has more than `top_k` tokens."""
        ...

    def attention(
        self,
        x: Tensor,
        qkv: PackedLinear,
        output: PackedLinear,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, hidden] → [T, hidden]: linear(attend(linear(x, qkv), ...), output), to the bit, in one call."""
        ...

    def mlp(self, x: Tensor, gate_up: PackedLinear, down: PackedLinear, activation: Activation) -> Tensor:
        """[T, hidden] → [T, hidden]: linear(gated(linear(x, gate_up), activation), down), to the bit, in one call."""
        ...

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """[T, hidden] → [T, hidden]: the weighted sum of the outputs of each token's experts. `logits` are the
        router's, float32 [T, E]."""
        ...

    def attention_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        qkv: PackedLinear,
        output: PackedLinear,
        layer: AttentionLayer,
        cache: Any,
        batch: AttentionBatch,
    ) -> None:
        """residual += attention(rms_norm(residual, norm, eps), ...), in place."""
        ...

    def mlp_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: PackedLinear,
        down: PackedLinear,
        activation: Activation,
    ) -> None:
        """residual += mlp(rms_norm(residual, norm, eps), ...), in place."""
        ...

    def moe_block(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        router: PackedLinear,
        experts: PackedExperts,
        routing: Routing,
        activation: Activation,
    ) -> None:
        """normed = rms_norm(residual, norm, eps); residual += moe(normed, router_logits(normed, router), ...),
        in place."""
        ...

    def opened(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, C] and [T, C] or [T, 1] → [T, C]: `x` times the sigmoid of the gate."""
        ...

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that hold parts of a layer; `x` itself where there is one. For layers
        made of `linear` and `attend`, whose results are this rank's part."""
        ...

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        history: Tensor,
        batch: AttentionBatch,
        *,
        silu: bool,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """[T, C] → [T, C]: each channel's weighted sum of its newest K inputs, then SiLU if asked for. `history`,
        [slots, C, K - 1], has the inputs before this step, and gets those of this step. `before` and `after`, [T, C],
        are factors of inputs and outputs."""
        ...

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        group_width: int,
        *,
        gates_first: bool,
    ) -> Tensor:
        """float32 [T, C] → [T, C]: `x` times SiLU of the gate, and the RMS norm of groups of channels, if there is a
        weight."""
        ...

    def selective_scan(
        self,
        x: Tensor,
        step: Tensor,
        read: Tensor,
        write: Tensor,
        layer: ScanLayer,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, H, P] → float32 [T, H, P]: the scan of Mamba-2, which updates `state`, [slots, H, P, N]."""
        ...

    def channel_scan(
        self,
        x: Tensor,
        step: Tensor,
        read: Tensor,
        write: Tensor,
        layer: ChannelScanLayer,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, C] → float32 [T, C]: the scan of Mamba 1, which updates `state`, [slots, C, N]."""
        ...

    def gated_delta(
        self,
        mixed: Tensor,
        rate: Tensor,
        step: Tensor,
        layer: DeltaLayer,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, 2 × key heads × K + H × V] → float32 [T, H, V]: the gated delta rule, which updates `state`,
        [slots, H, K, V]."""
        ...

    def channel_delta(
        self,
        mixed: Tensor,
        rate: Tensor,
        step: Tensor,
        layer: ChannelDeltaLayer,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """[T, 2 × H × K + H × V] → float32 [T, H, V]: the delta rule of Kimi Linear, which updates `state`,
        [slots, H, K, V]."""
        ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """float32 [S, V] → int64 [S]. Order: temperature, top-k, top-p, min-p. A row with a NaN gives -1."""
        ...


@runtime_checkable
class FindsArgmax(Protocol):
    """Backends that can return the argmax of logits without materialising the logits."""

    def argmax(self, x: Tensor, head: PackedLinear) -> Tensor:
        """[S, hidden] → int64 [S]: the tokens that `sample` returns for logits(x, head) and a temperature of 0."""
        ...


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """The parts of a decoder layer whose halves are `attention_block` and `mlp_block`."""

    attention_norm: Tensor
    qkv: PackedLinear
    attention: AttentionLayer
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


RunLayers = Callable[[Tensor, AttentionBatch], None]


@runtime_checkable
class JoinsLayers(Protocol):
    """Backends that run all decoder layers in one call, because the overhead of single calls is noticeable."""

    def join_layers(
        self, layers: Sequence[GatedLayer], eps: float, activation: Activation, kv: KVStore
    ) -> RunLayers | None:
        """Return a function that applies the blocks of all layers to a residual in one call, with the same bits as
        one block after the other. None if the weights or the KV store are not the backend's own."""
        ...


Attend = Callable[[AttentionBatch], None]


@runtime_checkable
class CutsAtAttention(Protocol):
    """Backends on a GPU, where everything but attention depends on the number of tokens only and can be recorded."""

    dtype: torch.dtype

    def cut_at_attention(self, cut: Callable[[Attend], None], queries: Tensor, out: Tensor) -> Ops:
        """Return the same operations, except that attention is handed to `cut` in the place where it belongs. To be
        called there for a step of as many tokens or fewer. `queries` and `out`, [most tokens, H, D], are where it
        reads and writes, in all layers."""
        ...
