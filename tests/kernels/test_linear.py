"""Packed matrices: every format against the definition, and a row's bits whatever rows surround it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.kernels.library import Library
from penstock.kernels.native import NativeOps
from penstock.kernels.reference import TorchOps

BATCHES = [2, 3, 15, 16, 17, 31, 32, 33, 70, 96, 97, 150]


def quantized(
    out: int, inputs: int, group: int, bits: int, offsets: bool, exact_halves: bool
) -> GroupQuantWeight:
    low, high, code_type = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (out, inputs), dtype=code_type)
    scales = torch.rand(out, inputs // group) * 2.0 ** (1 - bits)
    shifts = torch.randn(out, inputs // group)
    if exact_halves:
        scales, shifts = scales.half().float(), shifts.half().float()
    return GroupQuantWeight(codes, scales, shifts if offsets else None, group, bits)


def every_format(out: int, inputs: int) -> dict[str, WeightData]:
    formats: dict[str, WeightData] = {
        "float32": DenseWeight(torch.randn(out, inputs)),
        "float16": DenseWeight(torch.randn(out, inputs).half()),
        "bfloat16": DenseWeight(torch.randn(out, inputs).bfloat16()),
        "float8": Float8Weight(torch.randn(out, inputs).to(torch.float8_e4m3fn), torch.rand(out) + 0.1),
    }
    for group in (16, 32):
        if inputs % group != 0:
            continue
        for bits in (4, 8):
            for offsets in (False, True):
                for halves in (False, True):
                    name = f"int{bits} group {group} offsets {offsets} halves {halves}"
                    formats[name] = quantized(out, inputs, group, bits, offsets, halves)
    return formats


def assert_product(
    native: NativeOps, exact: TorchOps, weights: list[WeightData], rows: int, bias: bool
) -> None:
    """Errors are held against what rounding every weight, and then the sum, can do at most."""
    outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    shift = torch.randn(outputs) if bias else None
    x = torch.randn(rows, inputs).to(native.dtype)
    packed = native.pack_linear(weights, shift)
    assert (packed.out_features, packed.in_features) == (outputs, inputs)
    definition = exact.pack_linear(weights, shift)
    expected = exact.linear(x.float(), definition)
    magnitude = x.float().abs() @ definition.weight.abs().T
    if shift is not None:
        magnitude = magnitude + shift.abs()
    unit = 2.0**-8 if native.dtype == torch.bfloat16 else 2.0**-20
    assert ((native.linear(x, packed).float() - expected).abs() <= unit * (magnitude + expected.abs())).all()
    logits = native.logits(x, packed)
    assert logits.dtype == torch.float32
    assert ((logits - expected).abs() <= unit * magnitude).all()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (20, 48), (64, 64), (100, 576)])
def test_every_format(native: NativeOps, exact: TorchOps, outputs: int, inputs: int) -> None:
    for name, weight in every_format(outputs, inputs).items():
        for rows in (1, 5, 33):
            try:
                assert_product(native, exact, [weight], rows, bias=rows == 5)
            except AssertionError as error:
                raise AssertionError(f"{name}, {rows} rows") from error


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stacks_of_mixed_formats(library: Library, exact: TorchOps, data: st.DataObject) -> None:
    inputs = data.draw(st.sampled_from([16, 32, 48, 64, 96, 160]))
    names = sorted(every_format(1, inputs))
    sizes = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    weights = [every_format(size, inputs)[data.draw(st.sampled_from(names))] for size in sizes]
    rows, bias = data.draw(st.integers(1, 70)), data.draw(st.booleans())
    for dtype in (torch.float32, torch.bfloat16):
        assert_product(NativeOps(library, dtype), exact, weights, rows, bias)


@pytest.mark.parametrize("inputs", [48, 576])
def test_a_row_has_the_same_bits_in_every_batch(native: NativeOps, inputs: int) -> None:
    weights = [every_format(70, inputs)[name] for name in ("float32", "bfloat16")]
    weights += [quantized(40, inputs, 16, bits, True, True) for bits in (4, 8)]
    packed = native.pack_linear(weights, torch.randn(220))
    x = torch.randn(max(BATCHES), inputs).to(native.dtype)
    alone = torch.cat([native.linear(x[row : row + 1], packed) for row in range(len(x))])
    for rows in BATCHES:
        assert torch.equal(native.linear(x[:rows], packed), alone[:rows]), f"{rows} rows"
        assert torch.equal(native.linear(x[-rows:].contiguous(), packed), alone[-rows:]), f"last {rows} rows"


def test_many_rows_are_shared_between_threads_without_a_trace(library: Library) -> None:
    ops = NativeOps(library, torch.bfloat16)
    packed = ops.pack_linear([quantized(33, 64, 32, 4, True, True)])
    x = torch.randn(1000, 64).bfloat16()
    expected = ops.linear(x, packed)
    threads = library.num_threads()
    try:
        for count in (1, 3, 5):
            library.set_num_threads(count)
            assert library.num_threads() == count
            assert torch.equal(ops.linear(x, packed), expected)
    finally:
        library.set_num_threads(threads)


def test_no_rows_no_outputs(native: NativeOps) -> None:
    packed = native.pack_linear([DenseWeight(torch.randn(8, 32))])
    assert native.linear(torch.empty(0, 32, dtype=native.dtype), packed).shape == (0, 8)


def test_embeddings_are_rows_of_the_packed_head(native: NativeOps, dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 49, 17, 17, 3], dtype=torch.int32)
    for weight in every_format(50, 48).values():
        head = native.pack_linear([weight])
        tied, own = native.pack_embedding(weight, tied=head), native.pack_embedding(weight)
        dense = weight.values.float() if isinstance(weight, DenseWeight) else weight.dequantize()
        expected = dense[ids.long()].to(dtype)
        rounding = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(native.embed(ids, tied), expected, **rounding)
        torch.testing.assert_close(native.embed(ids, own), expected, **rounding)
        assert tied.num_bytes == 0
        assert own.num_bytes > 0


def test_an_id_outside_the_vocabulary_is_an_error(native: NativeOps) -> None:
    table = native.pack_embedding(DenseWeight(torch.randn(10, 32)))
    for bad in (10, -1):
        with pytest.raises(IndexError, match="vocabulary of 10"):
            native.embed(torch.tensor([1, bad]), table)


def test_four_bits_stay_four_bits(library: Library) -> None:
    weight = quantized(64, 576, 32, 4, offsets=True, exact_halves=True)
    packed = NativeOps(library, torch.bfloat16).pack_linear([weight])
    assert packed.num_bytes * 8 / (64 * 576) == 5.0


def test_bad_stacks_are_refused(library: Library) -> None:
    ops = NativeOps(library, torch.float32)
    with pytest.raises(ValueError, match="32 and 16 inputs"):
        ops.pack_linear([DenseWeight(torch.randn(4, 32)), DenseWeight(torch.randn(4, 16))])
    with pytest.raises(ValueError, match="groups of 8"):
        ops.pack_linear(
            [GroupQuantWeight(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 4), None, 8, 8)]
        )


def test_memory_comes_back(library: Library) -> None:
    """Packed matrices share large pieces of memory; what remains after some go must stay intact."""
    ops = NativeOps(library, torch.float32)
    weights = [torch.randn(200, 256) for _ in range(20)]
    packed = [ops.pack_linear([DenseWeight(weight)]) for weight in weights]
    x = torch.randn(2, 256)
    del packed[::2]
    gc.collect()
    packed += [ops.pack_linear([DenseWeight(weight)]) for weight in weights[::2]]
    for matrix, weight in zip(packed, weights[1::2] + weights[::2], strict=True):
        torch.testing.assert_close(ops.linear(x, matrix), x @ weight.T, rtol=1e-4, atol=1e-3)
