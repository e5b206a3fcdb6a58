"""Rows with LoRA adapters get them, and no other row does."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import Ops
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import select_ops
from tests.kernels.adapted_case import worst_error

GROUPS: list[dict[int, list[int]]] = [
    {},
    {0: [0, 1, 2, 3, 4]},
    {0: [1]},
    {0: [0, 3], 1: [1], 2: [2, 4]},
    {0: [4, 2], 1: [0]},
]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("ops", [TorchOps(), select_ops("cpu", torch.float32)], ids=lambda ops: ops.name)
def test_a_batch_of_adapters(ops: Ops, groups: dict[int, list[int]]) -> None:
    assert worst_error(ops, groups, num_rows=5) < 1e-5


def test_bfloat16_stays_close() -> None:
    assert worst_error(select_ops("cpu", torch.bfloat16), {0: [0, 3], 1: [1]}, num_rows=5) < 0.03
