"""Smoothing makes inputs with a few large members fit for int8, and changes nothing before rounding."""

from __future__ import annotations

import torch

from penstock.kernels.interface import DenseWeight, GroupQuantWeight
from penstock.models.quantization.activations import Inputs, RoundedInputsOps, _rounded, factors_for_int8


def outlying_rows() -> torch.Tensor:
    torch.manual_seed(0)
    rows = torch.randn(200, 64)
    rows[:, [3, 40]] *= 60.0
    return rows


def test_outliers_are_shared_between_inputs_and_weights() -> None:
    rows, weight = outlying_rows(), torch.randn(96, 64)
    seen = Inputs(rows.abs().sum(0), rows.abs().amax(0), len(rows), [rows])
    factors = factors_for_int8(weight, seen)
    wanted = rows @ weight.T

    def error(s: torch.Tensor) -> float:
        made = _rounded(rows / s) @ _rounded(weight * s).T
        return float((made - wanted).norm() / wanted.norm())

    assert error(factors) < 0.5 * error(torch.ones(64))
    assert bool((factors[[3, 40]] > 3 * factors.median()).all())


def test_inputs_without_outliers_are_left_alone_where_that_is_best() -> None:
    rows = torch.ones(8, 32)
    seen = Inputs(rows.sum(0), rows.amax(0), len(rows), [rows])
    assert torch.equal(factors_for_int8(torch.ones(16, 32), seen), torch.ones(32))


def test_only_marked_weights_round_their_inputs() -> None:
    ops = RoundedInputsOps(torch.float32)
    codes = torch.randint(-127, 128, (8, 32), dtype=torch.int8)
    scales = torch.full((8, 1), 0.01)
    marked = ops.pack_linear([GroupQuantWeight(codes, scales, None, 32, 8, rounds_inputs=True)])
    plain = ops.pack_linear([DenseWeight(codes.float() * 0.01)])
    x = outlying_rows()[:, :32]
    torch.testing.assert_close(ops.linear(x, marked), _rounded(x) @ (codes.float() * 0.01).T)
    torch.testing.assert_close(ops.linear(x, plain), x @ (codes.float() * 0.01).T)
