"""What sampling means, in plain torch: which tokens a row may choose from, and which one it draws.

Tokens are ranked by logit, highest first, and equal ones by id, lowest first. Top-k keeps exactly the first k
of that ranking; top-p then keeps the shortest prefix of it that holds the wanted share of what is left; min-p
drops those less likely than a fraction of the most likely. The draw walks the kept tokens in order of id
until their cumulative weight passes a random share of the total. The random number is a pure function of
(seed, position), so a row's token depends on neither its batch nor the sampling history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.interface import SamplingBatch

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
    """A logical shift of an int64, whose own shift is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
