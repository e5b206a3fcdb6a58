"""The operations of a GPU with attention cut out of them, run in one go and not recorded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from penstock.kernels.interface import Attend, CutsAtAttention
from penstock.models.load import load_model
from tests.engine.tiny import write_tiny_model
from tests.triton.cases import BLOCK_SIZE, Bench

NUM_BLOCKS = 24
SPARE_SLOT = NUM_BLOCKS * BLOCK_SIZE
PADDED, MOST = 32, 40


def test_a_padded_pass_with_attention_cut_out_is_the_same(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), torch.float32)
    ops = bench.ops
    assert isinstance(ops, CutsAtAttention)
    model = load_model(write_tiny_model(tmp_path / "tiny"), ops, load_format="random")
    batch = bench.batch([(33, 1), (7, 1), (20, 5), (0, 12)], NUM_BLOCKS)
    count = len(batch.positions)
    token_ids = bench.int32(range(3, 3 + count))
    stores = [ops.allocate_kv(model.num_layers, NUM_BLOCKS, BLOCK_SIZE, 2, 16) for _ in range(2)]
    for store in stores:
        torch.manual_seed(0)
        store.keys.normal_()
        store.values.normal_()
    expected = model.forward(token_ids, batch, stores[0])

    num_cuts = 0

    def cut(attend: Attend) -> None:
        nonlocal num_cuts
        num_cuts += 1
        attend(batch)

    place = torch.zeros(MOST, 4, 16)
    twin = model.with_ops(ops.cut_at_attention(cut, place, torch.zeros_like(place)))
    padding = (0, PADDED - count)
    padded = replace(
        batch, positions=F.pad(batch.positions, padding), slots=F.pad(batch.slots, padding, value=SPARE_SLOT)
    )
    got = twin.forward(F.pad(token_ids, padding), padded, stores[1])
    assert num_cuts == model.num_layers
    assert torch.isfinite(got).all()  # the rows of nobody too: experts are chosen by them
    torch.testing.assert_close(got[:count], expected, rtol=1e-4, atol=1e-4)
    owned = slice(0, NUM_BLOCKS)
    torch.testing.assert_close(stores[1].keys[:, owned], stores[0].keys[:, owned], rtol=1e-4, atol=1e-4)
