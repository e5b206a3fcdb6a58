"""The scan of Mamba 1 (`kernels/recurrence.py` defines it). A program has some channels of a request, and keeps their
states in registers. It takes tokens in segments, which it scans in parallel. All sums are float32, and results do not
depend on the other requests of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import ChannelScanLayer
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.recurrence import softplus

SEGMENT = 16  # tokens
SEGMENT_NUMBERS = 4096  # states of a segment's tokens in one program
DECODE_NUMBERS = 1024  # states of a program that decodes


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _decode_kernel(
    x, step, read, write, decay, skip, step_bias, state, slots, out, num_channels,
    x_stride, step_stride, read_stride, write_stride,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, N_PAD)
    is_channel, is_column = channels < num_channels, columns < N
    inside = is_channel[:, None] & is_column[None, :]
    at = channels[:, None] * N + columns[None, :]
    wait_for_previous()
    size = tl.load(step + row * step_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    size = softplus(size + tl.load(step_bias + channels, mask=is_channel, other=0.0))
    inputs = tl.load(x + row * x_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
    writes = tl.load(write + row * write_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    reads = tl.load(read + row * read_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    kept = tl.exp(size[:, None] * tl.load(decay + at, mask=inside, other=0.0))
    at_state = state + tl.load(slots + row) * num_channels * N + at
    new = tl.load(at_state, mask=inside, other=0.0) * kept + (inputs * size)[:, None] * writes[None, :]
    tl.store(at_state, new, mask=inside)
    share = tl.load(skip + channels, mask=is_channel, other=0.0)
    made = tl.sum(new * reads[None, :], axis=1) + share * inputs
    tl.store(out + row * num_channels + channels, made, mask=is_channel)


@triton.jit
def _after(kept, added, later_kept, later_added):
    """Two steps of a recurrence as one."""
    return kept * later_kept, added * later_kept + later_added


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=["slots", "starts"])
def _prompt_kernel(
    x, step, read, write, decay, skip, step_bias, state, slots, starts, out, first_request, num_channels,
    x_stride, step_stride, read_stride, write_stride,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    request = first_request + tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, N_PAD)
    tokens = tl.arange(0, SEGMENT)
    is_channel, is_column = channels < num_channels, columns < N
    inside = is_channel[:, None] & is_column[None, :]
    at = channels[:, None] * N + columns[None, :]
    wait_for_previous()
    start, end = tl.load(starts + request).to(tl.int64), tl.load(starts + request + 1).to(tl.int64)
    rates = tl.load(decay + at, mask=inside, other=0.0)
    bias = tl.load(step_bias + channels, mask=is_channel, other=0.0)
    share = tl.load(skip + channels, mask=is_channel, other=0.0)
    at_state = state + tl.load(slots + request) * num_channels * N + at
    held = tl.load(at_state, mask=inside, other=0.0)
    for index in tl.range(0, tl.cdiv(end - start, SEGMENT), num_stages=1):
        row = start + index * SEGMENT + tokens
        is_row = row < end
        in_input = is_row[:, None] & is_channel[None, :]
        size = tl.load(step + row[:, None] * step_stride + channels[None, :], mask=in_input, other=0.0)
        # A step of 0 after the last token leaves the state as it is.
        size = tl.where(in_input, softplus(size.to(tl.float32) + bias[None, :]), 0.0)
        inputs = tl.load(x + row[:, None] * x_stride + channels[None, :], mask=in_input, other=0.0)
        inputs = inputs.to(tl.float32)
        in_part = is_row[:, None] & is_column[None, :]
        writes = tl.load(write + row[:, None] * write_stride + columns[None, :], mask=in_part, other=0.0)
        reads = tl.load(read + row[:, None] * read_stride + columns[None, :], mask=in_part, other=0.0)
        kept = tl.exp(size[:, :, None] * rates[None, :, :])  # [SEGMENT, BLOCK, N_PAD]
        added = (inputs * size)[:, :, None] * writes.to(tl.float32)[:, None, :]
        added += tl.where((tokens == 0)[:, None, None], kept * held[None, :, :], 0.0)
        _, states = tl.associative_scan((kept, added), 0, _after)
        made = tl.sum(states * reads.to(tl.float32)[:, None, :], axis=2) + share[None, :] * inputs
        tl.store(out + row[:, None] * num_channels + channels[None, :], made, mask=in_input)
        held = tl.sum(tl.where((tokens == SEGMENT - 1)[:, None, None], states, 0.0), axis=0)
    tl.store(at_state, held, mask=inside)


def channel_scan(
    x: Tensor,
    step: Tensor,
    read: Tensor,
    write: Tensor,
    layer: ChannelScanLayer,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    assert batch.states is not None
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    slots, decodes, prompts = batch.states.slots, batch.num_decodes, batch.num_requests - batch.num_decodes
    channels, width = state.shape[1:]
    padded = next_power_of_2(width)
    inputs = x, step, read, write, layer.decay, layer.skip, layer.step_bias, state, slots
    strides = x.stride(0), step.stride(0), read.stride(0), write.stride(0)
    if decodes:
        block = max(1, DECODE_NUMBERS // padded)
        _decode_kernel[(decodes, cdiv(channels, block))](
            *inputs, out, channels, *strides, N=width, N_PAD=padded, BLOCK=block, **launch_options()
        )
    if prompts:
        block = max(1, SEGMENT_NUMBERS // SEGMENT // padded)
        _prompt_kernel[(prompts, cdiv(channels, block))](
            *inputs, batch.query_starts, out, decodes, channels, *strides,
            N=width, N_PAD=padded, BLOCK=block, SEGMENT=SEGMENT, **launch_options(),
        )  # fmt: skip
    return out
