"""Sampling without a sort, on a CUDA device: the same tokens as the sort, the right shares, and no waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.triton.cases import Bench
from tests.triton.sampling_cases import different_rows, hard_logits, mixed_batch

DEVICE = torch.device("cuda")
WIDE = Bench(DEVICE, torch.float32)


@pytest.mark.parametrize("vocabulary", [333, 50_000, 151_936])
@pytest.mark.parametrize("name", ["normal", "around zero", "many equals", "all equal", "peaked", "masked"])
def test_mixed_rows_draw_what_a_sort_would(name: str, vocabulary: int) -> None:
    logits = hard_logits(WIDE, 90, vocabulary)[name]
    assert len(different_rows(WIDE, logits, mixed_batch(DEVICE, 90))) <= 2


def test_shares_are_those_of_the_kept_tokens() -> None:
    """Many draws from one row: chi-squared of the kept tokens, and none of the others."""
    draws, vocabulary, kept = 1 << 18, 64, 9
    row = torch.randn(vocabulary, device=DEVICE) * 2
    batch = mixed_batch(DEVICE, draws)

    def column(value: float, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, value)

    batch = replace(
        batch,
        temperature=column(1.3, batch.temperature),
        top_k=column(kept, batch.top_k),
        top_p=column(1.0, batch.top_p),
        min_p=column(0.0, batch.min_p),
    )
    counts = torch.bincount(WIDE.ops.sample(row.expand(draws, -1).contiguous(), batch), minlength=vocabulary)
    ranked, ids = row.sort(descending=True)
    expected = torch.softmax(ranked[:kept].double() / 1.3, 0) * draws
    assert int(counts[ids[kept:]].sum()) == 0
    chi_squared = float(((counts[ids[:kept]] - expected) ** 2 / expected).sum())
    assert chi_squared < 30  # of 8 degrees of freedom: once in five thousand seeds, and the seed is fixed


def test_the_host_does_not_wait() -> None:
    logits = hard_logits(WIDE, 32, 50_000)["normal"]
    batch = mixed_batch(DEVICE, 32)
    WIDE.ops.sample(logits, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        WIDE.ops.sample(logits, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
