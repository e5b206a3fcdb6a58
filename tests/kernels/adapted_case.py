"""Products with adapters, compared with products of matrices that have them merged in."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.adapted import AdaptedOps, AdaptedRows, PackedDelta
from penstock.kernels.interface import DenseWeight, Ops


def worst_error(ops: Ops, groups: dict[int, list[int]], num_rows: int, rank: int = 16) -> float:
    """Over a gated MLP whose two products have adapters; `groups` says which rows each adapter is for. Relative to
    the largest value."""
    torch.manual_seed(num_rows)
    hidden, inner = 256, 384
    gate_up, down = (torch.randn(shape) * 0.06 for shape in ((2 * inner, hidden), (hidden, inner)))
    packed = [ops.pack_linear([DenseWeight(weight)]) for weight in (gate_up, down)]
    adapted = AdaptedOps(ops, packed)
    x = torch.randn(num_rows, hidden)
    expected = mlp(x, gate_up, down)
    used = []
    for rows in groups.values():
        pairs = [
            (torch.randn(rank, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], rank) * 0.1)
            for weight in (gate_up, down)
        ]
        merged = [weight + right @ left for weight, (left, right) in zip((gate_up, down), pairs, strict=True)]
        expected[rows] = mlp(x[rows], *merged)
        deltas = {
            index: PackedDelta(*(ops.pack_linear([DenseWeight(half)]) for half in pair))
            for index, pair in enumerate(pairs)
        }
        used.append(AdaptedRows(deltas, torch.tensor(rows, dtype=torch.int64, device=ops.device)))
    adapted.use(used)
    made = adapted.mlp(x.to(ops.device, ops.dtype), *packed, "silu").float().cpu()
    return float((made - expected).abs().max() / expected.abs().max())


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ down.T
