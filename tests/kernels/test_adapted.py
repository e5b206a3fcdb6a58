"""Rows with LoRA adapters get them, and no other row does."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import Ops
from penstock.kernels.reference import TorchOps
from penstock.kernels.select import select_ops
from tests.kernels.adapted_case import Case

RANKS = [(16, 16, 16), (4, 0, 20), (0, 7, 0)]
SLOTS = [[-1] * 5, [0] * 5, [-1, 0, -1, -1, -1], [0, 1, 2, 0, 2], [1, -1, 0, -1, 0]]


@pytest.mark.parametrize("ops", [TorchOps(), select_ops("cpu", torch.float32)], ids=lambda ops: ops.name)
def test_a_batch_of_adapters(ops: Ops) -> None:
    torch.manual_seed(0)
    case = Case(ops, RANKS)
    for slots in SLOTS:
        assert case.worst_error(slots) < 1e-5, slots


def test_bfloat16_stays_close() -> None:
    torch.manual_seed(0)
    assert Case(select_ops("cpu", torch.bfloat16), RANKS).worst_error([0, 1, -1, 0, 2]) < 0.03
