"""Layers with a fixed state in plain torch: causal short convolutions, the scans of Mamba 1 and 2, the gated delta
rule, and the gated norm behind scans and rule.

Everything is float32 inside. Requests that decode are one batch, which addresses states by an index tensor and makes
the host wait for nothing, so a CUDA graph can hold it. Longer chunks of prompts are computed one request after the
other, in segments: products within a segment, and a recurrence over segments. (The scan of Mamba 1 has no such
products: it is a recurrence over tokens.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import ChannelDeltaLayer, ChannelScanLayer, DeltaLayer, ScanLayer

SEGMENT = 64  # tokens
CHANNEL_SEGMENT = 16  # tokens, where each pair of them has a decay for every channel


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
    """[T, C] → [T, C]: each channel's weighted sum of its newest K inputs. `weight` is [C, K], the newest input last;
    `history` has the newest K - 1 inputs of each slot, [slots, C, K - 1]. `before` and `after`, [T, C], are factors
    of inputs and outputs."""
    assert batch.states is not None
    dtype = x.dtype
    if before is not None:
        x = x.float() * before.float()
    slots, width = batch.states.slots, weight.shape[1] - 1
    starts = batch.query_starts.long()
    tokens = torch.arange(x.shape[0], device=x.device)
    requests = torch.searchsorted(starts[1:], tokens, right=True)
    # The inputs of all requests end to end, each after its history.
    places = tokens + (requests + 1) * width
    back = torch.arange(width, device=x.device)
    before = starts[:-1, None] + torch.arange(len(slots), device=x.device)[:, None] * width + back
    inputs = torch.empty((x.shape[0] + len(slots) * width, x.shape[1]), dtype=torch.float32, device=x.device)
    inputs[places] = x.float()
    inputs[before] = history[slots].transpose(1, 2)
    out = inputs[places] * weight[:, width]
    for age in range(1, width + 1):
        out += inputs[places - age] * weight[:, width - age]
    last = before + (starts[1:] - starts[:-1])[:, None]
    history[slots] = inputs[last].transpose(1, 2)
    if bias is not None:
        out += bias
    out = F.silu(out) if silu else out
    return (out if after is None else out * after.float()).to(dtype)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group_width: int, *, gates_first: bool
) -> Tensor:
    """float32 [T, C] → [T, C] in the type of the gate: `x` times SiLU of the gate, and the RMS norm of groups, after
    the gate or before. Without a weight there is no norm."""
    factor = F.silu(gate.float())
    if weight is None:
        return (x * factor).to(gate.dtype)
    if gates_first:
        x = x * factor
    normed = F.rms_norm(x.unflatten(1, (-1, group_width)), (group_width,), eps=eps).flatten(1) * weight
    return (normed if gates_first else normed * factor).to(gate.dtype)


def selective_scan(
    x: Tensor,
    step: Tensor,
    read: Tensor,
    write: Tensor,
    layer: ScanLayer,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """[T, H, P] → float32 [T, H, P]: Mamba-2. For each token, with its `step` (before bias and softplus), [T, H]:

    state = state × exp(step × decay) + step × x ⊗ write;  output = state · read + skip × x

    `read` and `write` are [T, G, N], and `state` is [slots, H, P, N]. Some papers call them C and B."""
    assert batch.states is not None
    x = x.float()
    step = F.softplus(step.float() + layer.step_bias).clamp(*layer.step_limits)
    decay, scaled = step * layer.decay, x * step.unsqueeze(-1)
    read, write = read.float()[:, layer.groups], write.float()[:, layer.groups]
    out = torch.empty_like(x)
    count = batch.num_decodes
    if count:
        slots = batch.states.slots[:count]
        new = state[slots] * decay[:count].exp()[:, :, None, None]
        new += scaled[:count].unsqueeze(-1) * write[:count].unsqueeze(2)
        state[slots] = new
        out[:count] = (new * read[:count].unsqueeze(2)).sum(dim=-1)
    for slot, tokens in _prompts(batch):
        out[tokens], state[slot] = _scan(
            scaled[tokens], decay[tokens], read[tokens], write[tokens], state[slot][0]
        )
    return out + x * layer.skip.unsqueeze(-1)


def channel_scan(
    x: Tensor,
    step: Tensor,
    read: Tensor,
    write: Tensor,
    layer: ChannelScanLayer,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """[T, C] → float32 [T, C]: Mamba 1. For each token, with its `step` (before bias and softplus), [T, C]:

    state = state × exp(step × decay) + step × x ⊗ write;  output = state · read + skip × x

    `read` and `write`, [T, N], are the same for all channels, and `state` is [slots, C, N]."""
    assert batch.states is not None
    x, read, write = x.float(), read.float(), write.float()
    step = F.softplus(step.float() + layer.step_bias)
    scaled = x * step
    out = torch.empty_like(x)
    count = batch.num_decodes
    if count:
        slots = batch.states.slots[:count]
        added = scaled[:count].unsqueeze(-1) * write[:count].unsqueeze(1)
        new = added.addcmul_((step[:count].unsqueeze(-1) * layer.decay).exp(), state[slots])
        state[slots] = new
        out[:count] = (new * read[:count].unsqueeze(1)).sum(dim=-1)
    for slot, tokens in _prompts(batch):
        held = state[slot][0]
        for start in range(tokens.start, tokens.stop, SEGMENT):
            part = slice(start, min(start + SEGMENT, tokens.stop))
            kept = (step[part].unsqueeze(-1) * layer.decay).exp()
            states = scaled[part].unsqueeze(-1) * write[part].unsqueeze(1)  # [L, C, N]
            for token in range(len(states)):
                held = states[token].addcmul_(kept[token], held)
            out[part] = (states * read[part].unsqueeze(1)).sum(dim=-1)
        state[slot] = held
    return out + x * layer.skip


def gated_delta(
    mixed: Tensor, rate: Tensor, step: Tensor, layer: DeltaLayer, state: Tensor, batch: AttentionBatch
) -> Tensor:
    """The queries and keys of key heads and the values of value heads, side by side, → float32 [T, H, V]: the gated
    delta rule. For each token, with queries and keys of length 1, `rate` after a sigmoid and its scale, and `step`
    after bias and softplus, both [T, H]:

    state = state × exp(decay × step);  state += key ⊗ (rate × (value - state · key));  output = state · query / √K

    `state` is [slots, H, K, V]."""
    keys = layer.num_keys * layer.key_dim
    query, key, value = mixed.float().split([keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    query, key = (_unit(each.unflatten(1, (-1, layer.key_dim)))[:, layer.keys] for each in (query, key))
    query = query * layer.key_dim**-0.5
    value = value.unflatten(1, (len(layer.keys), -1))
    decay = layer.decay * F.softplus(step.float() + layer.step_bias)
    rate = rate.float().sigmoid() * layer.largest_rate
    return _delta_rule(query, key, value, decay.unsqueeze(-1), rate, state, batch)


def channel_delta(
    mixed: Tensor, rate: Tensor, step: Tensor, layer: ChannelDeltaLayer, state: Tensor, batch: AttentionBatch
) -> Tensor:
    """The queries, keys and values of all heads, side by side, → float32 [T, H, V]: the delta rule of Kimi Linear. It
    is `gated_delta` with a `step`, [T, H × K], for every number of a key, by which the rows of a state decay."""
    heads, width = layer.step_bias.shape
    keys = heads * width
    query, key, value = mixed.float().split([keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    query, key = (_unit(each.unflatten(1, (heads, width))) for each in (query, key))
    decay = F.softplus(step.float().unflatten(1, (heads, width)) + layer.step_bias) * layer.decay.unsqueeze(1)
    value = value.unflatten(1, (heads, -1))
    return _delta_rule(query * width**-0.5, key, value, decay, rate.float().sigmoid(), state, batch)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """Queries and keys [T, H, K], values [T, H, V], log decays [T, H, 1 or K] and rates [T, H] → [T, H, V]."""
    assert batch.states is not None
    out = torch.empty_like(value)
    count = batch.num_decodes
    if count:
        slots = batch.states.slots[:count]
        new = state[slots] * decay[:count].exp().unsqueeze(-1)
        known = (new * key[:count].unsqueeze(-1)).sum(dim=2)
        change = (value[:count] - known) * rate[:count].unsqueeze(-1)
        new += key[:count].unsqueeze(-1) * change.unsqueeze(2)
        state[slots] = new
        out[:count] = (new * query[:count].unsqueeze(-1)).sum(dim=2)
    for slot, tokens in _prompts(batch):
        out[tokens], state[slot] = _delta(
            query[tokens], key[tokens], value[tokens], decay[tokens], rate[tokens], state[slot][0]
        )
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _prompts(batch: AttentionBatch) -> Iterator[tuple[Tensor, slice]]:
    """Yield the slot, as an index tensor [1], and the tokens of each request that does not decode."""
    if batch.num_decodes == batch.num_requests:
        return
    assert batch.states is not None
    starts = (batch.query_starts if batch.lengths is None else batch.lengths[0]).tolist()
    for request in range(batch.num_decodes, batch.num_requests):
        yield batch.states.slots[request : request + 1], slice(starts[request], starts[request + 1])


def _segments(x: Tensor, length: int = SEGMENT) -> Tensor:
    """[T, H, …] → [S, H, L, …], padded with zeros."""
    num_segments = -(-x.shape[0] // length)
    padded = x.new_zeros((num_segments * length, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded.view(num_segments, length, *x.shape[1:]).transpose(1, 2)


def _joined(segments: Tensor, num_tokens: int) -> Tensor:
    """[S, H, L, …] → [T, H, …]"""
    return segments.transpose(1, 2).flatten(0, 1)[:num_tokens]


def _decays(sums: Tensor) -> Tensor:
    """Running sums of log decays […, L] → [..., L, L]: what is left at i of what came in at j; 0 where j is later."""
    length = sums.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()


def _scan(scaled: Tensor, decay: Tensor, read: Tensor, write: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the tokens of one request: inputs [T, H, P] and a state [H, P, N] → outputs [T, H, P] and the state."""
    inputs, reads, writes = _segments(scaled), _segments(read), _segments(write)
    sums = _segments(decay).cumsum(dim=-1)  # [S, H, L]
    out = ((reads @ writes.transpose(-1, -2)) * _decays(sums)) @ inputs
    left = (sums[..., -1:] - sums).exp().unsqueeze(-1)
    added = (inputs * left).transpose(-1, -2) @ writes  # [S, H, P, N]
    whole = sums[..., -1].exp()[..., None, None]
    for segment in range(len(inputs)):
        carried = (reads[segment] @ state.transpose(-1, -2)) * sums[segment].exp().unsqueeze(-1)
        out[segment] += carried
        state = state * whole[segment] + added[segment]
    return _joined(out, scaled.shape[0]), state


def _delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the tokens of one request: values [T, H, V] and a state [H, K, V] → outputs [T, H, V] and the state.

    Within a segment the changes depend on each other. They solve a triangular system, once for the values and once
    for what the state at the segment's start knows."""
    length = SEGMENT if decay.shape[-1] == 1 else CHANNEL_SEGMENT
    queries, keys, values, sums = (_segments(each, length) for each in (query, key, value, decay))
    sums, rates = sums.cumsum(dim=2), _segments(rate, length).unsqueeze(-1)  # [S, H, L, 1 or K]
    system, within = _decayed_products((keys * rates, queries), keys, sums)
    grown = sums.exp()
    right = torch.cat([values * rates, keys * rates * grown], dim=-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    changes, known = solved.split([values.shape[-1], keys.shape[-1]], dim=-1)
    left = (sums[:, :, -1:] - sums).exp()
    out = torch.empty_like(values)
    for segment in range(len(values)):
        change = changes[segment] - known[segment] @ state
        carried = (queries[segment] * grown[segment]) @ state
        out[segment] = carried + within[segment] @ change
        state = state * grown[segment, :, -1].unsqueeze(-1)
        state = state + (keys[segment] * left[segment]).transpose(-1, -2) @ change
    return _joined(out, value.shape[0]), state


def _decayed_products(lefts: tuple[Tensor, ...], keys: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    """Return the products of vectors with earlier keys of their segment, [S, H, L, K] → [S, H, L, L], as far as the
    keys are left: `sums` are running sums of log decays, [S, H, L, 1 or K]."""
    if sums.shape[-1] == 1:
        decays = _decays(sums.squeeze(-1))
        return tuple(left @ keys.transpose(-1, -2) * decays for left in lefts)
    made = tuple(left.new_empty((*left.shape[:3], left.shape[2])) for left in lefts)
    for segment in range(len(keys)):
        # [H, K, L, L]. No product of growths and decays, which would overflow, has these numbers.
        reached = keys[segment].transpose(-1, -2).unsqueeze(-2) * _decays(sums[segment].transpose(-1, -2))
        for left, out in zip(lefts, made, strict=True):
            out[segment] = (left[segment].transpose(-1, -2).unsqueeze(-1) * reached).sum(dim=1)
    return made
