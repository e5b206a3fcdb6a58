"""Layers with a fixed state against the torch functions that define them, for any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import (
    ChannelDeltaLayer,
    ChannelScanLayer,
    DeltaLayer,
    ScanLayer,
    StateBatch,
    StateStore,
)
from tests.triton.cases import BLOCK_SIZE, Bench


@dataclass(frozen=True, slots=True)
class States:
    """Layers with a fixed state: heads, numbers of a head, groups or key heads, width of a state."""

    heads: int
    size: int
    groups: int
    width: int


def _state_batch(bench: Bench, lengths: list[int], slots: list[int], store: StateStore) -> AttentionBatch:
    batch = bench.batch([(0, count) for count in lengths], sum(count // BLOCK_SIZE + 1 for count in lengths))
    starts = batch.query_starts.cpu()
    states = StateBatch(store, torch.tensor(slots, device=bench.device))
    return replace(batch, lengths=(starts, batch.context_lens.cpu()), states=states)


def state_errors(bench: Bench, shape: States, lengths: list[int]) -> dict[str, float]:
    """The relative errors of outputs and states of each operation, for requests of so many tokens, decodes first."""
    torch.manual_seed(0)
    heads, size, groups, width = shape.heads, shape.size, shape.groups, shape.width
    tokens, slots = sum(lengths), torch.randperm(len(lengths) + 2)[: len(lengths)].tolist()
    device = bench.device

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device)

    def strided(count: int) -> Tensor:
        """Columns of a wider projection."""
        return bench.normal(tokens, count + 9)[:, 5 : count + 5]

    channels, taps = heads * size, 4
    x, gates = strided(channels), (strided(channels), strided(channels))
    weight, bias = normal(channels, taps), normal(channels)
    step, rate, by_head = (
        strided(heads),
        strided(heads),
        (-torch.rand(heads, device=device) * 3, normal(heads)),
    )
    of_group = torch.arange(heads, device=device) // (heads // groups)
    scan = ScanLayer(by_head[0], normal(heads), by_head[1], of_group, (0.001, 2.0))
    by_channel = ChannelScanLayer(
        -torch.rand(channels, width, device=device) * 3, normal(channels), normal(channels)
    )
    delta = DeltaLayer(*by_head, of_group, groups, width, 2.0)
    read, write = (strided(groups * width).unflatten(1, (groups, width)) for _ in range(2))
    mixed, wide_mixed = (strided(2 * count * width + channels) for count in (groups, heads))
    by_key, steps = ChannelDeltaLayer(by_head[0], normal(heads, width)), strided(heads * width)
    calls: dict[str, tuple[tuple[int, ...], Callable[[Any, Tensor, AttentionBatch], Tensor]]] = {
        "conv": ((channels, taps - 1), lambda ops, state, batch: ops.short_conv(
            x, weight, bias, state, batch, silu=True)),
        "gated conv": ((channels, taps - 1), lambda ops, state, batch: ops.short_conv(
            x, weight, None, state, batch, silu=False, before=gates[0], after=gates[1])),
        "scan": ((heads, size, width), lambda ops, state, batch: ops.selective_scan(
            x.unflatten(1, (heads, size)), step, read, write, scan, state, batch)),
        "channel scan": ((channels, width), lambda ops, state, batch: ops.channel_scan(
            x, gates[0], read[:, 0], write[:, 0], by_channel, state, batch)),
        "delta": ((heads, width, size), lambda ops, state, batch: ops.gated_delta(
            mixed, rate, step, delta, state, batch)),
        "channel delta": ((heads, width, size), lambda ops, state, batch: ops.channel_delta(
            wide_mixed, rate, steps, by_key, state, batch)),
    }  # fmt: skip
    found: dict[str, float] = {}
    for name, (state_shape, call) in calls.items():
        store = StateStore([(state_shape,)], len(lengths) + 2, device)
        (state,) = store.layer(0)
        state.normal_()
        other, batch = state.clone(), _state_batch(bench, lengths, slots, store)
        expected = call(bench.exact, other, batch).float()
        made = call(bench.ops, state, batch).float()
        found[name] = max(relative_error(made, expected), relative_error(state, other))
    made, gate = normal(tokens, channels), gates[0]
    for name, norm, first in (("norm", normal(channels), True), ("late norm", normal(channels), False),
                              ("gate", None, True)):  # fmt: skip
        both = [
            ops.gated_norm(made, gate, norm, 1e-5, size, gates_first=first)
            for ops in (bench.ops, bench.exact)
        ]
        found[name] = relative_error(*(each.float() for each in both))
    return found


def relative_error(made: Tensor, expected: Tensor) -> float:
    return float((made - expected).norm() / expected.norm())
