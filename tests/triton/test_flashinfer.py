"""Steps that go to FlashInfer: what it is told of them, checked by a stand-in that computes attention from nothing
else; and which steps never go there. (`tests/gpu` runs the real one where it is installed.)"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from penstock.kernels.reference import TorchOps
from penstock.kernels.triton import flashinfer_attention
from penstock.kernels.triton import ops as triton_ops
from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
from penstock.kernels.triton.ops import TritonOps
from tests.triton.cases import BLOCK_SIZE, Bench, Heads, Lengths

CPU = torch.device("cpu")
NUM_BLOCKS = 40


class StandIn:
    """Takes the arguments that FlashInfer documents; pages are [page, head, slot, size], rows are packed."""

    num_plans = 0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "HND")

    def plan(
        self,
        query_starts: Tensor,
        page_starts: Tensor,
        pages: Tensor,
        last_page_lens: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        StandIn.num_plans += 1
        assert all(t.dtype == torch.int32 for t in (query_starts, page_starts, pages, last_page_lens))
        self._rows, self._starts = query_starts.tolist(), page_starts.tolist()
        self._pages, self._last = pages, last_page_lens.tolist()
        self._group, self._page_size, self._settings = num_heads // num_kv_heads, page_size, settings

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        for index, last in enumerate(self._last):
            rows = slice(self._rows[index], self._rows[index + 1])
            pages = self._pages[self._starts[index] : self._starts[index + 1]].long()
            length = (len(pages) - 1) * self._page_size + last
            keys, values = (
                part[pages].transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(self._group, 1)
                for part in cache
            )
            out[rows] = self._attend(q[rows].float(), keys, values).to(q.dtype)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        settings = self._settings
        scores = torch.einsum("nhd,chd->hnc", q, keys) * settings["sm_scale"]
        if settings["logits_soft_cap"] is not None:
            scores = settings["logits_soft_cap"] * torch.tanh(scores / settings["logits_soft_cap"])
        at = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)
        keys_at = torch.arange(len(keys))
        hidden = keys_at > at
        if settings["window_left"] >= 0:
            hidden |= keys_at < at - settings["window_left"]
        return torch.einsum("hnc,chd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    StandIn.num_plans = 0
    return FlashInferAttention(CPU, wherever_possible=True)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (Heads(4, 2, 64), [(33, 1), (16, 1), (40, 7), (0, 3)]),
        (Heads(2, 1, 64, window=9, softcap=3.0), [(0, 11), (16, 5)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("brings_lengths", [True, False])
def test_it_is_told_all_it_needs(
    flashinfer: FlashInferAttention, heads: Heads, lengths: Lengths, brings_lengths: bool
) -> None:
    bench = Bench(CPU, torch.float16)
    backends = TritonOps(CPU, torch.float16, flashinfer=flashinfer), TorchOps(CPU, torch.float16)
    batch, layer = bench.batch(lengths, NUM_BLOCKS), heads.layer(bench, 200)
    if brings_lengths:
        batch = replace(batch, lengths=(batch.query_starts.clone(), batch.context_lens.clone()))
    qkv = bench.normal(len(batch.positions), (heads.count + 2 * heads.kv_count) * heads.size)
    stores = [ops.allocate_kv(2, NUM_BLOCKS, BLOCK_SIZE, heads.kv_count, heads.size) for ops in backends]
    for ours, theirs in zip(stores[0].tensors, stores[1].tensors, strict=True):
        theirs.copy_(torch.randn(theirs.shape))
        ours[:, :NUM_BLOCKS] = theirs.transpose(2, 3)
    for index in range(2):
        got, wanted = (
            ops.attend(qkv, layer, store.layer(index), batch).float()
            for ops, store in zip(backends, stores, strict=True)
        )
        assert float((got - wanted).norm() / wanted.norm()) < 2e-3
    assert StandIn.num_plans == 1  # for both layers
    backends[0].attend(qkv, layer, stores[0].layer(0), replace(batch))
    assert StandIn.num_plans == 2  # for another step


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype", "is_for_it"),
    [
        (64, torch.float16, None, True),
        (64, torch.float16, torch.int8, False),
        (64, torch.float16, torch.float8_e4m3fn, False),
        (80, torch.float16, None, False),
        (64, torch.float32, None, False),
    ],
)
def test_what_it_has_no_kernels_for_stays(
    flashinfer: FlashInferAttention,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    is_for_it: bool,
) -> None:
    _attend(TritonOps(CPU, dtype, kv_dtype, flashinfer=flashinfer), [(33, 1), (0, 4)], head_dim)
    assert StandIn.num_plans == int(is_for_it)


def test_layers_with_sinks_stay(flashinfer: FlashInferAttention) -> None:
    ops = TritonOps(CPU, torch.float16, flashinfer=flashinfer)
    _attend(ops, [(33, 1), (0, 4)], sinks=True)
    assert StandIn.num_plans == 0


@pytest.fixture
def a_small_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("LONG_CHUNK", 5),
        ("LONG_CONTEXT", 20),
        ("ROWS_THAT_FILL_THE_CHIP", 24),
        ("MANY_ROWS", 48),
    ):
        monkeypatch.setattr(flashinfer_attention, name, value)


@pytest.mark.parametrize(
    ("lengths", "is_for_it"),
    [
        ([(14, 6)], True),
        ([(13, 6)], False),  # sees too little
        ([(16, 4), (16, 4)], False),  # short chunks
        ([(15, 5)], False),  # too few rows
        ([(0, 12)], True),  # many rows
        ([(0, 11)], False),
        ([(40, 1), (41, 1)], False),
        ([(40, 1), (41, 1), (14, 6)], True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("flashinfer", "a_small_chip")
def test_by_default_it_gets_what_it_is_faster_at(
    lengths: Lengths, is_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_triton: list[int] = []

    def count(q: Tensor, *_: object) -> None:
        by_triton.append(len(q))

    monkeypatch.setattr(triton_ops, "prefill_attention", count)
    ops = TritonOps(CPU, torch.float16, flashinfer=FlashInferAttention(CPU, wherever_possible=False))
    # Its kernels are built for the first step that could use them, in the warm-up; and so are Triton's.
    _attend(ops, [(0, 2)])
    assert StandIn.num_plans == 1
    assert by_triton == [2]
    _attend(ops, lengths)
    assert StandIn.num_plans == 1 + int(is_for_it)
    has_prompts = any(count > 1 for _, count in lengths)
    assert len(by_triton) == 1 + int(has_prompts and not is_for_it)


class Broken(StandIn):
    def plan(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("there is no nvcc")


@pytest.mark.usefixtures("flashinfer")
def test_where_it_cannot_build_its_kernels_triton_goes_on_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", Broken)
    by_default, insisting = (
        TritonOps(
            CPU, torch.float16, flashinfer=FlashInferAttention(CPU, wherever_possible=wherever_possible)
        )
        for wherever_possible in (False, True)
    )
    lengths = [(15, 5)]
    alone = _attend(TritonOps(CPU, torch.float16), lengths)
    assert torch.equal(_attend(by_default, lengths), alone)
    assert torch.equal(_attend(by_default, lengths), alone)
    assert caplog.text.count("there is no nvcc") == 1
    with pytest.raises(RuntimeError, match="no nvcc"):
        _attend(insisting, lengths)


def _attend(ops: TritonOps, lengths: Lengths, head_dim: int = 64, sinks: bool = False) -> Tensor:
    torch.manual_seed(0)
    bench, heads = Bench(CPU, ops.dtype), Heads(4, 2, head_dim, sinks=sinks)
    batch = bench.batch(lengths, NUM_BLOCKS)
    store = ops.allocate_kv(1, NUM_BLOCKS, BLOCK_SIZE, heads.kv_count, head_dim)
    qkv = bench.normal(len(batch.positions), (heads.count + 2 * heads.kv_count) * head_dim)
    return ops.attend(qkv, heads.layer(bench, 200), store.layer(0), batch)
