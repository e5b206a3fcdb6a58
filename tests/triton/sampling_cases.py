"""Rows that limit what may be drawn, for any device: settings mixed in one batch, and logits that are hard to cut."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from penstock.kernels.interface import SamplingBatch
from tests.triton.cases import Bench

TOP_K = (0, 1, 3, 50, 10**6)
TOP_P = (1.0, 0.9, 0.3)
MIN_P = (0.0, 0.2)
TEMPERATURE = (0.8, 2.0, 0.0)


def mixed_batch(device: torch.device, rows: int, stride: int = 1) -> SamplingBatch:
    """Every `stride`-th of all combinations of the settings above, from the first again when they run out."""
    combinations = list(itertools.product(TEMPERATURE, TOP_K, TOP_P, MIN_P))
    chosen = [combinations[row * stride % len(combinations)] for row in range(rows)]
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device) for column in zip(*chosen, strict=True)
    )
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k.to(torch.int32),
        top_p=top_p,
        min_p=min_p,
        seed=torch.arange(rows, device=device) * 7919,
        position=torch.arange(rows, device=device) % 11,
        all_greedy=False,
        whole_vocabulary=False,
    )


def hard_logits(bench: Bench, rows: int, vocabulary: int) -> dict[str, Tensor]:
    normal = torch.randn(rows, vocabulary, device=bench.device)
    allowed = torch.rand(rows, vocabulary, device=bench.device) < 8 / vocabulary
    allowed[:, 1] = True
    peaked = normal.clone()
    peaked[:, vocabulary - 1] = 40.0
    return {
        "normal": normal * 3,
        "around zero": torch.where(normal < 0, normal * 1e-3, normal * 0.0),
        "many equals": (normal * 2).round(),
        "all equal": torch.full_like(normal, -7.5),
        "peaked": peaked,
        "masked": normal.masked_fill(~allowed, float("-inf")),
    }


def different_rows(bench: Bench, logits: Tensor, batch: SamplingBatch) -> list[int]:
    """Both draw with the same number, so they differ only where it falls on a boundary up to rounding."""
    got, wanted = bench.ops.sample(logits, batch), bench.definition.sample(logits, batch)
    return [int(row) for row in (got != wanted).nonzero().flatten()]
