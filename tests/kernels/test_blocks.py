"""Chains in one call give what the single operations give, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels.interface import Activation, DenseWeight, GatedLayer, GroupQuantWeight, KVStore, Ops
from penstock.kernels.library import Library
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


# Some that share the cutting of their attention, and one in between that cannot.
WINDOWS = (None, None, 5, None)
WORK = [([3, 0, 2], 20, 1), ([5, 1], 17, 1), ([4], 0, 9)]


def gated_layers(ops: Ops) -> list[GatedLayer]:
    return [
        GatedLayer(
            attention_norm=torch.rand(HIDDEN),
            qkv=dense(ops, 8 * 16, HIDDEN),
            attention=make_layer(num_heads=4, num_kv_heads=2, head_dim=16, window=window),
            output=dense(ops, HIDDEN, 4 * 16),
            mlp_norm=torch.rand(HIDDEN).to(ops.dtype),
            gate_up=dense(ops, 2 * WIDTH, HIDDEN),
            down=dense(ops, HIDDEN, WIDTH),
        )
        for window in WINDOWS
    ]


def filled_kv(ops: NativeOps) -> KVStore:
    """The same in every call."""
    store = ops.allocate_kv(len(WINDOWS), 6, BLOCK_SIZE, 2, 16)
    torch.manual_seed(1)
    layer = make_layer(num_heads=4, num_kv_heads=2, head_dim=16)
    for index in range(len(WINDOWS)):
        for blocks in ([3, 0], [5, 1]):
            ops.attend(
                torch.randn(20, 8 * 16).to(ops.dtype),
                layer,
                store.layer(index),
                make_batch([(blocks, 0, 20)]),
            )
    return store


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["same", "int8"])
def test_joined_layers_are_their_blocks(
    native: NativeOps, library: Library, kv_dtype: torch.dtype | None
) -> None:
    ops = NativeOps(library, native.dtype, kv_dtype)
    layers = gated_layers(ops)
    one_by_one, joined = filled_kv(ops), filled_kv(ops)
    run = ops.join_layers(layers, 1e-5, "silu", joined)
    assert run is not None
    batch = make_batch(WORK)
    residual = torch.randn(len(batch.positions), HIDDEN).to(ops.dtype)
    expected = residual.clone()
    for index, layer in enumerate(layers):
        cache = one_by_one.layer(index)
        ops.attention_block(
            expected, layer.attention_norm, 1e-5, layer.qkv, layer.output, layer.attention, cache, batch
        )
        ops.mlp_block(expected, layer.mlp_norm, 1e-5, layer.gate_up, layer.down, "silu")
    run(residual, batch)
    assert torch.equal(residual, expected)


def test_a_step_of_other_requests_is_cut_anew(native: NativeOps) -> None:
    layers = gated_layers(native)
    run = native.join_layers(layers, 1e-5, "silu", filled_kv(native))
    fresh = native.join_layers(layers, 1e-5, "silu", filled_kv(native))
    assert run is not None
    assert fresh is not None
    short, long = make_batch([([4], 0, 9)]), make_batch(WORK[:2])
    rows = torch.randn(9, HIDDEN).to(native.dtype)
    run(rows.clone(), short)
    after, expected = rows[:2].clone(), rows[:2].clone()
    run(after, long)
    fresh(expected, long)
    assert torch.equal(after, expected)


def test_layers_with_reordered_inputs_or_a_foreign_store_are_not_joined(
    native: NativeOps, exact: TorchOps
) -> None:
    layers = gated_layers(native)
    foreign = exact.allocate_kv(len(WINDOWS), 6, BLOCK_SIZE, 2, 16)
    assert native.join_layers(layers, 1e-5, "silu", foreign) is None
    scales = torch.rand(HIDDEN, WIDTH // 16)
    codes = torch.randint(-127, 128, (HIDDEN, WIDTH), dtype=torch.int8)
    weight = GroupQuantWeight(codes, scales, None, 16, 8, input_order=torch.randperm(WIDTH))
    layers[2] = replace(layers[2], down=native.pack_linear([weight]))
    assert native.join_layers(layers, 1e-5, "silu", filled_kv(native)) is None


def test_a_residual_of_another_type_is_refused(native: NativeOps) -> None:
    run = native.join_layers(gated_layers(native), 1e-5, "silu", filled_kv(native))
    assert run is not None
    with pytest.raises(ValueError, match="contiguous, of the backend's type"):
        run(torch.zeros(11, HIDDEN, dtype=torch.float64), make_batch(WORK))
