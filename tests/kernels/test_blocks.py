"""Chains in one call give what the single operations give, to the bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import Activation, DenseWeight, Ops
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps
from tests.kernels.attention_case import BLOCK_SIZE, make_batch, make_layer

HIDDEN, WIDTH = 48, 80


@pytest.fixture(params=["native", "torch"])
def ops(request: pytest.FixtureRequest, native: NativeOps, exact: TorchOps) -> Ops:
    return native if request.param == "native" else exact


def dense(ops: Ops, outputs: int, inputs: int):
    return ops.pack_linear([DenseWeight(torch.randn(outputs, inputs))])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 7, 40, 150])
def test_mlp_of_separate_gate_and_up(ops: Ops, rows: int, activation: Activation) -> None:
    """The usual case, in which gating may happen on the way from one product to the next."""
    wide = 6 * 32
    gate_up = ops.pack_linear([DenseWeight(torch.randn(wide, HIDDEN)) for _ in range(2)])
    down = dense(ops, HIDDEN, wide)
    x = torch.randn(rows, HIDDEN).to(ops.dtype)
    expected = ops.linear(ops.gated(ops.linear(x, gate_up), activation), down)
    assert torch.equal(ops.mlp(x, gate_up, down, activation), expected)


@pytest.mark.parametrize("rows", [1, 40])
def test_mlp(ops: Ops, rows: int) -> None:
    gate_up, down = dense(ops, 2 * WIDTH, HIDDEN), dense(ops, HIDDEN, WIDTH)
    x = torch.randn(rows, HIDDEN).to(ops.dtype)
    expected = ops.linear(ops.gated(ops.linear(x, gate_up), "silu"), down)
    assert torch.equal(ops.mlp(x, gate_up, down, "silu"), expected)


@pytest.mark.parametrize("rows", [1, 40])
def test_attention(ops: Ops, rows: int) -> None:
    layer = make_layer(num_heads=4, num_kv_heads=2, head_dim=16)
    qkv, output = dense(ops, 8 * 16, HIDDEN), dense(ops, HIDDEN, 4 * 16)
    x = torch.randn(rows, HIDDEN).to(ops.dtype)
    store = ops.allocate_kv(2, 4, BLOCK_SIZE, 2, 16)
    batch = make_batch([([3, 0, 2], 0, rows)])
    expected = ops.linear(ops.attend(ops.linear(x, qkv), layer, store.layer(0), batch), output)
    assert torch.equal(ops.attention(x, qkv, output, layer, store.layer(1), batch), expected)


@pytest.mark.parametrize("rows", [1, 21, 200])
def test_mlp_block(ops: Ops, rows: int) -> None:
    gate_up, down = dense(ops, 2 * WIDTH, HIDDEN), dense(ops, HIDDEN, WIDTH)
    residual, norm = torch.randn(rows, HIDDEN).to(ops.dtype), torch.rand(HIDDEN).to(ops.dtype)
    expected = residual + ops.mlp(ops.rms_norm(residual, norm, 1e-5), gate_up, down, "silu")
    ops.mlp_block(residual, norm, 1e-5, gate_up, down, "silu")
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("rows", [1, 21])
def test_attention_block(ops: Ops, rows: int) -> None:
    layer = make_layer(num_heads=4, num_kv_heads=2, head_dim=16)
    qkv, output = dense(ops, 8 * 16, HIDDEN), dense(ops, HIDDEN, 4 * 16)
    residual, norm = torch.randn(rows, HIDDEN).to(ops.dtype), torch.rand(HIDDEN)
    store = ops.allocate_kv(2, 4, BLOCK_SIZE, 2, 16)
    batch = make_batch([([3, 0, 2], 0, rows)])
    normed = ops.rms_norm(residual, norm, 1e-5)
    expected = residual + ops.attention(normed, qkv, output, layer, store.layer(0), batch)
    ops.attention_block(residual, norm, 1e-5, qkv, output, layer, store.layer(1), batch)
    assert torch.equal(residual, expected)
