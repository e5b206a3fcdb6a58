"""Forbid tokens by a packed bit mask: bit i % 32 of word i // 32 is set where token i may be sampled.

Rows are masked in place, each on its own, so rows without a mask are not touched. A vocabulary that is larger than
the mask is forbidden beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def forbid_reference(logits: Tensor, rows: Sequence[int], words: Tensor) -> None:
    """float32 [S, V] and int32 [K, W], K rows of logits: the definition, on any device."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
    num_tokens = min(allowed.shape[1], logits.shape[1])
    index = torch.tensor(list(rows), device=logits.device)
    masked = torch.full_like(logits[index], float("-inf"))
    masked[:, :num_tokens] = logits[index, :num_tokens].masked_fill(~allowed[:, :num_tokens], float("-inf"))
    logits[index] = masked


def forbid(logits: Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """The same from host memory. A device gets the packed words, which are 32 times smaller than its logits; a CPU
    unpacks bytes in one pass, without torch, whose threads would contend with those of the model's kernels."""
    if logits.device.type != "cpu":
        forbid_reference(logits, rows, torch.from_numpy(words).to(logits.device, non_blocking=True))
        return
    values = logits.numpy()
    forbidden = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    num_tokens = min(forbidden.shape[1], values.shape[1])
    for row, row_forbidden in zip(rows, forbidden, strict=True):
        np.putmask(values[row, :num_tokens], row_forbidden[:num_tokens], -np.inf)
        values[row, num_tokens:] = -np.inf
