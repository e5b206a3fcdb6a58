"""Norms and activations against their definition, at awkward widths."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps

WIDTHS = [1, 15, 16, 33, 64, 576, 1000]


def close_to(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_rms_norm(native: NativeOps, exact: TorchOps, dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(rows, width).to(dtype)
    for weight in (torch.randn(width), torch.randn(width).bfloat16()):
        expected = exact.rms_norm(x.float(), weight, 1e-5)
        torch.testing.assert_close(native.rms_norm(x, weight, 1e-5).float(), expected, **close_to(dtype))


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_updates_the_residual(
    native: NativeOps, exact: TorchOps, dtype: torch.dtype, width: int
) -> None:
    x, residual, weight = (
        torch.randn(40, width).to(dtype),
        torch.randn(40, width).to(dtype),
        torch.randn(width),
    )
    expected_residual = x + residual
    found = native.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    expected = exact.rms_norm(expected_residual.float(), weight, 1e-6)
    torch.testing.assert_close(found.float(), expected, **close_to(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(native: NativeOps, exact: TorchOps, dtype: torch.dtype, width: int, activation) -> None:
    gate_up = (torch.randn(30, 2 * width) * 4).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 100.0, -100.0
    expected = exact.gated(gate_up.float(), activation)
    torch.testing.assert_close(native.gated(gate_up, activation).float(), expected, **close_to(dtype))


def test_a_row_does_not_depend_on_the_others(native: NativeOps, dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, 576).to(dtype), torch.randn(576)
    normed, gated = native.rms_norm(x, weight, 1e-5), native.gated(x, "silu")
    for row in (0, 31, 69):
        assert torch.equal(native.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(native.gated(x[row : row + 1], "silu")[0], gated[row])


def test_not_a_number_stays_one(native: NativeOps, dtype: torch.dtype) -> None:
    x = torch.randn(3, 64).to(dtype)
    x[1, 7] = float("nan")
    assert native.rms_norm(x, torch.ones(64), 1e-5)[1].isnan().all()
    assert native.gated(x, "silu")[1].isnan().sum() == 1
    assert not native.rms_norm(x, torch.ones(64), 1e-5)[[0, 2]].isnan().any()


def test_views_are_made_contiguous_and_other_types_refused(native: NativeOps, dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 64).to(dtype), torch.ones(32)
    assert torch.equal(
        native.rms_norm(x[:, :32], weight, 1e-5), native.rms_norm(x[:, :32].clone(), weight, 1e-5)
    )
    with pytest.raises(TypeError, match="float64"):
        native.gated(x.double(), "silu")
    with pytest.raises(ValueError, match="in place"):
        native.add_rms_norm(x[:, :32].clone(), x[:, :32], weight, 1e-5)
