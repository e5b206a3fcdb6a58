"""A mixture of experts: route, group the tokens by expert, multiply each group, and add up the results.

A pair is a token and one of its experts. Pairs are laid out expert after expert, and each expert's pairs are padded
to whole tiles, so that one grid of programs serves all experts and every weight is read once per tile of pairs. The
host need not know how many tokens an expert got.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.blocks import route
from penstock.kernels.interface import Activation, Routing
from penstock.kernels.triton.elementwise import KINDS, gate_up_product
from penstock.kernels.triton.overlap import launch_options, wait_for_previous
from penstock.kernels.triton.targets import Tile, tile

SCATTER_TILE = 256


@dataclass(frozen=True, slots=True)
class StackedExperts:
    gate_up: Tensor  # [E, 2 × inner, hidden]
    down: Tensor  # [E, hidden, inner]
    gate_up_bias: Tensor | None = None  # float32 [E, 2 × inner]
    down_bias: Tensor | None = None  # float32 [E, hidden]

    @property
    def num_bytes(self) -> int:
        parts = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs in the order of their experts. An expert's pairs in `order` fill whole tiles; the last tile is padded."""

    order: Tensor  # int32 [tiles × rows]: pairs; what is in the padding says nothing
    tile_expert: Tensor  # int32 [tiles]: the expert of a tile, or -1 past the last
    tile_pairs: Tensor  # int32 [tiles]: how many pairs it really holds
    rows: int  # of a tile


@triton.jit
def _route_kernel(
    logits,
    weights,
    chosen,
    counts,
    experts,
    TOP_K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS)
    ranks = tl.arange(0, triton.next_power_of_2(TOP_K))
    wait_for_previous()
    values = tl.load(logits + token * experts + index, mask=index < experts, other=float("-inf"))
    shares = tl.exp(values - tl.max(values, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    best = tl.zeros(ranks.shape, tl.float32)
    best_index = tl.zeros(ranks.shape, tl.int32)
    for rank in tl.static_range(TOP_K):
        where = tl.argmax(shares, axis=0)
        share = tl.max(shares, axis=0)
        best = tl.where(ranks == rank, share, best)
        best_index = tl.where(ranks == rank, where, best_index)
        shares = tl.where(index == where, -1.0, shares)
    if NORMALIZES:
        best = best / tl.sum(best, axis=0)
    tl.store(weights + token * TOP_K + ranks, best, mask=ranks < TOP_K)
    tl.store(chosen + token * TOP_K + ranks, best_index, mask=ranks < TOP_K)
    tl.atomic_add(counts + best_index, 1, mask=ranks < TOP_K)


@triton.jit(do_not_specialize=["tiles"])
def _layout_kernel(counts, cursor, tile_expert, tile_pairs, tiles, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    tile = tl.program_id(0) * 32 + tl.arange(0, 32)
    bins = tl.arange(0, EXPERTS)
    wait_for_previous()
    count = tl.load(counts + bins)
    shares = (count + ROWS - 1) // ROWS * ROWS
    ends = tl.cumsum(shares, axis=0)
    if tl.program_id(0) == 0:
        tl.store(cursor + bins, ends - shares)
    first = tile * ROWS
    expert = tl.sum((ends[None, :] <= first[:, None]).to(tl.int32), axis=1)
    is_own = bins[None, :] == expert[:, None]
    held = tl.sum(tl.where(is_own, (count - (first[:, None] - (ends - shares)[None, :])), 0), axis=1)
    is_used = first < tl.sum(shares, axis=0)
    tl.store(tile_expert + tile, tl.where(is_used, expert, -1), mask=tile < tiles)
    tl.store(tile_pairs + tile, tl.minimum(held, ROWS), mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs"])
def _scatter_kernel(chosen, cursor, order, pairs, TILE: tl.constexpr):
    """Place every pair among its expert's pairs. The place among them is random, and no result depends on it."""
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    present = pair < pairs
    wait_for_previous()
    expert = tl.load(chosen + pair, mask=present, other=0)
    slot = tl.atomic_add(cursor + expert, 1, mask=present)
    tl.store(order + slot, pair, mask=present)


@triton.jit
def _expert_kernel(
    x, weight, bias, order, tile_expert, tile_pairs, pair_weights, out, N, K,
    TOP_K: tl.constexpr, GATED: tl.constexpr, WEIGHS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With GATED: x is [tokens, K], and a pair's row is activation(gate) × up. Without: x is [pairs, K]. With WEIGHS,
    products are multiplied by the pair's weight."""
    tile = tl.program_id(1)
    wait_for_previous()
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    rows = tl.arange(0, ROWS)
    present = rows < tl.load(tile_pairs + tile)
    pair = tl.load(order + tile * ROWS + rows, mask=present, other=0).to(tl.int64)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, WIDTH)
    safe_outputs = tl.minimum(outputs, N - 1).to(tl.int64)
    if GATED:
        source = pair // TOP_K
        at = weight + (expert * 2 * N + safe_outputs)[:, None] * K + columns[None, :]
    else:
        source = pair
        at = weight + (expert * N + safe_outputs)[:, None] * K + columns[None, :]
    x_at = x + source[None, :] * K + columns[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    total_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, K, WIDTH):
        part = tl.load(x_at + start)
        total = tl.dot(tl.load(at + start), part, total, input_precision="ieee")
        if GATED:
            up_tile = tl.load(at + N.to(tl.int64) * K + start)
            total_up = tl.dot(up_tile, part, total_up, input_precision="ieee")
    if BIAS:
        bias_at = bias + (expert * 2 * N if GATED else expert * N) + safe_outputs
        total += tl.load(bias_at)[:, None]
        if GATED:
            total_up += tl.load(bias_at + N)[:, None]
    if WEIGHS:
        share = tl.load(pair_weights + pair)[None, :]
        total = total * share
        total_up = total_up * share
    if GATED:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate_up_product(gate, total_up.to(out.dtype.element_ty).to(tl.float32), KIND)
    inside = (outputs < N)[:, None] & present[None, :]
    tl.store(out + pair[None, :] * N + outputs[:, None], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_up_kernel(made, residual, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous()
    total = tl.load(residual + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(TOP_K):
        at = made + (token * TOP_K + rank) * width + columns
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + token * width + columns, total.to(residual.dtype.element_ty), mask=inside)


def route_and_group(logits: Tensor, routing: Routing) -> tuple[Tensor, Groups]:
    """float32 [T, E] → the weights of the pairs, float32 [T × K], and the pairs by expert."""
    tokens, experts = logits.shape
    pairs = tokens * routing.top_k
    padded = triton.next_power_of_2(experts)
    counts = torch.zeros(padded, dtype=torch.int32, device=logits.device)
    if not routing.is_plain:
        chosen_weights, indices = route(logits, routing)
        weights, chosen = chosen_weights.flatten(), indices.flatten().to(torch.int32)
        counts.scatter_add_(0, indices.flatten(), torch.ones_like(chosen))
        return weights, _group(chosen, counts, experts)
    weights = torch.empty(pairs, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(pairs, dtype=torch.int32, device=logits.device)
    _route_kernel[(tokens,)](
        logits,
        weights,
        chosen,
        counts,
        experts,
        TOP_K=routing.top_k,
        NORMALIZES=routing.normalizes,
        EXPERTS=padded,
        num_warps=1,
        **launch_options(),
    )
    return weights, _group(chosen, counts, experts)


def _group(chosen: Tensor, counts: Tensor, experts: int) -> Groups:
    """Lay out pairs by expert. `counts`, the pairs of each expert, is padded to a power of two."""
    pairs, padded = chosen.shape[0], counts.shape[0]
    rows = _tile_rows(pairs, experts)
    # Each expert may leave one tile partly empty; more experts than pairs cannot be used.
    tiles = triton.cdiv(pairs, rows) + min(experts, pairs)
    cursor, order, tile_expert, tile_pairs = (
        torch.empty(size, dtype=torch.int32, device=chosen.device)
        for size in (padded, tiles * rows, tiles, tiles)
    )
    _layout_kernel[(triton.cdiv(tiles, 32),)](
        counts,
        cursor,
        tile_expert,
        tile_pairs,
        tiles,
        EXPERTS=padded,
        ROWS=rows,
        num_warps=4,
        **launch_options(),
    )
    _scatter_kernel[(triton.cdiv(pairs, SCATTER_TILE),)](
        chosen, cursor, order, pairs, TILE=SCATTER_TILE, num_warps=4, **launch_options()
    )
    return Groups(order, tile_expert, tile_pairs, rows)


def add_experts(
    normed: Tensor,
    logits: Tensor,
    experts: StackedExperts,
    routing: Routing,
    activation: Activation,
    residual: Tensor,
) -> None:
    """Add to each token's row of `residual` the weighted sum of its experts' outputs for its row of `normed`."""
    tokens, hidden = normed.shape
    if not tokens:
        return
    weights, groups = route_and_group(logits, routing)
    inner = experts.down.shape[2]
    active = torch.empty(tokens * routing.top_k, inner, dtype=normed.dtype, device=normed.device)
    into, out_of = (weights, None) if routing.weighs_input else (None, weights)
    _multiply(
        normed, experts.gate_up, experts.gate_up_bias, groups, into, active, routing.top_k, gate=activation
    )
    made = torch.empty(tokens * routing.top_k, hidden, dtype=normed.dtype, device=normed.device)
    _multiply(active, experts.down, experts.down_bias, groups, out_of, made, routing.top_k, gate=None)
    block = min(1024, triton.next_power_of_2(hidden))
    _add_up_kernel[(tokens, triton.cdiv(hidden, block))](
        made, residual, hidden, TOP_K=routing.top_k, BLOCK=block, num_warps=4, **launch_options()
    )


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    pair_weights: Tensor | None,
    out: Tensor,
    top_k: int,
    *,
    gate: Activation | None,
) -> None:
    outputs = out.shape[1]
    width = weight.shape[2]
    shape = _tile(groups.rows, width, x.element_size(), gate is not None)
    _expert_kernel[(triton.cdiv(outputs, shape.outputs), groups.tile_expert.shape[0])](
        x,
        weight,
        weight if bias is None else bias,
        groups.order,
        groups.tile_expert,
        groups.tile_pairs,
        out if pair_weights is None else pair_weights,
        out,
        outputs,
        width,
        TOP_K=top_k,
        GATED=gate is not None,
        WEIGHS=pair_weights is not None,
        BIAS=bias is not None,
        KIND=0 if gate is None else KINDS[gate],
        OUTPUTS=shape.outputs,
        WIDTH=shape.width,
        ROWS=groups.rows,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch_options(),
    )


def _tile(rows: int, width: int, item_bytes: int, gated: bool) -> Tile:
    case = f", {rows} rows" if rows < 64 else ""
    shape = tile(f"experts{', gated' if gated else ''}{case}")
    return shape.fitted(width, item_bytes * ((2 if gated else 1) * shape.outputs + rows))


def _tile_rows(pairs: int, num_experts: int) -> int:
    """Return the height of a tile: the usual number of an expert's pairs, so that few weights are read twice and
    little is padded."""
    share = pairs / num_experts
    return 16 if share <= 12 else 32 if share <= 40 else 64 if share <= 128 else 128
