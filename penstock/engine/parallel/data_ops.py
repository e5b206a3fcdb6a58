"""`DataParallelOps` is a backend for ranks that each have tokens of their own, and share experts alone.

Every rank has all attention heads and dense layers, so all operations but the experts are those of the wrapped
backend. In a layer with experts, tokens travel to the ranks of their experts and back; all ranks exchange together.
A rank without tokens runs no model. It repeats only the exchanges of a step, as it has seen them in a rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.parallel.experts import (
    ExpertBalance,
    held,
    pack_balanced,
    places_of,
    through_experts,
)
from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.blocks import DelegatingOps, route
from penstock.kernels.interface import Activation, ExpertWeights, Ops, PackedExperts, Routing


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A layer's exchange, as every step makes it."""

    experts: PackedExperts
    num_experts: int
    top_k: int
    activation: Activation
    width: int  # of the rows that travel


class SharedExperts:
    """The experts that the ranks share, in the order in which a step of the model uses them."""

    def __init__(self, ops: Ops, group: TensorGroup) -> None:
        self._ops = ops
        self._group = group
        self._exchanges: list[_Exchange] = []
        self._is_rehearsing = False

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Note the exchanges of a step, which all ranks run together."""
        self._exchanges, self._is_rehearsing = [], True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def run(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """Compute `Ops.moe` of this rank's tokens."""
        if self._is_rehearsing:
            layer = _Exchange(experts, routing.num_experts, routing.top_k, activation, x.shape[1])
            self._exchanges.append(layer)
        weights, chosen = route(logits, routing)
        chosen = places_of(chosen, experts)
        own, placement = held(self._ops, experts, routing.num_experts, activation, self._group)
        into = None
        if routing.weighs_input:  # of each pair, instead of its output
            into, weights = weights.flatten().unsqueeze(1), torch.ones_like(weights)
        return through_experts(x, into, weights, chosen, own, placement, self._group)

    def serve(self) -> None:
        """Take part in a step of other ranks without a token of its own."""
        ops = self._ops
        for each in self._exchanges:
            own, placement = held(ops, each.experts, each.num_experts, each.activation, self._group)
            rows = torch.empty(0, each.width, dtype=ops.dtype, device=ops.device)
            weights = torch.empty(0, each.top_k, device=ops.device)
            chosen = torch.empty(0, each.top_k, dtype=torch.int64, device=ops.device)
            through_experts(rows, None, weights, chosen, own, placement, self._group)


class DataParallelOps(DelegatingOps):
    def __init__(self, ops: Ops, shared: SharedExperts, balance: ExpertBalance | None = None) -> None:
        super().__init__(ops)
        self._shared = shared
        self._balance = balance

    def pack_experts(self, experts: Iterable[ExpertWeights]) -> Any:
        if self._balance is None:
            return self._ops.pack_experts(experts)
        return pack_balanced(self._ops, experts, self._balance)

    def moe(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        return self._shared.run(x, logits, experts, routing, activation)
