"""The operations a model is made of. A backend implements all of them; models call nothing else on tensors.

Shapes: T tokens of this step, R requests of this step, S sampled rows, H query heads, G KV heads, D head size,
V vocabulary. Activations are in the backend's compute type; row i of an output depends on row i of the input
(and on its own request's cache) alone, summed in an order that does not depend on T or R. That is what makes an
answer independent of who shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A plain matrix [out, in]."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


@dataclass(frozen=True, slots=True)
class GroupQuantWeight:
    """Integer codes with a scale, and maybe an offset, for each `group` neighbours of a row.

    weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

    Every GGUF block format and round-to-nearest int8 decode to this form without loss. `bits` is 4 when all codes
    lie in 0..15, else 8.
    """

    codes: Tensor  # int8 (bits 8) or uint8 (bits 4, one code per byte) [out, in]
    scales: Tensor  # float32 [out, in / group]
    offsets: Tensor | None  # float32 [out, in / group]
    group: int  # 16 or 32; `in` is a multiple of it
    bits: Literal[4, 8]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        grouped = self.codes.to(torch.float32).view(out, width // self.group, self.group)
        values = grouped * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            values = values + self.offsets.unsqueeze(-1)
        return values.view(out, width).to(dtype)


WeightData = DenseWeight | GroupQuantWeight


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


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What distinguishes one attention layer from another. Made once per layer at load."""

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


class KVStore(Protocol):
    """KV tensors of all layers, in whatever layout the backend likes. `layer(i)` is handed back to `attend`."""

    num_blocks: int
    block_size: int

    def layer(self, index: int) -> Any: ...


class Ops(Protocol):
    name: str
    device: torch.device
    dtype: torch.dtype  # of activations

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> PackedLinear:
        """Stack `parts` along their outputs (Q, K and V, say) and lay them out for `linear`. Done once, at load;
        the parts may be freed afterwards."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """[T, in] → [T, out]"""
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
        """[T, (H + 2G) × D] → [T, H × D]: head norms, rope, write K and V to their slots, then causal attention of
        every token over its request's blocks. All writes of the step come before any read."""
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

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """float32 [S, V] → int64 [S]. Order: temperature, top-k, top-p, min-p. A row with a NaN gives -1."""
        ...
