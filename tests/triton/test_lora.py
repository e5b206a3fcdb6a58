"""The kernels of LoRA adapters in Triton's interpreter: several adapters of different ranks in one launch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from penstock.kernels.triton import lora
from penstock.kernels.triton.ops import TritonOps
from tests.kernels.adapted_case import Case, copy_into

CPU = torch.device("cpu")
RANKS = [(16, 16, 16), (4, 0, 20), (0, 7, 0), (40, 20, 16)]
SLOTS = [-1, 0, 3, 1, 2, 0, 0, -1, 3]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of a width, and few programs, since the interpreter takes milliseconds for each."""
    for name, value in (("MOST_SPLITS", 2), ("SHRINK_OUTPUTS", 64), ("MOST_AT_ONCE", 16)):
        monkeypatch.setattr(lora, name, value)


@pytest.mark.parametrize("inner", [128, 72], ids=["sliced", "joined"])
def test_adapters_of_different_ranks_in_one_batch(inner: int) -> None:
    case = Case(TritonOps(CPU, torch.float32), RANKS, hidden=96, inner=inner)
    for slots in (SLOTS, [3] * 17):
        assert case.worst_error(slots) < 1e-5, slots


def test_two_bytes_stay_close() -> None:
    assert Case(TritonOps(CPU, torch.float16), RANKS[:2], hidden=64, inner=64).worst_error([1, 0]) < 3e-3


def test_a_slot_takes_another_adapter() -> None:
    """What a graph has recorded stays valid: tables and tiles keep their addresses."""
    case = Case(TritonOps(CPU, torch.float32), RANKS[:2], hidden=64, inner=64)
    adapters, version = case.adapters, case.adapters.version
    adapters.use(np.array([0, 1], dtype=np.int32), copy_into)
    before = adapters.tiles  # type: ignore[attr-defined]
    packed = adapters.pack({})
    adapters.unload(1)
    adapters.load(1, packed)
    case.pairs[1] = [(left * 0, right) for left, right in case.pairs[1]]
    assert case.worst_error([1, 0]) < 1e-5
    after = adapters.tiles  # type: ignore[attr-defined]
    assert (after.order.data_ptr(), after.fields.data_ptr()) == (
        before.order.data_ptr(),
        before.fields.data_ptr(),
    )
    assert adapters.version == version
    larger = Case(TritonOps(CPU, torch.float32), RANKS, hidden=64, inner=64)
    assert larger.adapters.version > version  # a higher rank needs other launches


@pytest.mark.parametrize("count", [1, 16, 33, 700])
def test_tiles_cover_every_row_once(count: int) -> None:
    slots = np.random.default_rng(count).integers(-1, 5, count).astype(np.int32)
    order, fields = lora.arrange(slots, 5)
    covered = []
    for slot, start, length in fields:
        rows = order[start : start + length]
        assert (slots[rows] == slot).all()
        assert length <= lora.tile_rows(count)
        covered += rows.tolist()
    assert sorted(covered) == list(range(count))
