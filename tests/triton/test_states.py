"""The kernels of layers with a fixed state in Triton's interpreter, on small shapes. (`tests/gpu` compiles them.)"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from tests.triton.cases import Bench
from tests.triton.state_cases import States, state_errors


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (States(4, 16, 2, 16), [1, 1, 1]),
        (States(2, 12, 2, 20), [1, 70, 3]),
        (States(1, 40, 1, 8), [129]),
        (States(2, 16, 2, 16), [*[1] * 12, 2, 64, 33]),
    ],
    ids=str,
)
def test_states(shape: States, lengths: list[int]) -> None:
    errors = state_errors(Bench(torch.device("cpu"), torch.float32), shape, lengths)
    assert max(errors.values()) < 1e-5, errors
    if lengths == [1, 70, 3]:
        errors = state_errors(Bench(torch.device("cpu"), torch.float16), shape, lengths)
        assert max(errors.values()) < 3e-3, errors
