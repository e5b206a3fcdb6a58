"""What sampling means, in plain torch: which tokens a row may choose from, and which one it draws.

Tokens are ranked by logit, highest first, and equal ones by id, lowest first. Top-k keeps exactly the first k
of that ranking; top-p then keeps the shortest prefix of it that holds the wanted share of what is left; min-p
drops those less likely than a fraction of the most likely. The draw walks the kept tokens in order of id
until their cumulative weight passes a random share of the total. The random number is a pure function of
(seed, position), so a row's token depends on neither its batch nor the sampling history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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
    logits; a CPU unpacks bytes in one pass, without torch, whose threads would contend with those of the model's
    kernels."""
    if logits.device.type != "cpu":
        forbid_reference(logits, rows, torch.from_numpy(words).to(logits.device, non_blocking=True))
        return
    values = logits.numpy()
    forbidden = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    num_tokens = min(forbidden.shape[1], values.shape[1])
    for row, row_forbidden in zip(rows, forbidden, strict=True):
        np.putmask(values[row, :num_tokens], row_forbidden[:num_tokens], -np.inf)
        values[row, num_tokens:] = -np.inf
