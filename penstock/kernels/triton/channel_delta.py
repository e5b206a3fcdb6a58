"""The delta rule of Kimi Linear (`kernels/recurrence.py` defines it). A program has some values of a request's head,
and keeps their part of the state in registers, from one token to the next. All sums are float32, and results do not
depend on the other requests of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import ChannelDeltaLayer
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.recurrence import softplus, unit

STATE_NUMBERS = 2048  # of a program


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def _channel_delta_kernel(
    mixed, rate, step, decay, step_bias, state, slots, starts, out, mixed_stride, rate_stride, step_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, K_PAD)
    columns = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_row, is_column = rows < K, columns < V
    inside = is_row[:, None] & is_column[None, :]
    wait_for_previous()
    start, end = tl.load(starts + request).to(tl.int64), tl.load(starts + request + 1).to(tl.int64)
    at_state = state + ((tl.load(slots + request) * H + head) * K + rows[:, None]) * V + columns[None, :]
    held = tl.load(at_state, mask=inside, other=0.0)
    bias = tl.load(step_bias + head * K + rows, mask=is_row, other=0.0)
    speed = tl.load(decay + head)
    for row in tl.range(start, end):
        here = mixed + row * mixed_stride + head * K + rows
        query = unit(tl.load(here, mask=is_row, other=0.0).to(tl.float32)) * (K**-0.5)
        key = unit(tl.load(here + H * K, mask=is_row, other=0.0).to(tl.float32))
        at_value = mixed + row * mixed_stride + 2 * H * K + head * V + columns
        value = tl.load(at_value, mask=is_column, other=0.0).to(tl.float32)
        learned = 1.0 / (1.0 + tl.exp(-tl.load(rate + row * rate_stride + head).to(tl.float32)))
        size = tl.load(step + row * step_stride + head * K + rows, mask=is_row, other=0.0).to(tl.float32)
        held *= tl.exp(softplus(size + bias) * speed)[:, None]
        change = (value - tl.sum(held * key[:, None], axis=0)) * learned
        held += key[:, None] * change[None, :]
        made = tl.sum(held * query[:, None], axis=0)
        tl.store(out + (row * H + head) * V + columns, made, mask=is_column)
    tl.store(at_state, held, mask=inside)


def channel_delta(
    mixed: Tensor, rate: Tensor, step: Tensor, layer: ChannelDeltaLayer, state: Tensor, batch: AttentionBatch
) -> Tensor:
    assert batch.states is not None
    heads, width, size = state.shape[1:]
    out = torch.empty(mixed.shape[0], heads, size, dtype=torch.float32, device=mixed.device)
    padded = next_power_of_2(width)
    block = max(1, min(next_power_of_2(size), STATE_NUMBERS // padded))
    _channel_delta_kernel[(batch.num_requests, heads, cdiv(size, block))](
        mixed, rate, step, layer.decay, layer.step_bias, state, batch.states.slots, batch.query_starts, out,
        mixed.stride(0), rate.stride(0), step.stride(0),
        H=heads, K=width, V=size, K_PAD=padded, V_BLOCK=block, **launch_options(),
    )  # fmt: skip
    return out
