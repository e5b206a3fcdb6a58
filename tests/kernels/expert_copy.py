"""Copies an expert over another through the bytes of both, as ranks do that exchange experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.kernels.interface import ExpertWeights, Ops, PackedExperts, Routing


def copy_expert(packed: PackedExperts, source: int, target: int) -> None:
    for (kind, held), (other, overwritten) in zip(packed.memory(source), packed.memory(target), strict=True):
        assert kind == other
        overwritten.copy_(held)


def check_copied_expert(ops: Ops, experts: Sequence[ExpertWeights], hidden: int) -> None:
    """The last expert, with the bytes of the first, gives what the first gives, and the others what they gave."""
    packed, count = ops.pack_experts(iter(experts)), len(experts)
    x = torch.randn(3, hidden, dtype=ops.dtype, device=ops.device)

    def run(expert: int) -> torch.Tensor:
        logits = torch.zeros(3, count, device=ops.device)
        logits[:, expert] = 1e4
        return ops.moe(x, logits, packed, Routing(count, 1, True), "silu")

    first, second, last = run(0), run(1), run(count - 1)
    assert not torch.equal(first, last)
    copy_expert(packed, 0, count - 1)
    assert torch.equal(run(count - 1), first)
    assert torch.equal(run(0), first)
    assert torch.equal(run(1), second)
