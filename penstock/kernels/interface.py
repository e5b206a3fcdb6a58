"""The operations a model is made of. Models call nothing else on tensors.

A backend implements the primitive operations and inherits the rest from `ComposedOps` (blocks.py), which puts them
together from primitives; it may override any of those by a fused kernel with the same result. A wrapper of a backend
(`DelegatingOps`) overrides the products that it changes.

Shapes: T tokens of this step, R requests of this step, S sampled rows, H query heads, G KV heads, D head size,
V vocabulary. Activations are in the backend's compute type; row i of an output depends on row i of the input
(and on its own request's cache) alone, summed in an order that does not depend on T or R. So an answer does not
depend on the other requests of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.states import ChannelScanLayer, DeltaLayer, ScanLayer, StateBatch
from penstock.kernels.weights import DenseWeight as DenseWeight
from penstock.kernels.weights import Float8Weight as Float8Weight
from penstock.kernels.weights import GroupQuantWeight as GroupQuantWeight
from penstock.kernels.weights import WeightData as WeightData
from penstock.kernels.weights import with_common_order as with_common_order

# "clamped_swiglu" is gpt-oss's: gate × sigmoid(1.702 × gate) × (up + 1), both clamped at 7.
# "relu" squares positive numbers where gate and up are one matrix, as in experts without a gate.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class PackedLinear(Protocol):
    """A backend's own form of one or several stacked matrices with an optional bias. Opaque to models."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class PackedEmbedding(Protocol):
    """A backend's own form of an embedding table. Opaque to models."""

    @property
    def num_bytes(self) -> int: ...


class PackedExperts(Protocol):
    """A backend's own form of the gated MLPs that a router chooses from. Opaque to models."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: down(activation(gate x) × up x). Biases are float32, one number for each output."""

    gate: WeightData
    up: WeightData
    down: WeightData
    gate_up_bias: Tensor | None = None  # of gate, then of up
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in groups of neighbours: a token chooses among the experts of its `kept` best groups only. A group is
    as good as the sum of its `ranked_by` best experts."""

    count: int
    kept: int
    ranked_by: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its experts: the `top_k` with the highest scores, which are also their weights. Among
    equals the lower index comes first.

    Scores are the softmax or the sigmoid of the router's logits. With "sparsemixer" (Phi's), the weight of each
    chosen expert is its softmax over the logits close to its own, without the experts chosen before."""

    num_experts: int
    top_k: int
    normalizes: bool  # whether the chosen weights are scaled to sum to 1
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    selection_bias: Tensor | None = (
        None  # float32 [E], added to scores where experts are chosen, not to weights
    )
    groups: ExpertGroups | None = None
    scale: float = 1.0  # of the weights
    least_sum: float = 1e-20  # that weights are divided by, where they are normalized
    weighs_input: bool = False  # whether an expert's input is multiplied by its weight, instead of its output
    jitter: float = (
        0.0  # of sparsemixer: how far logits may be apart, relative to the larger one, to be close
    )

    @property
    def is_plain(self) -> bool:
        """Whether this is the softmax and nothing more."""
        return self == Routing(self.num_experts, self.top_k, self.normalizes)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The settings of an attention layer. Made once per layer at load."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Tensor  # float32 [max positions, D]: first half cosines, second half sines, of rotate-half pairs
    window: int | None = None  # a token sees itself and the window - 1 before it
    softcap: float | None = None
    q_norm: Tensor | None = None  # [D], RMS norm of each head before rope
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    sinks: Tensor | None = None  # float32 [H]: a logit of each head that takes weight, and has no value
    chunk: int | None = None  # a token sees the tokens of its chunk: positions n × chunk to (n + 1) × chunk


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The settings and the absorbed weights of an attention layer over latents (MLA). C is the size of a latent, R of
    the rotated part of a head, N of the rest of a head's query and V of its value."""

    num_heads: int
    latent_dim: int  # C
    rope_dim: int  # R
    scale: float
    rope: Tensor  # float32 [max positions, R], as of `AttentionLayer`
    norm: Tensor  # float32 [C], RMS norm of latents
    norm_eps: float
    key_up: Tensor  # [H, N, C] in the compute type: brings queries into the space of latents
    value_up: Tensor  # [H, C, V]: brings weighted latents into the space of values


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where this step's tokens sit. Tensors live on the backend's device; the plain integers are host copies."""

    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]: block id * block size + offset, where the token's K and V go
    query_starts: Tensor  # int32 [R + 1], rows of each request in T
    context_lens: Tensor  # int32 [R], tokens in the cache once this step's are written
    block_tables: Tensor  # int32 [R, max blocks], rows padded with anything
    num_requests: int
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # so many of the first requests have exactly one token in this step
    halves_blocks: bool = True  # the last tokens of a request may begin in the middle of a block
    lengths: tuple[Tensor, Tensor] | None = None  # `query_starts` and `context_lens` once more, on the host
    states: StateBatch | None = None  # of models whose layers have a fixed state
    # Of models whose layers have windows: the batch without what lies behind a window, for each part of the layers
    # with a window; and for each layer its part, or None for layers that see everything.
    parts: tuple[AttentionBatch, ...] = ()
    part_of_layer: tuple[int | None, ...] = ()
    part: int | None = None  # which of the parts this batch is

    def of_layer(self, index: int) -> AttentionBatch:
        """Return the batch for a layer of the KV store."""
        part = self.part_of_layer[index] if self.part_of_layer else None
        return self if part is None else self.parts[part]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per-row sampling settings, one entry for each row of logits."""

    temperature: Tensor  # float32 [S]; 0 is greedy
    top_k: Tensor  # int32 [S]; 0 is off
    top_p: Tensor  # float32 [S]; 1 is off
    min_p: Tensor  # float32 [S]; 0 is off
    seed: Tensor  # int64 [S]
    position: Tensor  # int64 [S]: index of the token in the answer; the random draw is a function of (seed, position)
    all_greedy: bool
    whole_vocabulary: bool = False  # no row uses top-k, top-p or min-p

    def rows(self, part: slice) -> SamplingBatch:
        columns = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        return replace(self, **{name: getattr(self, name)[part] for name in columns})


@dataclass(frozen=True, slots=True)
class KVRegion:
    """A piece of memory with a part of every block. The part of block i begins at address + i × block_bytes."""

    address: int
    block_bytes: int
    num_blocks: int


class KVStore(Protocol):
    """KV tensors of all layers, in the backend's own layout. `layer(i)` is an argument of `attend`.

    Blocks can be copied to slots of host memory and back, bit for bit. Copies and steps take effect in the order of
    the calls; a copy need not be finished when its call returns."""

    num_blocks: int
    block_size: int

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all layers together."""
        ...

    def layer(self, index: int) -> Any: ...

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        """Where the blocks of a layer lie, for transfers to another process. Stores whose regions have the same sizes
        can exchange blocks."""
        ...

    def reserve_host(self, num_slots: int) -> None:
        """Take host memory for so many blocks; once, before the first copy."""
        ...

    def copy_to_host(self, block_id: int, slot: int) -> None: ...

    def copy_from_host(self, slot: int, block_id: int) -> None: ...

    def read_host(self, slot: int) -> bytes:
        """Return the contents of a slot of host memory, into which no copy is under way."""
        ...

    def write_block(self, block_id: int, contents: bytes) -> None:
        """Overwrite a block, in turn with copies and steps, with what `read_host` returned for another block."""
        ...


@runtime_checkable
class HalvesBlocks(Protocol):
    """KV stores in which two requests can share a block: the last tokens of a request may begin in the middle of the
    block. The slot of the last token says so."""

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        """Copy the half of a block that begins at slot `offset` to the first half of a block. Copies and steps take
        effect in the order of the calls."""
        ...


class Ops(Protocol):
    """A backend: every operation that a model calls, on one device and in one type of activations."""

    name: str
    device: torch.device
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype  # of cached keys and values

    @property
    def rounding(self) -> str:
        """What the products packed so far round, in a few words for the operator; empty where `dtype` says it all."""
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
        """KV memory of a model whose layers are `LatentLayer`s: one vector of `width` = C + R for each token."""
        ...

    def attend_latent(
        self, query: Tensor, latent: Tensor, layer: LatentLayer, cache: Any, batch: AttentionBatch
    ) -> Tensor:
        """[T, H × (N + R)] and [T, C + R] → [T, H × V]: norm and rope, writing latents to their slots, then causal
        attention over the latents of each token's request."""
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
        """[T, hidden] → [T, hidden]: the weighted sum of what each token's experts make of it. `logits` are the
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

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks that hold parts of a layer; `x` itself where there is one. For layers made of
        `linear` and `attend`, whose results are this rank's part."""
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
        """float32 [T, C] → [T, C]: `x` times SiLU of the gate, and the RMS norm of groups of numbers, if there is a
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
    """Backends that run all decoder layers in one call, because the calls themselves take a share of the time."""

    def join_layers(
        self, layers: Sequence[GatedLayer], eps: float, activation: Activation, kv: KVStore
    ) -> RunLayers | None:
        """A function that applies the blocks of all layers to a residual in one call, with the same bits as one block
        after the other. None if the weights or the KV store are not the backend's own."""
        ...


Attend = Callable[[AttentionBatch], None]


@runtime_checkable
class CutsAtAttention(Protocol):
    """Backends on a GPU, where everything but attention depends on the number of tokens only and can be recorded."""

    dtype: torch.dtype

    def cut_at_attention(self, cut: Callable[[Attend], None], queries: Tensor, out: Tensor) -> Ops:
        """The same operations, except that attention is handed to `cut` in the place where it belongs. To be called
        there for a step of as many tokens or fewer. `queries` and `out`, [most tokens, H, D], are where it reads and
        writes, in all layers."""
        ...
