"""Chunks of prompts in layers with a fixed state (`kernels/recurrence.py` defines them). A program takes the tokens
of a request in segments, one after the other, and keeps its part of the state in registers: products in a segment,
and the state from one segment to the next. Results do not depend on the other requests of a step.

Products take their inputs in the compute type, as all of the model's products do. States and sums are float32. Tiles
of float32 are small: no tensor core multiplies them, and a compiler takes minutes over larger ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import DeltaLayer, ScanLayer
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.recurrence import delta_decodes, scan_decodes, softplus, unit_rows
from penstock.kernels.triton.targets import current

SMALLEST = 16  # side of a product
INVERTED = tl.constexpr(16)  # side of the blocks that are inverted first
SEGMENT_BYTES = 32 * 1024  # of the reads of one segment
STATE_NUMBERS = 8192  # of a program


@triton.jit
def _left(sums, SEGMENT: tl.constexpr):
    """What is left at i of what came in at j, [SEGMENT, SEGMENT]: 0 where j is later."""
    at = tl.arange(0, SEGMENT)
    is_past = at[:, None] >= at[None, :]
    return tl.exp(tl.where(is_past, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=["slots", "starts"])
def _scan_kernel(
    x, step, read, write, decay, skip, step_bias, groups, state, slots, starts, out, first_request,
    least_step, most_step, x_stride, step_stride, read_stride, write_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr, N_PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    request = first_request + tl.program_id(0)
    head = tl.program_id(1)
    inner = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
    columns = tl.arange(0, N_PAD)
    is_inner, is_column = inner < P, columns < N
    type: tl.constexpr = x.dtype.element_ty
    wait_for_previous()
    start, end = tl.load(starts + request).to(tl.int64), tl.load(starts + request + 1).to(tl.int64)
    slot, group = tl.load(slots + request), tl.load(groups + head)
    rate, bias, share = tl.load(decay + head), tl.load(step_bias + head), tl.load(skip + head)
    at_state = state + ((slot * H + head) * P + inner[:, None]) * N + columns[None, :]
    in_state = is_inner[:, None] & is_column[None, :]
    held = tl.load(at_state, mask=in_state, other=0.0)
    for index in tl.range(0, tl.cdiv(end - start, SEGMENT), num_stages=1):
        row = start + index * SEGMENT + tl.arange(0, SEGMENT)
        inside = row < end
        size = softplus(
            tl.load(step + row * step_stride + head, mask=inside, other=0.0).to(tl.float32) + bias
        )
        size = tl.where(inside, tl.minimum(tl.maximum(size, least_step), most_step), 0.0)
        sums = tl.cumsum(size * rate, axis=0)
        whole = tl.sum(size * rate, axis=0)
        in_part = inside[:, None] & is_column[None, :]
        reads = tl.load(
            read + row[:, None] * read_stride + group * N + columns[None, :], mask=in_part, other=0.0
        )
        writes = tl.load(
            write + row[:, None] * write_stride + group * N + columns[None, :], mask=in_part, other=0.0
        )
        in_input = inside[:, None] & is_inner[None, :]
        inputs = tl.load(x + row[:, None] * x_stride + head * P + inner[None, :], mask=in_input, other=0.0)
        inputs = inputs.to(tl.float32)
        scaled = inputs * size[:, None]
        weights = tl.dot(reads, tl.trans(writes), input_precision="ieee") * _left(sums, SEGMENT)
        made = tl.dot(reads, tl.trans(held).to(type), input_precision="ieee") * tl.exp(sums)[:, None]
        made = tl.dot(weights.to(type), scaled.to(type), made, input_precision="ieee")
        tl.store(out + (row[:, None] * H + head) * P + inner[None, :], made + share * inputs, mask=in_input)
        kept = (scaled * tl.exp(whole - sums)[:, None]).to(type)
        held = tl.dot(tl.trans(kept), writes, held * tl.exp(whole), input_precision="ieee")
    tl.store(at_state, held, mask=in_state)


def selective_scan(
    x: Tensor,
    step: Tensor,
    read: Tensor,
    write: Tensor,
    layer: ScanLayer,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    assert batch.states is not None
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    slots, decodes, prompts = batch.states.slots, batch.num_decodes, batch.num_requests - batch.num_decodes
    if decodes:
        scan_decodes(x, step, read, write, layer, state, slots[:decodes], out)
    if prompts:
        heads, size, width = state.shape[1:]
        padded = max(SMALLEST, next_power_of_2(width))
        segment = 64 if 64 * padded * x.element_size() <= SEGMENT_BYTES else 32
        block = _fitting_block(size, padded)
        if x.dtype == torch.float32:
            segment = block = SMALLEST
        _scan_kernel[(prompts, heads, cdiv(size, block))](
            x, step, read, write, layer.decay, layer.skip, layer.step_bias, layer.groups, state, slots,
            batch.query_starts, out, decodes, *layer.step_limits,
            x.stride(0), step.stride(0), read.stride(0), write.stride(0),
            H=heads, P=size, N=width, P_BLOCK=block, N_PAD=padded, SEGMENT=segment, num_warps=4, **launch_options(),
        )  # fmt: skip
    return out


def _fitting_block(size: int, padded: int) -> int:
    """Return how many of a head's `size` numbers one program has, whose states have `padded` numbers each."""
    most = STATE_NUMBERS if current().shared_bytes >= 160_000 else STATE_NUMBERS // 2
    return max(SMALLEST, min(64, next_power_of_2(size), most // padded))


@triton.jit
def _inverse(system, SEGMENT: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of 1 + `system`, which is strictly lower triangular. Blocks on the diagonal first: powers of such a
    block vanish from the sixteenth on. Then the rest, in blocks."""
    at = tl.arange(0, SEGMENT)
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    power = tl.where((at // INVERTED)[:, None] == (at // INVERTED)[None, :], system, 0.0)
    rest = system - power
    made = one - power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision=PRECISION)
        made += tl.dot(made, power, input_precision=PRECISION)
    if SEGMENT > INVERTED:
        rest = tl.dot(made, rest, input_precision=PRECISION)
        outer = one - rest
        if SEGMENT > 2 * INVERTED:
            rest = tl.dot(rest, rest, input_precision=PRECISION)
            outer += tl.dot(outer, rest, input_precision=PRECISION)
        made = tl.dot(outer, made, input_precision=PRECISION)
    return made


@triton.jit
def _log_decays(step, step_bias, decay, row, inside, step_stride, head):
    size = tl.load(step + row * step_stride + head, mask=inside, other=0.0).to(tl.float32)
    size = softplus(size + tl.load(step_bias + head))
    return tl.where(inside, size * tl.load(decay + head), 0.0)


@triton.jit(
    do_not_specialize=["first_request", "num_requests", "halvings"],
    do_not_specialize_on_alignment=["starts"],
)
def _solve_kernel(
    mixed, rate, step, decay, step_bias, keys, starts, changes, known, first_request, num_requests, halvings,
    key_heads, mixed_stride, rate_stride, step_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    SEGMENT: tl.constexpr, PRECISION: tl.constexpr, LARGEST_RATE: tl.constexpr,
):  # fmt: skip
    """The changes that a segment's tokens make to an empty state, and what they know of the state before."""
    wait_for_previous()
    # The segments of request r begin at index start / SEGMENT + r, so that those of two requests have other indices.
    low, high = first_request, num_requests
    for _ in range(halvings):
        middle = (low + high) // 2
        is_right = tl.load(starts + middle) // SEGMENT + middle <= tl.program_id(0) + first_request
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    start = tl.load(starts + low)
    segment = tl.program_id(0) + first_request - (start // SEGMENT + low)
    end = tl.load(starts + low + 1)
    first = start + segment * SEGMENT
    if (segment < 0) | (first >= end):
        return
    head = tl.program_id(1)
    row = first.to(tl.int64) + tl.arange(0, SEGMENT)
    inside = row < end
    type: tl.constexpr = mixed.dtype.element_ty
    rows, columns = tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    at_key = mixed + row[:, None] * mixed_stride + (key_heads + tl.load(keys + head)) * K + rows[None, :]
    in_key = inside[:, None] & (rows < K)[None, :]
    key = unit_rows(tl.load(at_key, mask=in_key, other=0.0).to(tl.float32))
    learned = tl.load(rate + row * rate_stride + head, mask=inside, other=0.0).to(tl.float32)
    learned = tl.where(inside, LARGEST_RATE / (1.0 + tl.exp(-learned)), 0.0)
    sums = tl.cumsum(_log_decays(step, step_bias, decay, row, inside, step_stride, head), axis=0)
    at = tl.arange(0, SEGMENT)
    narrow = key.to(type)
    system = (
        tl.dot(narrow, tl.trans(narrow), input_precision="ieee") * learned[:, None] * _left(sums, SEGMENT)
    )
    inverse = _inverse(tl.where(at[:, None] > at[None, :], system, 0.0), SEGMENT, PRECISION).to(type)
    in_value = inside[:, None] & (columns < V)[None, :]
    at_value = mixed + row[:, None] * mixed_stride + 2 * key_heads * K + head * V + columns[None, :]
    value = tl.load(at_value, mask=in_value, other=0.0).to(tl.float32) * learned[:, None]
    target = (row * H + head)[:, None]
    made = tl.dot(inverse, value.to(type), input_precision="ieee")
    tl.store(changes + target * V + columns[None, :], made.to(type), mask=in_value)
    key = key * (learned * tl.exp(sums))[:, None]
    made = tl.dot(inverse, key.to(type), input_precision="ieee")
    tl.store(known + target * K + rows[None, :], made.to(type), mask=in_key)


@triton.jit(do_not_specialize=["first_request"], do_not_specialize_on_alignment=["slots", "starts"])
def _delta_kernel(
    mixed, step, decay, step_bias, keys, changes, known, state, slots, starts, out, first_request, key_heads,
    mixed_stride, step_stride,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    request = first_request + tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.arange(0, K_PAD)
    columns = tl.program_id(2) * V_BLOCK + tl.arange(0, V_BLOCK)
    is_row, is_column = rows < K, columns < V
    type: tl.constexpr = mixed.dtype.element_ty
    wait_for_previous()
    start, end = tl.load(starts + request).to(tl.int64), tl.load(starts + request + 1).to(tl.int64)
    key_head = tl.load(keys + head)
    at_state = state + ((tl.load(slots + request) * H + head) * K + rows[:, None]) * V + columns[None, :]
    in_state = is_row[:, None] & is_column[None, :]
    held = tl.load(at_state, mask=in_state, other=0.0)
    for index in tl.range(0, tl.cdiv(end - start, SEGMENT), num_stages=1):
        row = start + index * SEGMENT + tl.arange(0, SEGMENT)
        inside = row < end
        decays = _log_decays(step, step_bias, decay, row, inside, step_stride, head)
        sums = tl.cumsum(decays, axis=0)
        whole = tl.sum(decays, axis=0)
        in_key = inside[:, None] & is_row[None, :]
        at_query = mixed + row[:, None] * mixed_stride + key_head * K + rows[None, :]
        query = unit_rows(tl.load(at_query, mask=in_key, other=0.0).to(tl.float32)) * (K**-0.5)
        key = unit_rows(tl.load(at_query + key_heads * K, mask=in_key, other=0.0).to(tl.float32))
        target = (row * H + head)[:, None]
        learned = tl.load(known + target * K + rows[None, :], mask=in_key, other=0.0)
        in_value = inside[:, None] & is_column[None, :]
        change = tl.load(changes + target * V + columns[None, :], mask=in_value, other=0.0).to(tl.float32)
        narrow = held.to(type)
        change = (change - tl.dot(learned, narrow, input_precision="ieee")).to(type)
        within = tl.dot(query.to(type), tl.trans(key).to(type), input_precision="ieee") * _left(sums, SEGMENT)
        made = tl.dot((query * tl.exp(sums)[:, None]).to(type), narrow, input_precision="ieee")
        made = tl.dot(within.to(type), change, made, input_precision="ieee")
        tl.store(out + target * V + columns[None, :], made, mask=in_value)
        kept = (key * tl.exp(whole - sums)[:, None]).to(type)
        held = tl.dot(tl.trans(kept), change, held * tl.exp(whole), input_precision="ieee")
    tl.store(at_state, held, mask=in_state)


def gated_delta(
    mixed: Tensor, rate: Tensor, step: Tensor, layer: DeltaLayer, state: Tensor, batch: AttentionBatch
) -> Tensor:
    assert batch.states is not None
    tokens, (heads, width, size) = mixed.shape[0], state.shape[1:]
    out = torch.empty(tokens, heads, size, dtype=torch.float32, device=mixed.device)
    slots, decodes, prompts = batch.states.slots, batch.num_decodes, batch.num_requests - batch.num_decodes
    if decodes:
        delta_decodes(mixed, rate, step, layer, state, slots[:decodes], out)
    if prompts:
        padded = max(SMALLEST, next_power_of_2(width))
        segment, block, precision = SMALLEST, SMALLEST, "ieee"
        if mixed.dtype != torch.float32:
            segment, block = 32, _fitting_block(size, padded)
            if isinstance(current().arch, int):
                segment, precision = 64, "tf32x3"  # which loses nothing that 16 bits would keep
        changes = torch.empty(tokens, heads, size, dtype=mixed.dtype, device=mixed.device)
        known = torch.empty(tokens, heads, width, dtype=mixed.dtype, device=mixed.device)
        _solve_kernel[(tokens // segment + prompts, heads)](
            mixed, rate, step, layer.decay, layer.step_bias, layer.keys, batch.query_starts, changes, known, decodes,
            batch.num_requests, batch.num_requests.bit_length(), layer.num_keys,
            mixed.stride(0), rate.stride(0), step.stride(0),
            H=heads, K=width, V=size, K_PAD=padded, V_PAD=max(SMALLEST, next_power_of_2(size)),
            SEGMENT=segment, PRECISION=precision, LARGEST_RATE=layer.largest_rate, num_warps=4, **launch_options(),
        )  # fmt: skip
        _delta_kernel[(prompts, heads, cdiv(size, block))](
            mixed, step, layer.decay, layer.step_bias, layer.keys, changes, known, state, slots, batch.query_starts,
            out, decodes, layer.num_keys, mixed.stride(0), step.stride(0),
            H=heads, K=width, V=size, K_PAD=padded, V_BLOCK=block, SEGMENT=segment, num_warps=4, **launch_options(),
        )  # fmt: skip
    return out
