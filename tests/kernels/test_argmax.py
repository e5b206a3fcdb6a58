"""The argmax of a product is the token that a greedy sample takes of its logits."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import DenseWeight, PackedLinear, SamplingBatch
from penstock.kernels.library import Library
from penstock.kernels.native import NativeOps
from tests.kernels.test_integer_products import stack

HIDDEN, VOCABULARY = 96, 777
ROWS = (1, 2, 17, 32, 40, 150)  # of which many are cut into pieces


def greedy(ops: NativeOps, x: torch.Tensor, head: PackedLinear) -> torch.Tensor:
    logits = ops.logits(x, head)
    rows = len(x)
    nothing = torch.zeros(rows)
    settings = SamplingBatch(
        temperature=nothing,
        top_k=nothing.int(),
        top_p=nothing + 1,
        min_p=nothing,
        seed=nothing.long(),
        position=nothing.long(),
        all_greedy=True,
    )
    return ops.sample(logits, settings)


@pytest.mark.parametrize("bias", [False, True])
def test_of_plain_weights(native: NativeOps, bias: bool) -> None:
    added = torch.randn(VOCABULARY) if bias else None
    head = native.pack_linear([DenseWeight(torch.randn(VOCABULARY, HIDDEN))], added)
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).to(native.dtype)
        assert torch.equal(native.argmax(x, head), greedy(native, x, head))


@pytest.mark.parametrize("sizes", [[VOCABULARY], [400, 377]], ids=["one", "stacked"])
def test_of_whole_numbers(library: Library, isa: str, sizes: list[int]) -> None:
    ops = NativeOps(library, torch.bfloat16, integer_products=True)
    head = ops.pack_linear(stack(sizes, HIDDEN))
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).bfloat16()
        assert torch.equal(ops.argmax(x, head), greedy(ops, x, head))


def test_of_equals_the_first_is_taken(native: NativeOps) -> None:
    """Wherever they are, and whatever the sign of a zero."""
    weight = -torch.ones(VOCABULARY, HIDDEN)
    weight[[5, 6, 300, 776]] = 1.0
    head = native.pack_linear([DenseWeight(weight)])
    x = torch.ones(3, HIDDEN).to(native.dtype)
    assert native.argmax(x, head).tolist() == [5, 5, 5]
    zeros = torch.zeros(VOCABULARY, HIDDEN)
    zeros[: VOCABULARY // 2] = -0.0
    assert native.argmax(x, native.pack_linear([DenseWeight(zeros)])).tolist() == [0, 0, 0]


def test_rows_without_a_usable_logit_give_minus_one_and_spare_the_others(native: NativeOps) -> None:
    head = native.pack_linear([DenseWeight(torch.rand(VOCABULARY, HIDDEN) + 0.1)])
    x = torch.rand(40, HIDDEN).to(native.dtype)
    x[0, 0], x[17, 3], x[39, 5] = float("nan"), float("inf"), float("-inf")
    chosen = native.argmax(x, head)
    assert torch.equal(chosen, greedy(native, x, head))
    assert (chosen == -1).nonzero().flatten().tolist() == [0, 17, 39]


def test_no_rows(native: NativeOps) -> None:
    head = native.pack_linear([DenseWeight(torch.randn(VOCABULARY, HIDDEN))])
    assert native.argmax(torch.empty(0, HIDDEN).to(native.dtype), head).tolist() == []


@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_number_of_threads_finds_the_same(library: Library, num_threads: int) -> None:
    ops = NativeOps(library, torch.bfloat16, integer_products=True)
    head = ops.pack_linear(stack([VOCABULARY], HIDDEN))
    x = torch.randn(40, HIDDEN).bfloat16()
    expected = ops.argmax(x, head)
    own_threads = library.num_threads()
    try:
        library.set_num_threads(num_threads)
        assert torch.equal(ops.argmax(x, head), expected)
    finally:
        library.set_num_threads(own_threads)
