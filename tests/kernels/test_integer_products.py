"""Products in whole numbers: against the definition on the rounded weights, on every set, in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.interface import Activation, GroupQuantWeight
from penstock.kernels.library import ISA_NAMES, Library
from penstock.kernels.native import NativeOps
from tests.kernels.attention_case import BLOCK_SIZE, make_batch, make_layer
from tests.kernels.test_linear import BATCHES, quantized

GROUP = 32  # activations that share a scale
LARGEST_CODE = 127 * 256 + 127


@pytest.fixture
def ops(library: Library, isa: str, dtype: torch.dtype) -> NativeOps:
    return NativeOps(library, dtype, integer_products=True)


def rounded(rows: Tensor) -> Tensor:
    """16 bits with a scale for every 32 numbers, which takes the largest of them to 127 × 256 + 127."""
    padded = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    step = (padded.abs().amax(dim=2, keepdim=True) / LARGEST_CODE).clamp_min(1e-30)
    return ((padded / step).round() * step).flatten(1)[:, : rows.shape[1]]


def stack(outputs: list[int], inputs: int) -> list[GroupQuantWeight]:
    kinds = [(16, 4, True), (16, 8, False), (inputs, 4, False)]
    return [
        quantized(size, inputs, group, bits, offsets, exact_halves=False)
        for size, (group, bits, offsets) in zip(outputs, kinds, strict=False)
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 37])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [([1], 16), ([20, 33], 48), ([64, 16, 16], 64), ([100, 7], 576), ([48], 1536)]
)
def test_products_with_rounded_activations(
    ops: NativeOps, outputs: list[int], inputs: int, rows: int
) -> None:
    weights = stack(outputs, inputs)
    bias = torch.randn(sum(outputs)) if rows == 3 else None
    packed = ops.pack_linear(weights, bias)
    x = torch.randn(rows, inputs).to(ops.dtype)
    x[0, inputs // 2] = 50
    dense = torch.cat([weight.dequantize() for weight in weights])
    expected = rounded(x) @ dense.T + (0 if bias is None else bias)
    logits = ops.logits(x, packed)
    assert logits.dtype == torch.float32
    # Numbers in the middle between two codes may become either.
    step = x.float().abs().amax(dim=1, keepdim=True) / LARGEST_CODE
    largest = dense.abs().amax(dim=1)
    assert ((logits - expected).abs() <= 3.01 * step * largest + 1e-3).all()
    assert torch.equal(ops.linear(x, packed), logits.to(ops.dtype))


def test_an_outlier_drowns_its_group_alone(ops: NativeOps) -> None:
    weight = quantized(64, 576, 32, 8, offsets=False, exact_halves=True)
    x = torch.randn(20, 576).to(ops.dtype)
    x[:, 100] = 40
    expected = x.float() @ weight.dequantize().T
    error = ops.logits(x, ops.pack_linear([weight])) - expected
    assert float(error.norm() / expected.norm()) < 1e-4  # one term of 8 bits would make 0.015


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 20])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (8, 32), (8, 16)])
def test_no_sum_overflows(ops: NativeOps, bits: int, group: int, rows: int) -> None:
    """Every code of a weight is the largest or the smallest, and activations have the codes that make sums largest:
    all bits of both bytes, and a low byte of -128."""
    smallest, largest = (0, 15) if bits == 4 else (-128, 127)
    codes = torch.full((17, GROUP), largest, dtype=torch.uint8 if bits == 4 else torch.int8)
    codes[::2] = smallest
    weight = GroupQuantWeight(codes, torch.ones(17, GROUP // group), None, group, bits)
    packed = ops.pack_linear([weight])
    wide = NativeOps(ops._library, torch.float32, integer_products=True)  # bfloat16 has no such numbers
    x = torch.tensor([LARGEST_CODE, 128, -128, 127 * 256, -LARGEST_CODE]).repeat(7)[:GROUP].repeat(rows, 1)
    x[1::2], x[:, 0] = LARGEST_CODE, LARGEST_CODE  # a scale of 1
    sums = (x.unflatten(1, (-1, group)).long().unsqueeze(1) * codes.unflatten(1, (-1, group)).long()).sum(-1)
    expected = torch.zeros(rows, 17)
    for part in sums.unbind(-1):
        expected = expected + part.float()
    assert torch.equal(wide.logits(x.float(), packed), expected)


@pytest.mark.parametrize("inputs", [48, 576])
def test_a_row_has_the_same_bits_in_every_batch(ops: NativeOps, inputs: int) -> None:
    packed = ops.pack_linear(stack([70, 40], inputs), torch.randn(110))
    x = torch.randn(max(BATCHES), inputs).to(ops.dtype) * torch.logspace(-3, 3, max(BATCHES)).unsqueeze(1).to(
        ops.dtype
    )
    alone = torch.cat([ops.linear(x[row : row + 1], packed) for row in range(len(x))])
    for rows in BATCHES:
        assert torch.equal(ops.linear(x[:rows], packed), alone[:rows]), f"{rows} rows"
        assert torch.equal(ops.linear(x[-rows:].contiguous(), packed), alone[-rows:]), f"last {rows} rows"


@pytest.mark.parametrize("num_threads", [2, 3, 5, 70])  # of which more than 64 share ranges of rows
def test_threads_that_keep_to_their_rows_leave_no_trace(library: Library, num_threads: int) -> None:
    ops = NativeOps(library, torch.bfloat16, integer_products=True)
    gate_up, down = ops.pack_linear(stack([64, 64], 96)), ops.pack_linear(stack([96], 64))
    norm = torch.rand(96)
    x = torch.randn(64 * num_threads + 7, 96).bfloat16()
    own_threads = library.num_threads()
    results = []
    try:
        for count in (1, num_threads):
            library.set_num_threads(count)
            residual = x.clone()
            ops.mlp_block(residual, norm, 1e-5, gate_up, down, "silu")
            results.append((ops.linear(x, gate_up), residual))
    finally:
        library.set_num_threads(own_threads)
    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)


def test_sums_are_exact_so_every_instruction_set_agrees(library: Library) -> None:
    """Activations in the middle between two codes may become either, by one fused operation or two."""
    ops = NativeOps(library, torch.bfloat16, integer_products=True)
    packed = ops.pack_linear(stack([40, 25], 192))
    x = torch.randn(19, 192).bfloat16()
    results = []
    for isa in range(len(ISA_NAMES)):
        if library.set_isa(isa):
            results.append(ops.logits(x, packed))
    library.set_isa(library.best_isa())
    for other in results[:-1]:
        torch.testing.assert_close(other, results[-1], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (7, 48), (40, 96), (150, 32)])
def test_mlp_is_its_parts(ops: NativeOps, rows: int, width: int, activation: Activation) -> None:
    gate_up = ops.pack_linear([quantized(width, 48, 16, 4, True, True) for _ in range(2)])
    down = ops.pack_linear([quantized(48, width, 16, 4, True, True)])
    x = torch.randn(rows, 48).to(ops.dtype)
    expected = ops.linear(ops.gated(ops.linear(x, gate_up), activation), down)
    assert torch.equal(ops.mlp(x, gate_up, down, activation), expected)


@pytest.mark.parametrize("rows", [1, 21])
def test_blocks_are_their_parts(ops: NativeOps, rows: int) -> None:
    layer = make_layer(num_heads=4, num_kv_heads=2, head_dim=16)
    qkv = ops.pack_linear([quantized(size, 48, 16, 4, True, True) for size in (64, 32, 32)])
    output = ops.pack_linear([quantized(48, 64, 16, 4, True, True)])
    residual, norm = torch.randn(rows, 48).to(ops.dtype), torch.rand(48)
    store = ops.allocate_kv(2, 4, BLOCK_SIZE, 2, 16)
    batch = make_batch([([3, 0, 2], 0, rows)])
    normed = ops.rms_norm(residual, norm, 1e-5)
    attended = ops.attend(ops.linear(normed, qkv), layer, store.layer(0), batch)
    expected = residual + ops.linear(attended, output)
    ops.attention_block(residual, norm, 1e-5, qkv, output, layer, store.layer(1), batch)
    assert torch.equal(residual, expected)


def test_embeddings_are_rows_of_the_packed_head(ops: NativeOps) -> None:
    ids = torch.tensor([0, 49, 17, 17, 3], dtype=torch.int32)
    weight = quantized(50, 80, 16, 4, True, False)
    table = ops.pack_embedding(weight, tied=ops.pack_linear([weight]))
    expected = weight.dequantize()[ids.long()].to(ops.dtype)
    torch.testing.assert_close(ops.embed(ids, table), expected, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(ops.embed(ids, ops.pack_embedding(weight)), expected, rtol=1e-2, atol=1e-6)


def test_what_is_no_number_stays_none(ops: NativeOps) -> None:
    packed = ops.pack_linear([quantized(20, 64, 16, 4, True, True)])
    x = torch.randn(3, 64).to(ops.dtype)
    x[0, 5], x[1, 40] = float("nan"), float("inf")
    logits = ops.logits(x, packed)
    assert logits[0].isnan().all()
    assert not logits[1].isfinite().any()
    assert logits[2].isfinite().all()


def test_rows_and_weights_of_zeros(ops: NativeOps) -> None:
    weight = quantized(20, 64, 16, 8, False, True)
    weight.codes[3] = 0
    packed = ops.pack_linear([weight])
    assert not ops.logits(torch.zeros(2, 64).to(ops.dtype), packed).any()
    assert not ops.logits(torch.randn(2, 64).to(ops.dtype), packed)[:, 3].any()


def test_four_bits_stay_four_bits(library: Library) -> None:
    weight = quantized(64, 128, 32, 4, offsets=True, exact_halves=True)
    for dtype in (torch.float32, torch.bfloat16):
        ops = NativeOps(library, dtype, integer_products=True)
        assert ops.pack_linear([weight]).num_bytes * 8 == 64 * 128 * 5
