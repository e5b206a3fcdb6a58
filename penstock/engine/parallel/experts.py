"""Whole experts on different ranks: tokens travel to the ranks of their experts, and what those make of them back.

A pair is a token and one of its experts. Each rank takes a share of the tokens and sends every pair to the rank that
has the expert (all-to-all); results return the same way, are weighted and summed, and the shares are put together
again. For few tokens that is many small messages, and the host learns its sizes only at the last moment. So a step of
few tokens, and one that a CUDA graph records, lets every rank compute its own experts' pairs of all tokens instead,
and adds the results up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.parallel.mesh import TensorGroup
from penstock.kernels.blocks import route
from penstock.kernels.interface import Activation, Ops, PackedExperts, Routing
from penstock.models.sharding import balanced

FEW_TOKENS = 32
# As a router's logit, it leaves all other experts a share of exactly 0.
_CERTAIN = 1e4


@dataclass(frozen=True, slots=True)
class _OwnExperts:
    """The experts of this rank, among those of all."""

    ops: Ops
    packed: PackedExperts
    span: range
    activation: Activation

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]: each row through one of them, given by its number among all."""
        if not rows.shape[0]:
            return rows
        logits = torch.zeros(rows.shape[0], len(self.span), dtype=torch.float32, device=rows.device)
        logits.scatter_(1, (chosen - self.span.start).unsqueeze(1), _CERTAIN)
        routing = Routing(len(self.span), 1, normalizes=True)
        return self.ops.moe(rows, logits, self.packed, routing, self.activation)


class PlacedExperts:
    def __init__(self, ops: Ops, group: TensorGroup) -> None:
        self._ops = ops
        self._group = group

    def run(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, routing: Routing, activation: Activation
    ) -> Tensor:
        """What `Ops.moe` does, of `x` and `logits` that are the same on all ranks, with this rank's `experts`."""
        placement = balanced(routing.num_experts, self._group.size)
        own = _OwnExperts(self._ops, experts, placement[self._group.rank], activation)
        weights, chosen = route(logits, routing)
        if x.shape[0] <= FEW_TOKENS or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._add_up(x, weights, chosen, own)
        return self._exchange(x, weights, chosen, own, placement)

    def _add_up(self, x: Tensor, weights: Tensor, chosen: Tensor, own: _OwnExperts) -> Tensor:
        top_k = chosen.shape[1]
        is_own = (chosen >= own.span.start) & (chosen < own.span.stop)
        if x.is_cuda:
            # No size may depend on values: the others' pairs are computed too, in vain, by an expert that is here.
            chosen = torch.where(is_own, chosen, own.span.start)
            pairs = torch.arange(chosen.numel(), device=x.device)
        else:
            pairs = is_own.flatten().nonzero().squeeze(1)
        of_pairs = x.new_zeros(chosen.numel(), x.shape[1])
        of_pairs[pairs] = own.run(x[pairs // top_k], chosen.flatten()[pairs])
        of_pairs = of_pairs.view(-1, top_k, x.shape[1]).masked_fill_(~is_own.unsqueeze(2), 0)
        return self._group.add_up(_weighted(of_pairs, weights))

    def _exchange(
        self, x: Tensor, weights: Tensor, chosen: Tensor, own: _OwnExperts, placement: tuple[range, ...]
    ) -> Tensor:
        group, top_k = self._group, chosen.shape[1]
        shares = balanced(x.shape[0], group.size)
        share = slice(shares[group.rank].start, shares[group.rank].stop)
        wanted = chosen[share].flatten()
        last_experts = torch.tensor([span.stop - 1 for span in placement], device=x.device)
        holders = torch.searchsorted(last_experts, wanted)
        order = torch.argsort(holders, stable=True)
        counts = torch.bincount(holders, minlength=group.size)
        sent, received = counts.tolist(), group.exchange_counts(counts).tolist()
        arrived = group.exchange(x[share][order // top_k], sent, received)
        made = own.run(arrived, group.exchange(wanted[order], sent, received))
        returned = group.exchange(made, received, sent)
        of_pairs = torch.empty_like(returned)
        of_pairs[order] = returned
        total = _weighted(of_pairs.view(-1, top_k, x.shape[1]), weights[share])
        return group.join_rows(total, [len(span) for span in shares])


def _weighted(of_pairs: Tensor, weights: Tensor) -> Tensor:
    """[T, K, hidden], [T, K] → [T, hidden]"""
    return (of_pairs.float() * weights.unsqueeze(2)).sum(dim=1).to(of_pairs.dtype)
