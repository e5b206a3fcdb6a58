"""LoRA adapters on a CUDA device."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.kernels.select import select_ops
from tests.kernels.adapted_case import worst_error


@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.parametrize("rank", [16, 64])
def test_a_batch_of_adapters(num_rows: int, rank: int) -> None:
    ops = select_ops("cuda", torch.bfloat16)
    rows = list(range(num_rows))
    some = {index: rows[index::3] for index in range(2) if rows[index::3]}
    assert worst_error(ops, some, num_rows, rank) < 0.03
    assert worst_error(ops, {0: rows}, num_rows, rank) < 0.03
