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
    return FlashInferAttention(CPU)


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


def _attend(ops: TritonOps, lengths: Lengths, head_dim: int = 64, sinks: bool = False) -> Tensor:
    torch.manual_seed(0)
    bench, heads = Bench(CPU, ops.dtype), Heads(4, 2, head_dim, sinks=sinks)
    batch = bench.batch(lengths, NUM_BLOCKS)
    store = ops.allocate_kv(1, NUM_BLOCKS, BLOCK_SIZE, heads.kv_count, head_dim)
    qkv = bench.normal(len(batch.positions), (heads.count + 2 * heads.kv_count) * head_dim)
    return ops.attend(qkv, heads.layer(bench, 200), store.layer(0), batch)
