"""Products with adapters, compared with products of matrices that have them merged in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.adapted import NO_ADAPTER, AdaptedProduct, Adapters, Delta, adapters_on
from penstock.kernels.interface import DenseWeight, Ops

EPS = 1e-5


def copy_into(target: Tensor, array: NDArray[Any]) -> None:
    target[: array.size].copy_(torch.from_numpy(array))


class Case:
    """A gated MLP whose products have adapters of these ranks: gate, up and down of each adapter, 0 for a matrix that
    it leaves alone."""

    def __init__(
        self, ops: Ops, ranks: Sequence[tuple[int, int, int]], hidden: int = 256, inner: int = 384
    ) -> None:
        self.ops = ops
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        self.weights = [torch.randn(shape) * 0.06 for shape in shapes]
        self.pairs = [
            [
                (torch.randn(rank, width) * 0.1, torch.randn(height, rank) * 0.1)
                for rank, (height, width) in zip(own, shapes, strict=True)
            ]
            for own in ranks
        ]
        self.packed = [
            ops.pack_linear([DenseWeight(weight) for weight in stack])
            for stack in (self.weights[:2], self.weights[2:])
        ]
        products = [
            AdaptedProduct(self.packed[0], (inner, inner), hidden),
            AdaptedProduct(self.packed[1], (hidden,), inner),
        ]
        self.adapters: Adapters = adapters_on(ops, products, len(ranks) + 1)
        for slot, pairs in enumerate(self.pairs):
            taken = [pair if pair[0].shape[0] else None for pair in pairs]
            deltas = {
                index: Delta(product.heights, product.columns, tuple(part))
                for index, (product, part) in enumerate(zip(products, (taken[:2], taken[2:]), strict=True))
                if any(part)
            }
            self.adapters.load(slot, self.adapters.pack(deltas))

    def expected(self, x: Tensor, slot: int) -> Tensor:
        gate, up, down = (
            weight if slot == NO_ADAPTER else weight + self.pairs[slot][index][1] @ self.pairs[slot][index][0]
            for index, weight in enumerate(self.weights)
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def worst_error(self, slots: Sequence[int]) -> float:
        """Relative to the largest value, of the MLP alone and behind a norm, in place."""
        hidden = self.weights[0].shape[1]
        x, norm = torch.randn(len(slots), hidden), torch.rand(hidden) + 0.5
        self.adapters.use(np.array(slots, dtype=np.int32), copy_into)
        ops = self.adapters.around(self.ops)
        given = x.to(self.ops.device, self.ops.dtype)
        x = given.float().cpu()
        made = ops.mlp(given, *self.packed, "silu")
        normed = x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * norm
        residual = given.clone()
        ops.mlp_block(residual, norm.to(self.ops.device), EPS, *self.packed, "silu")
        errors = []
        for got, inputs, added in ((made, x, 0.0), (residual, normed, x)):
            rows = [self.expected(row, slot) for row, slot in zip(inputs, slots, strict=True)]
            expected = torch.stack(rows) + added
            errors.append(float((got.float().cpu() - expected).abs().max() / expected.abs().max()))
        return max(errors)
