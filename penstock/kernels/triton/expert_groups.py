"""Routes tokens to experts, and groups the pairs of tokens and experts by expert.

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
from penstock.kernels.interface import Routing
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, wait_for_previous

SCATTER_TILE = 256
# Pairs that each program of `_group_kernel` can count. A kernel for fewer pairs than the largest step has is faster.
FEW_PAIRS = (512, 4096)
# The pairs that a program of `_group_kernel` places, times experts: what it compares.
COMPARED = 4096
LARGEST_ROWS = 128  # of a tile
SPARSE = 8  # Up to one pair for this many experts, few experts are chosen twice, and grouping does not pay.


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs in the order of their experts. An expert's pairs in `order` fill whole tiles; the last tile is padded."""

    order: Tensor  # int32 [tiles × rows]: pairs; the padding has any values
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
    COUNTS: tl.constexpr,
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
        share, where = tl.max(shares, axis=0, return_indices=True)
        best = tl.where(ranks == rank, share, best)
        best_index = tl.where(ranks == rank, where, best_index)
        shares = tl.where(index == where, -1.0, shares)
    if NORMALIZES:
        best = best / tl.sum(best, axis=0)
    tl.store(weights + token * TOP_K + ranks, best, mask=ranks < TOP_K)
    tl.store(chosen + token * TOP_K + ranks, best_index, mask=ranks < TOP_K)
    if COUNTS:
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


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _group_kernel(
    chosen, order, tile_expert, tile_pairs, pairs, tiles, rows,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Lay out and place few pairs in one launch: every program counts all pairs. EXPERTS has room for an expert that
    does not exist, which takes what is no pair."""
    bins = tl.arange(0, EXPERTS)
    index = tl.arange(0, PAIRS)
    first = tl.program_id(0) * OWN
    own = first + tl.arange(0, OWN)
    wait_for_previous()
    everything = tl.load(chosen + index, mask=index < pairs, other=EXPERTS - 1)
    mine = tl.load(chosen + own, mask=own < pairs, other=EXPERTS - 1)
    count = tl.where(bins == EXPERTS - 1, 0, tl.histogram(everything, EXPERTS))
    before = tl.histogram(tl.where(index < first, everything, EXPERTS - 1), EXPERTS)
    shares = (count + rows - 1) // rows * rows
    ends = tl.cumsum(shares, axis=0)
    slot = tl.gather(ends - shares + before, mine, 0)
    earlier = (mine[:, None] == mine[None, :]) & (own[:, None] > own[None, :])
    slot += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order + slot, own, mask=own < pairs)
    start = own * rows
    expert = tl.sum((ends[None, :] <= start[:, None]).to(tl.int32), axis=1)
    held = tl.gather(count + ends - shares, tl.minimum(expert, EXPERTS - 1), 0) - start
    is_used = start < tl.sum(shares, axis=0)
    tl.store(tile_expert + own, tl.where(is_used, expert, -1), mask=own < tiles)
    tl.store(tile_pairs + own, tl.where(is_used, tl.minimum(held, rows), 0), mask=own < tiles)


def groups_tokens(tokens: int, top_k: int, experts: int) -> bool:
    """Return whether this many tokens are grouped by expert."""
    return tokens > 1 and tokens * top_k > experts // SPARSE


def route_and_group(logits: Tensor, routing: Routing) -> tuple[Tensor, Groups | Tensor]:
    """float32 [T, E] → the weights of the pairs, float32 [T × K], and the pairs by expert; for few pairs, their
    experts, int32 [T × K]."""
    tokens, experts = logits.shape
    pairs = tokens * routing.top_k
    padded = next_power_of_2(experts)
    is_grouped = groups_tokens(tokens, routing.top_k, experts)
    counts = logits  # any pointer will do
    counts_ahead = pairs > FEW_PAIRS[-1]
    if counts_ahead:
        counts = torch.zeros(padded, dtype=torch.int32, device=logits.device)
    if routing.is_plain:
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
            COUNTS=counts_ahead,
            EXPERTS=padded,
            num_warps=1,
            **launch_options(),
        )
    else:
        chosen_weights, indices = route(logits, routing)
        weights, chosen = chosen_weights.flatten(), indices.flatten().to(torch.int32)
        if counts_ahead:
            counts.scatter_add_(0, indices.flatten(), torch.ones_like(chosen))
    if not is_grouped:
        return weights, chosen
    return weights, _group(chosen, counts if counts_ahead else None, experts)


def _group(chosen: Tensor, counts: Tensor | None, experts: int) -> Groups:
    """Lay out pairs by expert. `counts`, of each expert, is padded to a power of two; None for few pairs."""
    pairs = chosen.shape[0]
    rows = _tile_rows(pairs, experts)
    # Each expert may leave one tile partly empty; more experts than pairs cannot be used.
    tiles = cdiv(pairs, rows) + min(experts, pairs)
    order, tile_expert, tile_pairs = (
        torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (tiles * rows, tiles, tiles)
    )
    groups = Groups(order, tile_expert, tile_pairs, rows)
    if counts is None:
        bins = next_power_of_2(experts + 1)
        own = min(32, max(4, COMPARED // bins))
        _group_kernel[(cdiv(max(pairs, tiles), own),)](
            chosen,
            order,
            tile_expert,
            tile_pairs,
            pairs,
            tiles,
            rows,
            EXPERTS=bins,
            PAIRS=next(size for size in FEW_PAIRS if pairs <= size),
            OWN=own,
            num_warps=4,
            **launch_options(),
        )
        return groups
    padded = counts.shape[0]
    cursor = torch.empty(padded, dtype=torch.int32, device=chosen.device)
    _layout_kernel[(cdiv(tiles, 32),)](
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
    _scatter_kernel[(cdiv(pairs, SCATTER_TILE),)](
        chosen, cursor, order, pairs, TILE=SCATTER_TILE, num_warps=4, **launch_options()
    )
    return groups


def _tile_rows(pairs: int, num_experts: int) -> int:
    """Return the height of a tile: the usual number of an expert's pairs, so that few weights are read twice and
    little is padded."""
    share = pairs / num_experts
    return 16 if share <= 12 else 32 if share <= 40 else 64 if share <= 128 else LARGEST_ROWS
