"""Layers with a fixed state, in any mix of decodes and chunks of prompts, against one token at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.recurrence import channel_delta, channel_scan, gated_delta, selective_scan, short_conv
from penstock.kernels.states import (
    ChannelDeltaLayer,
    ChannelScanLayer,
    DeltaLayer,
    ScanLayer,
    StateBatch,
    StateStore,
)

NUM_SLOTS = 5
# The tokens of three requests, in steps: decodes first, as in a plan.
STEPS = [[70, 5, 1], [1, 1, 130], [1, 1, 1], [1, 64, 63]]
SLOTS = (3, 0, 4)


@dataclass
class Case:
    """The tokens of three requests: [total, …] inputs, and how each step takes some of them."""

    store: StateStore
    inputs: list[list[Tensor]]  # by request

    def outputs(self, step_of: object) -> list[Tensor]:
        """Run all steps. Returns the outputs by request."""
        taken = [0, 0, 0]
        made: list[list[Tensor]] = [[], [], []]
        for lengths in STEPS:
            order = sorted(range(3), key=lambda request: lengths[request] > 1)
            counts = [lengths[request] for request in order]
            parts = [
                [each[taken[request] : taken[request] + lengths[request]] for each in self.inputs[request]]
                for request in order
            ]
            joined = [torch.cat(columns) for columns in zip(*parts, strict=True)]
            out = step_of(joined, self.batch(counts, [SLOTS[request] for request in order]))  # type: ignore[operator]
            for request, piece in zip(order, torch.split(out, counts), strict=True):
                made[request].append(piece)
                taken[request] += lengths[request]
        return [torch.cat(pieces) for pieces in made]

    def batch(self, counts: list[int], slots: list[int]) -> AttentionBatch:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        nothing = torch.zeros(0, dtype=torch.int32)
        return AttentionBatch(
            nothing,
            nothing,
            starts,
            nothing,
            nothing,
            num_requests=len(counts),
            max_query_len=max(counts),
            max_context_len=0,
            num_decodes=counts.count(1) if counts == sorted(counts, key=lambda count: count > 1) else 0,
            lengths=(starts, nothing),
            states=StateBatch(self.store, torch.tensor(slots)),
        )


def case(shapes: list[tuple[int, ...]], state: tuple[int, ...]) -> Case:
    torch.manual_seed(0)
    totals = [sum(step[request] for step in STEPS) for request in range(3)]
    inputs = [[torch.randn(total, *shape) for shape in shapes] for total in totals]
    store = StateStore([(state,)], NUM_SLOTS, torch.device("cpu"))
    (tensor,) = store.layer(0)
    tensor.normal_()
    for slot in SLOTS:
        store.clear(slot)
    return Case(store, inputs)


def others_are_untouched(case: Case, before: Tensor) -> None:
    (tensor,) = case.store.layer(0)
    for slot in set(range(NUM_SLOTS)) - set(SLOTS):
        assert torch.equal(tensor[slot], before[slot])


@pytest.mark.parametrize("silu", [False, True])
def test_short_convolutions_follow_their_definition(silu: bool) -> None:
    made = case([(6,)], (6, 3))
    weight, bias = torch.randn(6, 4), torch.randn(6)
    (history,) = made.store.layer(0)
    before = history.clone()
    outputs = made.outputs(lambda x, batch: short_conv(x[0], weight, bias, history, batch, silu=silu))
    for (x,), out in zip(made.inputs, outputs, strict=True):
        expected = torch.nn.functional.conv1d(
            x.double().T, weight.double()[:, None], bias.double(), padding=3, groups=6
        )
        expected = expected[:, : len(x)].T
        expected = torch.nn.functional.silu(expected) if silu else expected
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    others_are_untouched(made, before)


def test_short_convolutions_give_the_same_bits_alone_and_in_one_chunk() -> None:
    made = case([(6,)], (6, 2))
    weight = torch.randn(6, 3)
    (history,) = made.store.layer(0)
    outputs = made.outputs(lambda x, batch: short_conv(x[0], weight, None, history, batch, silu=False))
    whole = made.inputs[0][0]
    history[1].zero_()
    alone = short_conv(whole, weight, None, history, made.batch([len(whole)], [1]), silu=False)
    assert torch.equal(alone, outputs[0])


def test_selective_scans_follow_their_definition() -> None:
    heads, size, groups, width = 6, 4, 3, 5
    made = case([(heads, size), (heads,), (groups, width), (groups, width)], (heads, size, width))
    layer = ScanLayer(
        decay=-torch.rand(heads) * 4,
        skip=torch.randn(heads),
        step_bias=torch.randn(heads),
        groups=torch.arange(heads) // 2,
        step_limits=(0.01, 1.5),
    )
    (state,) = made.store.layer(0)
    before = state.clone()
    outputs = made.outputs(lambda parts, batch: selective_scan(*parts, layer, state, batch))
    for (x, step, read, write), out in zip(made.inputs, outputs, strict=True):
        hidden = torch.zeros(heads, size, width, dtype=torch.float64)
        steps = torch.nn.functional.softplus(step.double() + layer.step_bias).clamp(0.01, 1.5)
        for token in range(len(x)):
            dt = steps[token][:, None, None]
            grown = x[token].double()[:, :, None] * write[token].double()[layer.groups][:, None]
            hidden = hidden * (dt * layer.decay[:, None, None]).exp() + dt * grown
            expected = (hidden * read[token].double()[layer.groups][:, None]).sum(-1)
            expected += layer.skip[:, None] * x[token]
            torch.testing.assert_close(out[token].double(), expected, atol=1e-4, rtol=1e-4)
    others_are_untouched(made, before)


def test_channel_scans_follow_their_definition() -> None:
    channels, width = 6, 5
    made = case([(channels,), (channels,), (width,), (width,)], (channels, width))
    layer = ChannelScanLayer(
        decay=-torch.rand(channels, width) * 4, skip=torch.randn(channels), step_bias=torch.randn(channels)
    )
    (state,) = made.store.layer(0)
    before = state.clone()
    outputs = made.outputs(lambda parts, batch: channel_scan(*parts, layer, state, batch))
    for (x, step, read, write), out in zip(made.inputs, outputs, strict=True):
        hidden = torch.zeros(channels, width, dtype=torch.float64)
        steps = torch.nn.functional.softplus(step.double() + layer.step_bias)
        for token in range(len(x)):
            dt, grown = steps[token][:, None], x[token].double()[:, None] * write[token].double()
            hidden = hidden * (dt * layer.decay).exp() + dt * grown
            expected = hidden @ read[token].double() + layer.skip * x[token]
            torch.testing.assert_close(out[token].double(), expected, atol=1e-4, rtol=1e-4)
    others_are_untouched(made, before)


@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rules_follow_their_definition(by_channel: bool) -> None:
    heads, width, size = 4, 8, 5
    keys, decays = (heads, width) if by_channel else (2, 1)
    made = case([(2 * keys * width + heads * size,), (heads,), (heads * decays,)], (heads, width, size))
    head_of, speed, bias = (
        torch.arange(heads) * keys // heads,
        -torch.rand(heads) * 4,
        torch.randn(heads, decays),
    )
    layer = DeltaLayer(speed, bias.flatten(), head_of, keys, width, largest_rate=1.5)
    of_channels = ChannelDeltaLayer(speed, bias)
    (state,) = made.store.layer(0)
    before = state.clone()
    outputs = made.outputs(
        lambda parts, batch: (
            channel_delta(*parts, of_channels, state, batch)
            if by_channel
            else gated_delta(*parts, layer, state, batch)
        )
    )
    for (mixed, rates, steps), out in zip(made.inputs, outputs, strict=True):
        parts = mixed.double().split([keys * width, keys * width, heads * size], dim=1)
        query, key = (each.unflatten(1, (keys, width))[:, head_of] for each in parts[:2])
        query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query * width, key))
        value, rate = parts[2].unflatten(1, (heads, size)), rates.double().sigmoid()
        rate = rate if by_channel else rate * 1.5
        decay = torch.nn.functional.softplus(steps.double().unflatten(1, (heads, decays)) + bias)
        hidden = torch.zeros(heads, width, size, dtype=torch.float64)
        for token in range(len(value)):
            hidden = hidden * (decay[token] * speed[:, None]).exp()[:, :, None]
            known = (hidden * key[token][:, :, None]).sum(1)
            change = (value[token] - known) * rate[token][:, None]
            hidden = hidden + key[token][:, :, None] * change[:, None]
            expected = (hidden * query[token][:, :, None]).sum(1) * width**-0.5
            torch.testing.assert_close(out[token].double(), expected, atol=1e-4, rtol=1e-4)
    others_are_untouched(made, before)


def test_states_are_copied_cleared_and_kept_on_the_host() -> None:
    store = StateStore([((2, 3), (4,)), ((5,),)], 3, torch.device("cpu"))
    assert store.slot_bytes == (6 + 4 + 5) * 4
    store.reserve_host(2)
    for index in range(2):
        for tensor in store.layer(index):
            tensor[0].normal_()
    kept = [tensor[0].clone() for index in range(2) for tensor in store.layer(index)]

    def of_slot(slot: int) -> list[Tensor]:
        return [tensor[slot] for index in range(2) for tensor in store.layer(index)]

    store.copy(0, 2)
    store.copy_to_host(2, 1)
    store.clear(0)
    store.clear(2)
    assert all(not part.any() for part in of_slot(2))
    store.copy_from_host(1, 1)
    assert all(torch.equal(*pair) for pair in zip(of_slot(1), kept, strict=True))
