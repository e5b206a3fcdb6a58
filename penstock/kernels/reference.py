"""What every operation means, in plain torch, on any device and in any float type.

It is the definition the other backends are tested against, and the backend of last resort. Unlike them it
leaves the order of summation to torch, so it promises independence from the rest of the batch up to rounding
only. It does not know about instruction sets, threads or packed layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.blocks import ComposedOps
from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    DenseWeight,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.sampling import sample_rows
from penstock.kernels.tensor_kv import TensorKVStore, to_codes

# Rows of a half-precision head that are widened at a time for exact float32 logits.
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


@dataclass(frozen=True, slots=True)
class TorchEmbedding:
    weight: Tensor  # [vocabulary, hidden] in the compute type
    shared: bool

    @property
    def num_bytes(self) -> int:
        return 0 if self.shared else self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TorchKVPart:
    """The keys, or the values, of one layer."""

    entries: Tensor  # [blocks, block size, G, D]
    scales: Tensor | None  # [blocks, block size, G], of int8

    def write(self, slots: Tensor, new: Tensor) -> None:
        """[T, G, D], to slots [T]."""
        if self.scales is None:
            kept = new.to(self.entries.dtype)
        else:
            kept, scales = to_codes(new)
            self.scales.view(-1, scales.shape[-1])[slots] = scales
        # As bytes, because torch cannot assign float8 by index.
        as_bytes = kept.contiguous().view(torch.uint8)
        self.entries.view(torch.uint8).view(-1, *as_bytes.shape[1:])[slots] = as_bytes

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """float32 [count, G, D]: the first tokens of these blocks."""
        entries = self.entries[blocks].flatten(0, 1)[:count].float()
        if self.scales is None:
            return entries
        return entries * self.scales[blocks].flatten(0, 1)[:count].unsqueeze(-1)


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

    def layer(self, index: int) -> TorchKVLayer:
        def scales(of: Tensor | None) -> Tensor | None:
            return None if of is None else of[index]

        return TorchKVLayer(
            TorchKVPart(self.keys[index], scales(self.key_scales)),
            TorchKVPart(self.values[index], scales(self.value_scales)),
        )


class TorchOps(ComposedOps):
    name = "torch"

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
        gate, up = gate_up.float().chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (active * up).to(gate_up.dtype)

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
        query = _rotate(query, layer.rope, batch.positions)
        key = _rotate(key, layer.rope, batch.positions)

        slots = batch.slots.long()
        cache.keys.write(slots, key)
        cache.values.write(slots, value)

        output = torch.empty_like(query)
        starts = batch.query_starts.tolist()
        context_lens = batch.context_lens.tolist()
        for request in range(batch.num_requests):
            rows = slice(starts[request], starts[request + 1])
            table = batch.block_tables[request]
            output[rows] = _attend_one_request(query[rows], layer, cache, table, context_lens[request])
        return output.view(-1, heads * width)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return sample_rows(logits, batch)

    def _dense(self, weight: WeightData) -> Tensor:
        if isinstance(weight, DenseWeight):
            return weight.values.to(self.device, self.dtype)
        return weight.dequantize(self.dtype).to(self.device)


def _rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by the angle of its token's position."""
    half = x.shape[-1] // 2
    angles = rope[positions.long()].unsqueeze(1)
    cosine, sine = angles[..., :half], angles[..., half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


def _attend_one_request(
    query: Tensor, layer: AttentionLayer, cache: TorchKVLayer, table: Tensor, context_len: int
) -> Tensor:
    """[n, H, D] → [n, H, D] for the last n tokens of one request's context."""
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
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("ghnc,cgd->nghd", weights, values).reshape(query.shape).to(query.dtype)
