"""Layers with a fixed state for tokens that decode, short convolutions and gated norms (`kernels/recurrence.py`
defines them). A program reads and writes its part of a state itself, so a step of decodes is one launch for each
operation, and a CUDA graph can hold it. Chunks of prompts are `segments`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import DeltaLayer, ScanLayer
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

CHANNELS = 128  # of a program of a convolution: one for each thread, which alone reads and writes its history
CONV_TOKENS = 16
STATE_NUMBERS = 4096  # of a program that decodes
UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact where exp(x) is small, too."""
    grown = tl.exp(tl.minimum(x, 20.0))
    small = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0 - grown * 0.25)))
    return tl.where(x > 20.0, x, tl.where(grown < 0.02, small, tl.log(1.0 + grown)))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _factor(x, before, x_at, before_at, mask, HAS_BEFORE: tl.constexpr):
    """The inputs of a convolution in float32, gated or not."""
    values = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BEFORE:
        values *= tl.load(before + before_at, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _finish(total, bias, after, out, channels, after_at, out_at, mask, HAS_BIAS: tl.constexpr,
            HAS_AFTER: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0)
    if SILU:
        total = silu(total)
    if HAS_AFTER:
        total *= tl.load(after + after_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + out_at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _conv_decode_kernel(
    x, before, after, weight, bias, history, slots, out, num_channels, x_stride, before_stride, after_stride,
    WIDTH: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    wait_for_previous()
    past = history + (tl.load(slots + row) * num_channels + channels) * (WIDTH - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in tl.static_range(WIDTH - 1):
        old = tl.load(past + at, mask=inside, other=0.0)
        total += old * tl.load(weight + channels * WIDTH + at, mask=inside, other=0.0)
        if at > 0:
            tl.store(past + at - 1, old, mask=inside)
    value = _factor(x, before, row * x_stride + channels, row * before_stride + channels, inside, HAS_BEFORE)
    tl.store(past + WIDTH - 2, value, mask=inside)
    total += value * tl.load(weight + channels * WIDTH + WIDTH - 1, mask=inside, other=0.0)
    _finish(total, bias, after, out, channels, row * after_stride + channels, row * num_channels + channels,
            inside, HAS_BIAS, HAS_AFTER, SILU)  # fmt: skip


@triton.jit
def _requests_of(starts, tokens, num_requests, halvings):
    """The request of each token, by bisection."""
    low = tl.zeros_like(tokens)
    high = low + num_requests
    for _ in range(halvings):
        middle = (low + high) // 2
        is_right = tl.load(starts + middle) <= tokens
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "halvings"],
    do_not_specialize_on_alignment=["slots", "starts"],
)
def _conv_kernel(
    x, before, after, weight, bias, history, slots, starts, out, num_tokens, num_requests, halvings, num_channels,
    x_stride, before_stride, after_stride,
    WIDTH: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    wait_for_previous()
    request = _requests_of(starts, tokens, num_requests, halvings)
    offset = (tokens - tl.load(starts + request))[:, None]
    past = history + (tl.load(slots + request)[:, None] * num_channels + channels) * (WIDTH - 1)
    row = tokens[:, None].to(tl.int64)
    inside = (channels < num_channels) & (row < num_tokens)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for at in tl.static_range(WIDTH):
        in_step = inside & (offset >= WIDTH - 1 - at)
        there = row - (WIDTH - 1 - at)
        value = _factor(
            x, before, there * x_stride + channels, there * before_stride + channels, in_step, HAS_BEFORE
        )
        if at < WIDTH - 1:
            value += tl.load(past + offset + at, mask=inside & ~in_step, other=0.0)
        total += value * tl.load(weight + channels * WIDTH + at, mask=channels < num_channels, other=0.0)
    _finish(total, bias, after, out, channels, row * after_stride + channels, row * num_channels + channels,
            inside, HAS_BIAS, HAS_AFTER, SILU)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def _history_kernel(
    x, before, history, slots, starts, num_channels, x_stride, before_stride,
    WIDTH: tl.constexpr, HAS_BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < num_channels
    wait_for_previous()
    start = tl.load(starts + request).to(tl.int64)
    count = tl.load(starts + request + 1) - start
    past = history + (tl.load(slots + request) * num_channels + channels) * (WIDTH - 1)
    for at in tl.static_range(WIDTH - 1):
        back = count - (WIDTH - 1) + at
        there = start + back
        is_new = channels < tl.where(back >= 0, num_channels, 0)
        value = _factor(
            x, before, there * x_stride + channels, there * before_stride + channels, is_new, HAS_BEFORE
        )
        value += tl.load(past + count + at, mask=inside & ~is_new, other=0.0)
        tl.store(past + at, value, mask=inside)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    history: Tensor,
    batch: AttentionBatch,
    *,
    silu: bool,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    assert batch.states is not None
    (tokens, channels), width = x.shape, weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    slots, blocks = batch.states.slots, cdiv(channels, CHANNELS)
    gates = (x if before is None else before, x if after is None else after)
    strides = (x.stride(0), gates[0].stride(0), gates[1].stride(0))
    common = {"WIDTH": width, "HAS_BEFORE": before is not None, "BLOCK": CHANNELS, **launch_options()}
    both = {"HAS_AFTER": after is not None, "HAS_BIAS": bias is not None, "SILU": silu}
    bias = weight if bias is None else bias
    if batch.num_decodes == batch.num_requests:
        _conv_decode_kernel[(tokens, blocks)](
            x, *gates, weight, bias, history, slots, out, channels, *strides, **common, **both
        )
        return out
    count = batch.num_requests
    _conv_kernel[(cdiv(tokens, CONV_TOKENS), blocks)](
        x, *gates, weight, bias, history, slots, batch.query_starts, out, tokens, count, count.bit_length(), channels,
        *strides, **common, **both, TOKENS=CONV_TOKENS,
    )  # fmt: skip
    _history_kernel[(count, blocks)](
        x, gates[0], history, slots, batch.query_starts, channels, *strides[:2], **common
    )
    return out


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, width, eps, gate_stride, row_width,
    HAS_NORM: tl.constexpr, GATES_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    inside = within < width
    columns = tl.program_id(1) * width + within
    wait_for_previous()
    values = tl.load(x + row * row_width + columns, mask=inside, other=0.0).to(tl.float32)
    factor = silu(tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32))
    if GATES_FIRST:
        values *= factor
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        values *= scale * tl.load(weight + columns, mask=inside, other=0.0)
    if not GATES_FIRST:
        values *= factor
    tl.store(out + row * row_width + columns, values.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group_width: int, *, gates_first: bool
) -> Tensor:
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    if weight is None:
        group_width = 1024 if width % 1024 == 0 else width
    block = next_power_of_2(group_width)
    _gated_norm_kernel[(rows, width // group_width)](
        x.contiguous(),
        gate,
        x if weight is None else weight,
        out,
        group_width,
        eps,
        gate.stride(0),
        width,
        HAS_NORM=weight is not None,
        GATES_FIRST=gates_first or weight is None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _scan_decode_kernel(
    x, step, read, write, decay, skip, step_bias, groups, state, slots, out, least_step, most_step,
    x_stride, step_stride, read_stride, write_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    inner = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    columns = tl.arange(0, N_PAD)
    is_inner, is_column = inner < P, columns < N
    wait_for_previous()
    group = tl.load(groups + head)
    size = softplus(tl.load(step + row * step_stride + head).to(tl.float32) + tl.load(step_bias + head))
    size = tl.minimum(tl.maximum(size, least_step), most_step)
    kept = tl.exp(size * tl.load(decay + head))
    inputs = tl.load(x + row * x_stride + head * P + inner, mask=is_inner, other=0.0).to(tl.float32)
    writes = tl.load(write + row * write_stride + group * N + columns, mask=is_column, other=0.0).to(
        tl.float32
    )
    reads = tl.load(read + row * read_stride + group * N + columns, mask=is_column, other=0.0).to(tl.float32)
    at = state + ((tl.load(slots + row) * H + head) * P + inner[:, None]) * N + columns[None, :]
    inside = is_inner[:, None] & is_column[None, :]
    new = tl.load(at, mask=inside, other=0.0) * kept + (inputs * size)[:, None] * writes[None, :]
    tl.store(at, new, mask=inside)
    made = tl.sum(new * reads[None, :], axis=1) + tl.load(skip + head) * inputs
    tl.store(out + (row * H + head) * P + inner, made, mask=is_inner)


def scan_decodes(
    x: Tensor,
    step: Tensor,
    read: Tensor,
    write: Tensor,
    layer: ScanLayer,
    state: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """Run one token of each request; the state and `out`, [R, H, P], are written."""
    heads, size, width = state.shape[1:]
    padded = next_power_of_2(width)
    block = max(1, min(next_power_of_2(size), STATE_NUMBERS // padded))
    _scan_decode_kernel[(len(slots), heads, cdiv(size, block))](
        x, step, read, write, layer.decay, layer.skip, layer.step_bias, layer.groups, state, slots, out,
        *layer.step_limits, x.stride(0), step.stride(0), read.stride(0), write.stride(0),
        H=heads, P=size, N=width, P_BLOCK=block, N_PAD=padded, **launch_options(),
    )  # fmt: skip


@triton.jit
def unit(x):
    """A vector scaled to length 1. Zeros stay zeros."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + UNIT_EPS)


@triton.jit
def unit_rows(x):
    """Rows scaled to length 1. Rows of zeros stay zeros."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + UNIT_EPS)[:, None]


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _delta_decode_kernel(
    mixed, rate, step, decay, step_bias, keys, state, slots, out, key_heads, mixed_stride, rate_stride, step_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_BLOCK: tl.constexpr,
    LARGEST_RATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    rows = tl.arange(0, K_PAD)
    columns = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_row, is_column = rows < K, columns < V
    wait_for_previous()
    here = mixed + row * mixed_stride
    at_key = here + tl.load(keys + head) * K + rows
    query = unit(tl.load(at_key, mask=is_row, other=0.0).to(tl.float32)) * (K**-0.5)
    key = unit(tl.load(at_key + key_heads * K, mask=is_row, other=0.0).to(tl.float32))
    value = tl.load(here + 2 * key_heads * K + head * V + columns, mask=is_column, other=0.0).to(tl.float32)
    learned = LARGEST_RATE / (1.0 + tl.exp(-tl.load(rate + row * rate_stride + head).to(tl.float32)))
    size = softplus(tl.load(step + row * step_stride + head).to(tl.float32) + tl.load(step_bias + head))
    kept = tl.exp(size * tl.load(decay + head))
    at = state + ((tl.load(slots + row) * H + head) * K + rows[:, None]) * V + columns[None, :]
    inside = is_row[:, None] & is_column[None, :]
    old = tl.load(at, mask=inside, other=0.0) * kept
    change = (value - tl.sum(old * key[:, None], axis=0)) * learned
    new = old + key[:, None] * change[None, :]
    tl.store(at, new, mask=inside)
    tl.store(out + (row * H + head) * V + columns, tl.sum(new * query[:, None], axis=0), mask=is_column)


def delta_decodes(
    mixed: Tensor, rate: Tensor, step: Tensor, layer: DeltaLayer, state: Tensor, slots: Tensor, out: Tensor
) -> None:
    """Run one token of each request; the state and `out`, [R, H, V], are written."""
    heads, width, size = state.shape[1:]
    padded = next_power_of_2(width)
    block = max(1, min(next_power_of_2(size), STATE_NUMBERS // padded))
    _delta_decode_kernel[(len(slots), heads, cdiv(size, block))](
        mixed, rate, step, layer.decay, layer.step_bias, layer.keys, state, slots, out, layer.num_keys,
        mixed.stride(0), rate.stride(0), step.stride(0),
        H=heads, K=width, V=size, K_PAD=padded, V_BLOCK=block, LARGEST_RATE=layer.largest_rate, **launch_options(),
    )  # fmt: skip
