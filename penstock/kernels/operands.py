"""The nouns of the operations in `interface`: weight matrices as checkpoints store them, packed weights,
descriptions of layers, batches, and KV stores.

Shapes are named as in `interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.kernels.states import StateBatch


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A plain matrix [out, in]."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class GroupQuantWeight:
    """Integer codes with a scale, and maybe an offset, for each `group` neighbours of a row.

    weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

    Every GGUF block format, AWQ, GPTQ and round-to-nearest int8 decode to this form without loss. `bits` is 4 when
    all codes lie in 0..15, else 8.

    With `input_order` the columns are stored in another order: column j belongs to input input_order[j]. (GPTQ
    checkpoints made in the order of activations group inputs that are no neighbours.)
    """

    codes: Tensor  # int8 (bits 8) or uint8 (bits 4, one code per byte) [out, in]
    scales: Tensor  # float32 [out, in / group]
    offsets: Tensor | None  # float32 [out, in / group]
    group: int  # 16, or a multiple of 32; `in` is a multiple of it
    bits: Literal[4, 8]
    input_order: Tensor | None = None  # int64 [in], a permutation
    # Made to be multiplied with inputs that are rounded to int8 too, which a backend may then do. Codes are int8, and
    # all groups of a row have the same scale.
    rounds_inputs: bool = False
    # Codes are twice the numbers of float4 (e2m1): 0, ±1, ±2, ±3, ±4, ±6, ±8, ±12. A backend may keep them in four
    # bits.
    is_float4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the codes, two to a byte where they have four bits, and of scales and offsets in 16
        bits."""
        tables = self.scales.numel() + (0 if self.offsets is None else self.offsets.numel())
        return self.codes.numel() * (4 if self.is_float4 else self.bits) // 8 + 2 * tables

    def regrouped(self, group: int) -> GroupQuantWeight:
        """Return the same weights in smaller groups, several of which share a scale."""
        times = self.group // group
        scales, offsets = (
            None if table is None else table.repeat_interleave(times, dim=1)
            for table in (self.scales, self.offsets)
        )
        assert scales is not None
        return replace(self, scales=scales, offsets=offsets, group=group)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        grouped = self.codes.to(torch.float32).view(out, width // self.group, self.group)
        values = grouped * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            values = values + self.offsets.unsqueeze(-1)
        values = values.view(out, width)
        if self.input_order is not None:
            values = torch.empty_like(values).index_copy_(1, self.input_order, values)
        return values.to(dtype)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """weight[n, k] = values[n, k] * scales[n], or * scales[n, k // group] where `group` is given."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out], or [out, in / group]
    group: int | None = None  # `in` is a multiple of it

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        out, width = self.shape
        grouped = self.values.to(torch.float32).view(out, -1, self.group or width)
        return (grouped * self.scales.view(out, -1, 1)).view(out, width).to(dtype)


WeightData = DenseWeight | GroupQuantWeight | Float8Weight


def with_common_order(parts: Sequence[WeightData]) -> tuple[list[WeightData], Tensor | None]:
    """For backends that reorder the input of a stack once: the parts in one order of inputs, and that order. None is
    the inputs' own; parts that disagree are brought to it as dense matrices."""
    orders = [part.input_order if isinstance(part, GroupQuantWeight) else None for part in parts]
    first = orders[0]
    if first is not None and all(order is not None and torch.equal(order, first) for order in orders):
        return [
            replace(part, input_order=None) for part in parts if isinstance(part, GroupQuantWeight)
        ], first
    return [
        part if order is None or isinstance(part, DenseWeight) else DenseWeight(part.dequantize())
        for part, order in zip(parts, orders, strict=True)
    ], None


TREE_PLACES = 32  # of the bits of `AttentionBatch.ancestors`

# "clamped_swiglu" is gpt-oss's: gate × sigmoid(1.702 × gate) × (up + 1), both clamped at 7.
# "limited_silu" is DeepSeek V4's: silu(gate) × up, with the gate at most 10 and up from -10 to 10.
# "relu" squares positive values where gate and up are one matrix, as in experts without a gate.
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu", "limited_silu"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
SILU_LIMIT = 10.0


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

    def memory(self, index: int) -> Sequence[tuple[str, Tensor]]:
        """Return the kind and the bytes, uint8, of each table of one expert. Writing to the bytes changes the expert.
        The bytes of experts whose kinds are equal can be exchanged, also between processes."""
        ...


def bytes_of(table: Tensor) -> tuple[str, Tensor]:
    """Return the kind of a table, for `PackedExperts.memory`, and its bytes."""
    return f"{table.dtype}: {tuple(table.shape)}", table.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: down(activation(gate x) × up x). Biases are float32, one value for each output."""

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
    """The rule by which a token chooses its experts: the `top_k` with the highest scores, which are also their
    weights. Among equals the lower index comes first.

    Scores are the softmax or the sigmoid of the router's logits. With "sparsemixer" (Phi's), the weight of each
    chosen expert is its softmax over the logits close to its own, without the experts chosen before."""

    num_experts: int
    top_k: int
    normalizes: bool  # whether the chosen weights are scaled to sum to 1
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    # float32 [E], added to scores where experts are chosen, not to weights.
    selection_bias: Tensor | None = None
    groups: ExpertGroups | None = None
    scale: float = 1.0  # of the weights
    least_sum: float = 1e-20  # that weights are divided by, where they are normalized
    weighs_input: bool = False  # whether an expert's input is multiplied by its weight, instead of its output
    # For sparsemixer: the largest difference between close logits, relative to the larger logit.
    jitter: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Return whether this is the softmax and nothing more."""
        return self == Routing(self.num_experts, self.top_k, self.normalizes)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The settings of an attention layer. Made once per layer at load."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Tensor  # float32 [max positions, D]: first half cosines, second half sines, of rotate-half pairs
    window: int | None = None  # a token attends to itself and the window - 1 before it
    softcap: float | None = None
    q_norm: Tensor | None = None  # [D], RMS norm of each head before rope
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    sinks: Tensor | None = None  # float32 [H]: a logit of each head that takes weight, and has no value
    chunk: int | None = None  # a token attends to its chunk: positions n × chunk to (n + 1) × chunk


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
    key_up: Tensor  # [H, N, C] in the compute type: projects queries into the space of latents
    value_up: Tensor  # [H, C, V]: projects weighted latents into the space of values


@dataclass(frozen=True, slots=True)
class IndexLayer:
    """The settings of an indexer, which chooses the tokens that a token attends to. Its keys are stored after the
    latents in the cache. A head has I channels, of which the first R are rotated."""

    num_heads: int
    head_dim: int  # I
    rope_dim: int  # R
    top_k: int
    column: int  # of a cache entry, where the key begins
    rope: Tensor  # float32 [max positions, R]
    norm: Tensor  # float32 [I], layer norm of keys
    norm_bias: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The positions and slots of this step's tokens. Tensors live on the backend's device; the plain integers are
    host copies."""

    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]: block id * block size + offset, where the token's K and V go
    query_starts: Tensor  # int32 [R + 1], rows of each request in T
    context_lens: Tensor  # int32 [R], tokens in the cache once this step's are written
    block_tables: Tensor  # int32 [R, max blocks], rows padded with anything
    num_requests: int
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # this many of the first requests have exactly one token in this step
    # In steps that verify drafts, the tokens of a request are neighbouring decodes over the same blocks. int32 [2,
    # num_decodes]: the number of neighbours before each decode, and the number from the decode on, itself included.
    neighbours: Tensor | None = None
    # For steps that verify trees of drafts, in layers without a window: bit n says whether a decode sees the key n
    # places before its own. A decode sees all keys from the 31st on. int32 [num_decodes].
    ancestors: Tensor | None = None
    halves_blocks: bool = True  # the last tokens of a request may begin in the middle of a block
    lengths: tuple[Tensor, Tensor] | None = None  # `query_starts` and `context_lens` once more, on the host
    states: StateBatch | None = None  # of models whose layers have a fixed state
    # For models whose layers have windows: the batch without the blocks behind a window, for each part of these
    # layers. `part_of_layer` is the part of each layer, or None for layers with full attention.
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
    """A piece of memory with a part of every block. The part of block i begins at address + i × block_bytes. It
    consists of `num_strips` pieces of equal size, in each of which KV heads follow one another."""

    address: int
    block_bytes: int
    num_blocks: int
    num_strips: int = 1


class KVStore(Protocol):
    """KV tensors of all layers, in the backend's own layout. `layer(i)` is an argument of `attend`.

    Blocks can be copied to slots of host memory and back, bit for bit. Copies and steps take effect in the order of
    the calls; a copy need not be finished when its call returns."""

    num_blocks: int
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block in all layers together."""
        ...

    def layer(self, index: int) -> Any: ...

    def regions(self, layer: int) -> tuple[KVRegion, ...]:
        """Return where the blocks of a layer lie, for transfers to another process. Stores whose regions have the
        same sizes can exchange blocks."""
        ...

    def reserve_host(self, num_slots: int) -> None:
        """Take host memory for this many blocks; once, before the first copy."""
        ...

    def copy_to_host(self, block_ids: Sequence[int], slots: Sequence[int]) -> None: ...

    def copy_from_host(self, slots: Sequence[int], block_ids: Sequence[int]) -> None: ...

    def read_host(self, slot: int) -> bytes:
        """Return the contents of a slot of host memory, after all copies to it."""
        ...

    def write_block(self, block_id: int, contents: bytes) -> None:
        """Overwrite a block, in turn with copies and steps, with what `read_host` returned for another block."""
        ...


@runtime_checkable
class AttendsToTrees(Protocol):
    """Backends whose attention knows `AttentionBatch.ancestors`."""

    attends_to_trees: bool


@runtime_checkable
class MovesTokens(Protocol):
    """KV stores in which single tokens can be copied from slot to slot."""

    def move_tokens(self, sources: Tensor, targets: Tensor) -> None:
        """Copy tokens of all layers from slot to slot, int64 [N, n] on the device: the tokens of N requests. Within
        one request, no source is the target of an earlier pair, unless both are the same."""
        ...


@runtime_checkable
class HalvesBlocks(Protocol):
    """KV stores in which two requests can share a block: the last tokens of a request may begin in the middle of the
    block. The slot of the last token says so."""

    def copy_half(self, block_id: int, offset: int, to_block_id: int) -> None:
        """Copy the half of a block that begins at slot `offset` to the first half of a block. Copies and steps take
        effect in the order of the calls."""
        ...
