"""Attention with linear biases (ALiBi): the score of a key at position j has `slope × j` added, by head.

Kernels know no biases. Queries and keys get a few columns more in their place, whose product is the bias: a query has
the slope of its head, a key its position. Both are cut in two, so that 16-bit types hold them: a position into
multiples of 256 and the rest, a slope into the nearest bfloat16 and the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops, PackedLinear
from penstock.models.config import ALIBI_COLUMNS, ArchitectureConfig
from penstock.models.layers import Attention, LayerLoader

_STEP = 256  # integers up to it are exact in bfloat16


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the slopes of all heads: powers of a base, then odd powers of its root for heads beyond a power of 2."""
    whole = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-max_bias / whole * (head + 1)) for head in range(whole)]
    rest = [2.0 ** (-max_bias / (2 * whole) * (2 * head + 1)) for head in range(num_heads - whole)]
    return (*first, *rest)


@dataclass(frozen=True, slots=True)
class AlibiAttention:
    qkv: PackedLinear
    output: PackedLinear
    layer: AttentionLayer  # with heads that have the columns for biases
    query_columns: Tensor  # [H, ALIBI_COLUMNS]
    limit: float | None  # of queries, keys and values

    def __call__(self, ops: Ops, x: Tensor, cache: Any, batch: AttentionBatch) -> Tensor:
        num_tokens, heads, kv_heads = len(x), self.layer.num_heads, self.layer.num_kv_heads
        plain = self.layer.head_dim - ALIBI_COLUMNS
        made = ops.linear(x, self.qkv).view(num_tokens, heads + 2 * kv_heads, plain)
        if self.limit is not None:
            made = made.clamp(-self.limit, self.limit)
        wide = made.new_zeros((num_tokens, heads + 2 * kv_heads, self.layer.head_dim))
        wide[:, :, :plain] = made
        wide[:, :heads, plain:] = self.query_columns
        position = batch.positions
        parts = torch.stack([position // _STEP, position % _STEP], dim=1).to(x.dtype)
        wide[:, heads : heads + kv_heads, plain : plain + 4] = parts.repeat(1, 2).unsqueeze(1)
        attended = ops.attend(wide.flatten(1), self.layer, cache, batch)
        attended = attended.view(num_tokens, heads, self.layer.head_dim)[:, :, :plain]
        return ops.add_up(ops.linear(attended.reshape(num_tokens, -1), self.output))


def load_attention(load: LayerLoader) -> Attention | AlibiAttention:
    """Load attention, with biases if the settings have slopes."""
    config, ops = load.config, load.weights.ops
    attention = load.attention()
    if not config.slopes:
        return attention
    if ops.kv_dtype.itemsize == 1:
        raise ConfigError(
            "Models with ALiBi positions keep positions in the KV cache, which 8 bits cannot hold.",
            hint="Leave --kv-cache-dtype out.",
        )
    own = config.slopes[load.heads.queries.start : load.heads.queries.stop]
    layer = replace(attention.layer, head_dim=config.cached_head_dim)
    columns = _query_columns(own, config).to(ops.device, ops.dtype)
    return AlibiAttention(attention.qkv, attention.output, layer, columns, config.qkv_limit)


def _query_columns(slopes: tuple[float, ...], config: ArchitectureConfig) -> Tensor:
    exact = torch.tensor(slopes) / config.attention_scale
    near = exact.bfloat16().float()
    rest = (exact - near).bfloat16().float()
    columns = torch.stack([near * _STEP, near, rest * _STEP, rest], dim=1)
    return torch.nn.functional.pad(columns, (0, ALIBI_COLUMNS - columns.shape[1]))
