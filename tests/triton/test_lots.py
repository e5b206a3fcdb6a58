"""The lots that `bench.gpu_trees` draws for trees of drafts."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine", allow_module_level=True)

from bench.gpu_trees import _draw_lots

HIGHS = torch.tensor([0.5, 0.75, 0.85, 0.9, 0.92, 0.93, 0.94, 0.95])
LOWS = torch.cat([torch.zeros(1), HIGHS[:-1]])


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_guess_is_accepted_with_its_chance(is_tree: bool) -> None:
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]]
    bits = [sum(1 << (node - each) for each in paths[node]) - (2 << node) for node in range(1, 5)]
    tokens, ancestors = torch.zeros(2, 32, dtype=torch.int32)
    tokens[16:20], ancestors[16:20] = torch.tensor([10, 14, 20, 21]), torch.tensor(bits)
    first, count, place = (torch.tensor([each], dtype=torch.int32) for each in (0, 4, 16))
    roots, firsts = Counter[int](), Counter[int]()
    for seed in range(150):
        sampled = torch.full((5,), 99)
        _draw_lots[(1,)](
            sampled, first, count, place, tokens, ancestors, LOWS, HIGHS, 1000, seed,
            SHARES=8, IS_TREE=is_tree, SIZE=16,
        )  # fmt: skip
        roots[int(sampled[0])] += 1
        firsts[int(sampled[1])] += 1
        if is_tree:
            assert sampled[2:].tolist() == [99] * 3, "nodes without children keep their samples"
    assert roots[10] / 150 == pytest.approx(0.5, abs=0.12)
    assert firsts[20 if is_tree else 14] / 150 == pytest.approx(0.5, abs=0.12)
    assert (14 in roots) == is_tree
