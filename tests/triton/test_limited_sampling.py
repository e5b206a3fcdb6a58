"""Top-k, top-p and min-p in Triton's interpreter, against the sort that defines them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from penstock.kernels.triton import limited_sampling
from tests.triton.cases import Bench
from tests.triton.sampling_cases import different_rows, hard_logits, mixed_batch

WHOLE = Bench(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("normal", 7),
        ("around zero", 11),
        ("many equals", 7),
        ("all equal", 13),
        ("peaked", 17),
        ("masked", 7),
    ],
)
def test_mixed_rows_draw_what_a_sort_would(name: str, stride: int) -> None:
    """Strides are coprime to the number of combinations, so that a dozen rows hold a mixture of them."""
    logits = hard_logits(WHOLE, 12, 2500)[name]
    assert different_rows(WHOLE, logits, mixed_batch(WHOLE.device, 12, stride)) == []


def test_candidates_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_sampling, "TILE", 64)
    logits = torch.randn(4, 300).round()
    batch = replace(
        mixed_batch(WHOLE.device, 4),
        temperature=torch.full((4,), 1.5),
        top_k=torch.tensor([0, 200, 299, 0], dtype=torch.int32),
        top_p=torch.tensor([0.99, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 1e-3]),
    )
    assert different_rows(WHOLE, logits, batch) == []


def test_a_row_that_cannot_be_sampled_spares_the_others() -> None:
    logits = torch.randn(4, 300)
    logits[0, 299] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    batch = replace(mixed_batch(WHOLE.device, 4), top_k=torch.full((4,), 3, dtype=torch.int32))
    chosen = WHOLE.ops.sample(logits, batch).tolist()
    assert chosen[:3] == [-1, -1, -1]
    assert chosen[3] in torch.topk(logits[3], 3).indices.tolist()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = hard_logits(WHOLE, 6, 600)["normal"]
    batch = mixed_batch(WHOLE.device, 6, 7)
    together = WHOLE.ops.sample(logits, batch).tolist()
    for row in range(6):
        own = batch.rows(slice(row, row + 1))
        assert WHOLE.ops.sample(logits[row : row + 1], own).tolist() == [together[row]]
