"""Attention over latents (MLA): a token's keys and values of all heads are products of one small latent vector.

The cache holds the latent, normed, and one rotated key that all heads share: [latent | rotated key] for every token.
Keys are never computed. A head's query is projected into the space of latents instead, scores are products with
latents, and the weighted sum of latents becomes the head's value at the end. These functions are the definition, in
plain torch for any device. The CPU runs them too, since all of the work is in a few matrix products for each request.

With an indexer (DeepSeek sparse attention), a token attends to the few tokens that small heads of the indexer choose.
The entries in the cache have the indexer's key too: [latent | rotated key | indexer's key].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, IndexLayer, LatentLayer
from penstock.kernels.tensor_kv import SCALE_TYPE, TensorKVStore, TorchKVPart

SCORES_AT_ONCE = 1 << 22
INDEX_NORM_EPS = 1e-6


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
        self._copies = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.latents,) if self.scales is None else (self.latents, self.scales)

    def layer(self, index: int) -> TorchKVPart:
        """Return the latents as keys of one head: [blocks, block size, 1, W]."""
        scales = None if self.scales is None else self.scales[index].unsqueeze(2)
        return TorchKVPart(self.latents[index].unsqueeze(2), scales)


def attend_latent(
    query: Tensor,
    latent: Tensor,
    layer: LatentLayer,
    cache: TorchKVPart,
    batch: AttentionBatch,
    chosen: Tensor | None = None,
) -> Tensor:
    """Define `Ops.attend_latent`."""
    cache.write(batch.slots.long(), cached_rows(latent, layer, batch.positions).unsqueeze(1))
    queries = latent_queries(query, layer, batch.positions)
    return values_of(attend_entries(queries, layer, cache, batch, chosen), layer)


def attend_entries(
    queries: Tensor, layer: LatentLayer, cache: TorchKVPart, batch: AttentionBatch, chosen: Tensor | None
) -> Tensor:
    """[T, H, C + R] → [T, H, C]: weighted sums of the latents of each token's request, or of the chosen ones."""
    output = torch.empty(*queries.shape[:2], layer.latent_dim, dtype=queries.dtype, device=queries.device)
    width = layer.latent_dim + layer.rope_dim
    for entries, tokens, first_position in _requests(cache, batch):
        entries = entries[:, :width]
        size = len(entries) if chosen is None else chosen.shape[1] * (1 + width // layer.num_heads)
        at_once = max(1, SCORES_AT_ONCE // (layer.num_heads * size))
        for start in range(tokens.start, tokens.stop, at_once):
            rows = slice(start, min(tokens.stop, start + at_once))
            if chosen is None:
                position = first_position + start - tokens.start
                output[rows] = _attend_rows(queries[rows], entries, layer, position)
            else:
                output[rows] = _attend_chosen(queries[rows], entries, layer, chosen[rows])
    return output


def choose_tokens(
    query: Tensor, key: Tensor, weights: Tensor, layer: IndexLayer, cache: TorchKVPart, batch: AttentionBatch
) -> Tensor | None:
    """Define `Ops.choose_tokens`. The score of a token is the sum over heads of weight × ReLU(query · key). Among
    equals the earlier token comes first."""
    size = (layer.head_dim,)
    keys = F.layer_norm(key.float(), size, layer.norm, layer.norm_bias, INDEX_NORM_EPS).to(key.dtype)
    keys = _rotate_first(keys.unsqueeze(1), layer, batch.positions)
    cache.write(batch.slots.long(), keys, layer.column)
    if batch.max_context_len <= layer.top_k:
        return None
    queries = _rotate_first(query.unflatten(1, (layer.num_heads, -1)), layer, batch.positions).float()
    chosen = torch.full((len(query), layer.top_k), -1, dtype=torch.int64, device=query.device)
    for entries, tokens, first_position in _requests(cache, batch):
        keys = entries[:, layer.column : layer.column + layer.head_dim]
        length = len(keys)
        kept = min(length, layer.top_k)
        at_once = max(1, SCORES_AT_ONCE // (layer.num_heads * length))
        for start in range(tokens.start, tokens.stop, at_once):
            rows = slice(start, min(tokens.stop, start + at_once))
            products = (queries[rows].flatten(0, 1) @ keys.T).relu_().view(-1, layer.num_heads, length)
            scores = (weights[rows].unsqueeze(1) @ products).squeeze(1)
            hidden = _later(first_position + start - tokens.start, len(scores), length, scores.device)
            ranked = torch.sort(scores.masked_fill_(hidden, -torch.inf), dim=1, descending=True, stable=True)
            chosen[rows, :kept] = ranked.indices[:, :kept].masked_fill(
                ranked.values[:, :kept] == -torch.inf, -1
            )
    return chosen


def _requests(cache: TorchKVPart, batch: AttentionBatch) -> Iterator[tuple[Tensor, slice, int]]:
    """Yield the cached entries of each request, float32 [c, W], its tokens, and the position of the first one."""
    starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
    block_size = cache.entries.shape[1]
    for request in range(batch.num_requests):
        length, tokens = context_lens[request], slice(starts[request], starts[request + 1])
        blocks = batch.block_tables[request][: -(-length // block_size)].long()
        yield cache.read(blocks, length).squeeze(1), tokens, length - (tokens.stop - tokens.start)


def cached_rows(latent: Tensor, layer: LatentLayer, positions: Tensor) -> Tensor:
    """Return the cache entries of tokens: [T, C + R] → [T, C + R], normed and rotated."""
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
        hidden = _later(first_position, count, length, queries.device)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    weights = torch.softmax(scores, dim=-1).flatten(0, 1)
    made = weights @ entries[:, : layer.latent_dim]
    return made.view(count, -1, layer.latent_dim).to(queries.dtype)


def _attend_chosen(queries: Tensor, entries: Tensor, layer: LatentLayer, chosen: Tensor) -> Tensor:
    """[n, H, C + R] over the chosen ones of float32 entries [c, C + R], int64 [n, k] → [n, H, C]."""
    taken = entries[chosen.clamp_min(0)]
    scores = (queries.float() @ taken.transpose(1, 2)).mul_(layer.scale)
    weights = torch.softmax(scores.masked_fill_((chosen < 0).unsqueeze(1), -torch.inf), dim=-1)
    return (weights @ taken[..., : layer.latent_dim]).to(queries.dtype)


def _later(first_position: int, count: int, length: int, device: torch.device) -> Tensor:
    """bool [count, length]: which of a request's positions come after each of this many from the first one on."""
    at = torch.arange(first_position, first_position + count, device=device)
    return torch.arange(length, device=device) > at.unsqueeze(1)


def _rotate_first(x: Tensor, layer: IndexLayer, positions: Tensor) -> Tensor:
    """Rotate the first numbers of every head."""
    first, rest = x.split([layer.rope_dim, layer.head_dim - layer.rope_dim], dim=2)
    return torch.cat([rotate(first, layer.rope, positions), rest], dim=2)


def rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by the angle of its token's position."""
    half = x.shape[-1] // 2
    angles = rope[positions.long()].unsqueeze(1)
    cosine, sine = angles[..., :half], angles[..., half:]
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)
