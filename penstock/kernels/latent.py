"""Attention over latents (MLA): a token's keys and values of all heads are products of one small latent vector.

The cache holds the latent, normed, and one rotated key that all heads share: [latent | rotated key] for every token.
Keys are never made. A head's query is brought into the space of latents instead, scores are products with latents,
and the weighted sum of latents becomes the head's value at the end. These functions are the definition, in plain
torch for any device. The CPU runs them too, since all of the work is in a few matrix products for each request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, LatentLayer
from penstock.kernels.tensor_kv import SCALE_TYPE, TensorKVStore, TorchKVPart

SCORES_AT_ONCE = 1 << 22


class LatentKVStore(TensorKVStore):
    """The latents of all layers, with scales of their own in int8. A backend may have spare blocks."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        spare_blocks: int = 0,
    ) -> None:
        """`shape` is layers, blocks, block size, numbers of a token."""
        layers, self.num_blocks, self.block_size, width = shape
        slots = (layers, self.num_blocks + spare_blocks, self.block_size)
        self.latents = torch.zeros(*slots, width, dtype=dtype, device=device)
        self.scales = torch.zeros(slots, dtype=SCALE_TYPE, device=device) if dtype == torch.int8 else None
        self._host = []

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.latents,) if self.scales is None else (self.latents, self.scales)

    def layer(self, index: int) -> TorchKVPart:
        """Return the latents as keys of one head: [blocks, block size, 1, W]."""
        scales = None if self.scales is None else self.scales[index].unsqueeze(2)
        return TorchKVPart(self.latents[index].unsqueeze(2), scales)


def attend_latent(
    query: Tensor, latent: Tensor, layer: LatentLayer, cache: TorchKVPart, batch: AttentionBatch
) -> Tensor:
    """Define `Ops.attend_latent`."""
    cache.write(batch.slots.long(), cached_rows(latent, layer, batch.positions).unsqueeze(1))
    queries = latent_queries(query, layer, batch.positions)
    output = torch.empty(*queries.shape[:2], layer.latent_dim, dtype=query.dtype, device=query.device)
    starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    block_size = cache.entries.shape[1]
    for request in range(batch.num_requests):
        length = context_lens[request]
        blocks = batch.block_tables[request][: -(-length // block_size)].long()
        entries = cache.read(blocks, length).squeeze(1)
        at_once = max(1, SCORES_AT_ONCE // (layer.num_heads * length))
        end = starts[request + 1]
        for start in range(starts[request], end, at_once):
            rows = slice(start, min(end, start + at_once))
            output[rows] = _attend_rows(queries[rows], entries, layer, length - end + start)
    return values_of(output, layer)


def cached_rows(latent: Tensor, layer: LatentLayer, positions: Tensor) -> Tensor:
    """Return what the cache holds of tokens: [T, C + R] → [T, C + R], normed and rotated."""
    content, key = latent.float().split([layer.latent_dim, layer.rope_dim], dim=1)
    scale = torch.rsqrt(content.square().mean(dim=1, keepdim=True) + layer.norm_eps)
    rotated = rotate(key.unsqueeze(1), layer.rope, positions).squeeze(1)
    return torch.cat([content * scale * layer.norm, rotated], dim=1).to(latent.dtype)


def latent_queries(query: Tensor, layer: LatentLayer, positions: Tensor) -> Tensor:
    """[T, H × (N + R)] → [T, H, C + R]: the first part of each head in the space of latents, the second rotated."""
    plain, rotated = split_query(query, layer)
    return torch.cat([absorbed(plain, layer), rotate(rotated, layer.rope, positions)], dim=2)


def split_query(query: Tensor, layer: LatentLayer) -> tuple[Tensor, Tensor]:
    by_head = query.view(query.shape[0], layer.num_heads, -1)
    plain, rotated = by_head.split([by_head.shape[2] - layer.rope_dim, layer.rope_dim], dim=2)
    return plain, rotated


def absorbed(plain: Tensor, layer: LatentLayer, out: Tensor | None = None) -> Tensor:
    """[T, H, N] → [T, H, C], in `out` if that is given."""
    if out is None:
        out = plain.new_empty(*plain.shape[:2], layer.latent_dim)
    torch.bmm(plain.transpose(0, 1), layer.key_up, out=out.transpose(0, 1))
    return out


def values_of(weighted: Tensor, layer: LatentLayer) -> Tensor:
    """Turn weighted sums of latents into values: [T, H, C] → [T, H × V]."""
    out = weighted.new_empty(*weighted.shape[:2], layer.value_up.shape[2])
    torch.bmm(weighted.transpose(0, 1), layer.value_up, out=out.transpose(0, 1))
    return out.flatten(1)


def _attend_rows(queries: Tensor, entries: Tensor, layer: LatentLayer, first_position: int) -> Tensor:
    """[n, H, C + R] over float32 entries [c, C + R] of one request → [n, H, C]."""
    count, length = queries.shape[0], entries.shape[0]
    scores = (queries.float().flatten(0, 1) @ entries.T).mul_(layer.scale).view(count, -1, length)
    if first_position + 1 < length:
        at = torch.arange(first_position, first_position + count, device=queries.device)
        hidden = torch.arange(length, device=queries.device) > at.unsqueeze(1)
        scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1).flatten(0, 1)
    made = weights @ entries[:, : layer.latent_dim]
    return made.view(count, -1, layer.latent_dim).to(queries.dtype)


def rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by the angle of its token's position."""
    half = x.shape[-1] // 2
    angles = rope[positions.long()].unsqueeze(1)
    cosine, sine = angles[..., :half], angles[..., half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)
