"""`TritonOps`: the interface on CUDA. Matrix products are cuBLAS's; everything between them is a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import (
    Activation,
    AttentionBatch,
    AttentionLayer,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.reference import TorchEmbedding, TorchLinear, TorchOps
from penstock.kernels.triton.attention import attention
from penstock.kernels.triton.elementwise import gated, rms_norm
from penstock.kernels.triton.rope_cache import rope_and_cache
from penstock.kernels.triton.sampling import sample_whole_vocabulary


@dataclass(slots=True)
class PagedKV:
    keys: Tensor  # [layers, blocks + 1, G, block size, D]; the last block takes what padding rows write
    values: Tensor
    num_blocks: int
    block_size: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]


class TritonOps:
    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._torch = TorchOps(device, dtype)

    def pack_linear(self, parts: Sequence[WeightData], bias: Tensor | None = None) -> TorchLinear:
        return self._torch.pack_linear(parts, bias)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return F.linear(x, weight.weight, weight.bias)

    def pack_embedding(self, weight: WeightData, tied: Any = None) -> TorchEmbedding:
        return self._torch.pack_embedding(weight, tied)

    def embed(self, token_ids: Tensor, table: Any) -> Tensor:
        return F.embedding(token_ids, table.weight)

    def logits(self, x: Tensor, head: Any) -> Tensor:
        if x.dtype == torch.float32 or head.bias is not None:
            return F.linear(x, head.weight, head.bias).float()
        return torch.mm(x, head.weight.t(), out_dtype=torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, residual)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> PagedKV:
        shape = (num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return PagedKV(keys, values, num_blocks, block_size)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Any, batch: AttentionBatch) -> Tensor:
        keys, values = cache
        queries = rope_and_cache(qkv, layer, keys, values, batch.positions, batch.slots)
        return attention(queries, keys, values, layer, batch)

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

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.all_greedy or batch.whole_vocabulary:
            return sample_whole_vocabulary(logits, batch)
        return self._torch.sample(logits, batch)
