"""Defines every operation in plain torch, on any device and in any float type.

The other backends are tested against this definition, which is also the backend of last resort. Unlike them it leaves
the order of summation to torch, so it promises independence from the rest of the batch up to rounding only. It knows
no instruction sets, threads or packed layouts.

Sampling: tokens are ranked by logit, highest first, and equal ones by id, lowest first. Top-k keeps exactly the first
k of that ranking; top-p then keeps the shortest prefix of it that holds the wanted share of the remaining weight;
min-p drops tokens less likely than a fraction of the most likely one. The draw walks the kept tokens in order of id
until their cumulative weight passes a random share of the total. The random number is a pure function of (seed,
position), so a row's token depends on neither its batch nor the sampling history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.blocks import ComposedOps
from penstock.kernels.chunks import within_chunks
from penstock.kernels.interface import (
    SILU_LIMIT,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    AttentionBatch,
    AttentionLayer,
    DenseWeight,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.latent import rotate
from penstock.kernels.operands import TREE_PLACES, bytes_of
from penstock.kernels.tensor_kv import TensorKVStore, TorchKVPart

# Rows of a half-precision head that are converted to float32 at a time for exact logits.
HEAD_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: Tensor  # [out, in] in the compute type
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def memory(self) -> Iterator[tuple[str, Tensor]]:
        for table in (self.weight, self.bias):
            if table is not None:
                yield bytes_of(table)


@dataclass(frozen=True, slots=True)
class TorchEmbedding:
    weight: Tensor  # [vocabulary, hidden] in the compute type
    shared: bool

    @property
    def num_bytes(self) -> int:
        return 0 if self.shared else self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TorchKVLayer:
    keys: TorchKVPart
    values: TorchKVPart


class TorchKVStore(TensorKVStore):
    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`shape` is layers, blocks, block size, G, D."""
        super().__init__(shape, dtype, device)
        self.num_blocks, self.block_size = shape[1], shape[2]

    @property
    def num_strips(self) -> int:
        return self.block_size  # a token has all heads

    def layer(self, index: int) -> TorchKVLayer:
        def scales(of: Tensor | None) -> Tensor | None:
            return None if of is None else of[index]

        return TorchKVLayer(
            TorchKVPart(self.keys[index], scales(self.key_scales)),
            TorchKVPart(self.values[index], scales(self.value_scales)),
        )


class TorchOps(ComposedOps):
    name = "torch"
    attends_to_trees = True

    def __init__(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> TorchLinear:
        weight = torch.cat([self._dense(part) for part in parts])
        return TorchLinear(weight, None if bias is None else bias.to(self.device, self.dtype))

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return F.linear(x, weight.weight, weight.bias)

    def pack_embedding(self, weight: WeightData, tied: Any | None = None) -> TorchEmbedding:
        if tied is not None:
            return TorchEmbedding(tied.weight, shared=True)
        return TorchEmbedding(self._dense(weight), shared=False)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        return F.embedding(token_ids, table.weight)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        if self.dtype == torch.float32:
            return F.linear(x, head.weight, head.bias)
        wide = x.float()
        parts = [F.linear(wide, rows.float()) for rows in torch.split(head.weight, HEAD_ROWS_AT_ONCE)]
        logits = torch.cat(parts, dim=-1)
        return logits if head.bias is None else logits + head.bias.float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated_reference(gate_up, activation)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> TorchKVStore:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        return TorchKVStore(shape, self.kv_dtype, self.device)

    def attend(
        self, qkv: Tensor, layer: AttentionLayer, cache: TorchKVLayer, batch: AttentionBatch
    ) -> Tensor:
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        by_head = qkv.view(qkv.shape[0], -1, width)
        query, key, value = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None:
            query = self.rms_norm(query, layer.q_norm, layer.norm_eps)
        if layer.k_norm is not None:
            key = self.rms_norm(key, layer.k_norm, layer.norm_eps)
        query = rotate(query, layer.rope, batch.positions)
        key = rotate(key, layer.rope, batch.positions)

        slots = batch.slots.long()
        cache.keys.write(slots, key)
        cache.values.write(slots, value)

        output = torch.empty_like(query)
        batch = within_chunks(batch, layer.chunk, cache.keys.entries.shape[1])
        starts = batch.query_starts.tolist()
        context_lens = batch.context_lens.tolist()
        for request in range(batch.num_requests):
            rows = slice(starts[request], starts[request + 1])
            table = batch.block_tables[request]
            sees = None
            if batch.ancestors is not None and request < batch.num_decodes:
                sees = batch.ancestors[request]
            output[rows] = _attend_one_request(query[rows], layer, cache, table, context_lens[request], sees)
        return output.view(-1, heads * width)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample_rows(logits, batch)

    def _dense(self, weight: WeightData) -> Tensor:
        if isinstance(weight, DenseWeight):
            return weight.values.to(self.device, self.dtype)
        return weight.dequantize(self.dtype).to(self.device)


def gated_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=SWIGLU_LIMIT)
        active = gate * torch.sigmoid(SWIGLU_ALPHA * gate)
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    elif activation == "limited_silu":
        active, up = F.silu(gate.clamp(max=SILU_LIMIT)), up.clamp(-SILU_LIMIT, SILU_LIMIT)
    elif activation == "relu":
        active = F.relu(gate)
    else:
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (active * up).to(gate_up.dtype)


def _attend_one_request(
    query: Tensor,
    layer: AttentionLayer,
    cache: TorchKVLayer,
    table: Tensor,
    context_len: int,
    sees: Tensor | None,
) -> Tensor:
    """[n, H, D] → [n, H, D] for the last n tokens of one request's context. `sees` is of `AttentionBatch.ancestors`,
    for one token."""
    num_queries = query.shape[0]
    first_position = context_len - num_queries
    block_size = cache.keys.entries.shape[1]
    start = 0 if layer.window is None else max(0, first_position - layer.window + 1)
    blocks = table[start // block_size : -(-context_len // block_size)].long()
    start = start // block_size * block_size

    # Only written positions are taken, so what else a block holds cannot matter.
    keys = cache.keys.read(blocks, context_len - start)
    values = cache.values.read(blocks, context_len - start)

    group = layer.num_heads // layer.num_kv_heads
    grouped = query.float().view(num_queries, layer.num_kv_heads, group, layer.head_dim)
    scores = torch.einsum("nghd,cgd->ghnc", grouped, keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    query_at = torch.arange(first_position, context_len, device=query.device).unsqueeze(1)
    key_at = torch.arange(start, context_len, device=query.device).unsqueeze(0)
    hidden = key_at > query_at
    if layer.window is not None:
        hidden |= key_at <= query_at - layer.window
    if sees is not None:
        hidden |= (sees.long() >> (query_at - key_at).clamp(0, TREE_PLACES - 1)) & 1 == 0
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:  # one more key, without a value
        sinks = layer.sinks.float().view(layer.num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
    return torch.einsum("ghnc,cgd->nghd", weights, values).reshape(query.shape).to(query.dtype)


# SplitMix64, in two's complement because torch has no full set of unsigned operations.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """int64 [S], int64 [S] → float64 [S] in [0, 1), equal bit for bit in every backend."""
    state = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
    return _shift_right(state, 11).double() * 2.0**-53


def sample_rows(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 [S, V] → int64 [S]; -1 for a row that has a NaN or whose largest logit is infinite."""
    unusable = ~logits.amax(dim=-1).isfinite()
    greedy = logits.nan_to_num(nan=0.0).argmax(dim=-1)
    if batch.all_greedy:
        return greedy.masked_fill(unusable, -1)
    drawn = _draw(logits.masked_fill(unusable.unsqueeze(-1), 0.0), batch)
    chosen = torch.where(batch.temperature > 0, drawn, greedy)
    return chosen.masked_fill(unusable, -1)


def _draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    vocabulary = logits.shape[-1]
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0).unsqueeze(-1)
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = torch.exp((ranked - ranked[:, :1]) / temperature).double()

    rank = torch.arange(vocabulary, device=logits.device)
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocabulary).unsqueeze(-1)
    weights = weights.masked_fill(rank >= top_k, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    before = weights.cumsum(dim=-1) - weights
    top_p = batch.top_p.double().unsqueeze(-1)
    dropped = (before >= top_p * total) & (top_p < 1) & (rank > 0)
    dropped |= weights < batch.min_p.double().unsqueeze(-1)
    weights = weights.masked_fill(dropped, 0.0)

    by_id = torch.zeros_like(weights).scatter_(-1, ids, weights)
    cumulative = by_id.cumsum(dim=-1)
    target = uniform(batch.seed, batch.position).unsqueeze(-1) * cumulative[:, -1:]
    return (cumulative > target).int().argmax(dim=-1)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Return a logical shift of an int64, whose own shift is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def forbid_reference(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    """Forbid tokens by a packed bit mask: bit i % 32 of word i // 32 is set where token i may be sampled. A token
    beyond the mask is forbidden. Takes float32 [S, V] and int32 [K, W], K rows of logits; other rows are not
    touched."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
    num_tokens = min(allowed.shape[1], logits.shape[1])
    index = torch.tensor(list(rows), device=logits.device)
    masked = torch.full_like(logits[index], float("-inf"))
    masked[:, :num_tokens] = logits[index, :num_tokens].masked_fill(~allowed[:, :num_tokens], float("-inf"))
    logits[index] = masked


def forbid(logits: Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """Do the same with words from host memory. A device gets the packed words, which are 32 times smaller than its
    logits. A CPU unpacks bytes in one pass, without torch, because torch's threads would compete with the threads of
    the model's kernels."""
    if logits.device.type != "cpu":
        forbid_reference(logits, rows, torch.from_numpy(words).to(logits.device, non_blocking=True))
        return
    values = logits.numpy()
    forbidden = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    num_tokens = min(forbidden.shape[1], values.shape[1])
    for row, row_forbidden in zip(rows, forbidden, strict=True):
        np.putmask(values[row, :num_tokens], row_forbidden[:num_tokens], -np.inf)
        values[row, num_tokens:] = -np.inf
