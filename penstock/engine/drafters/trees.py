"""Grows trees of drafts with a head, as EAGLE 2 does. Knows no requests and no scheduler.

On each level, the guesses with the highest joint probability get guesses behind them. The most probable guesses of
all levels become the nodes of the tree. A guess is never more probable than its parent, so that any number of the
first nodes is a tree too. On a GPU the growth of a tree is one replay of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.drafters.following import DraftSteps, Newest
from penstock.engine.drafters.guessers import TreeGuesser
from penstock.engine.graphs import padded_rows, recorded
from penstock.kernels.interface import AttentionBatch, KVStore

TREE_WIDTH = 8  # guesses of a level that get guesses behind them
TREE_DEPTH = 4  # most levels: all guesses of a path fit into the bits of `AttentionBatch.ancestors`
TREE_NODES = 15  # with the newest token, a step of one request has 16 rows


@dataclass(frozen=True, slots=True)
class Tree:
    """Trees of N requests, with K nodes each. Tensors are on the device."""

    tokens: Tensor  # int64 [N, K]
    lags: Tensor  # int64 [N, K], how many places a node lies behind its position
    ancestors: Tensor  # int64 [N, K], of `AttentionBatch`


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph that grows trees, and its inputs."""

    graph: torch.cuda.CUDAGraph
    states: Tensor
    positions: Tensor
    tables: Tensor
    made: Tree


def num_places(depth: int) -> int:
    """Return how many tokens the head computes for a tree."""
    return (depth - 1) * TREE_WIDTH


def num_nodes(depth: int) -> int:
    return min(TREE_NODES, TREE_WIDTH + (depth - 1) * TREE_WIDTH**2)


class TreeSteps:
    def __init__(self, guesser: TreeGuesser, kv: KVStore, steps: DraftSteps) -> None:
        self._guesser, self._kv, self._steps = guesser, kv, steps
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}

    def grow(self, newest: Newest, tables: Tensor, max_context: int, depth: int) -> Tree:
        """Grow trees behind the newest tokens. `tables` is int32 [N, width(max_context)]."""
        bound = self._steps.bound(max_context)
        if not self._steps.records_graphs:
            return self._grown(newest.states, newest.positions, tables, bound, depth)
        num_rows = len(tables)
        size = padded_rows(num_rows, self._steps.max_rows)
        found = self._recorded.get((size, bound, depth))
        if found is None:
            with self._steps.recording():
                found = self._recorded[size, bound, depth] = self._record(newest, tables, size, bound, depth)
        found.states[:num_rows], found.positions[:num_rows] = newest.states, newest.positions
        found.positions[num_rows:] = 0
        found.tables[:num_rows] = tables
        found.tables[num_rows:] = self._kv.num_blocks - 1
        found.graph.replay()
        made = found.made
        return Tree(made.tokens[:num_rows], made.lags[:num_rows], made.ancestors[:num_rows])

    def _record(self, newest: Newest, tables: Tensor, size: int, bound: int, depth: int) -> _Recorded:
        states = newest.states.new_zeros(size, newest.states.shape[1])
        positions = newest.positions.new_zeros(size)
        # Rows without a request write to the spare block.
        spare = tables.new_full((size, tables.shape[1]), self._kv.num_blocks - 1)
        graph, made = recorded(
            lambda: self._grown(states, positions, spare, bound, depth), self._steps.graph_pool
        )
        return _Recorded(graph, states, positions, spare, made)

    def _grown(self, states: Tensor, positions: Tensor, tables: Tensor, bound: int, depth: int) -> Tree:
        """Grow trees of rows, from the states behind which guesses follow and the positions of the first guesses."""
        width, num_rows = TREE_WIDTH, len(positions)
        rows = torch.arange(num_rows, device=positions.device)[:, None]
        joint, tokens = self._guesses(states, positions.new_zeros(num_rows, 1, dtype=torch.float32))
        scores, guesses = [joint], [tokens]
        origins = [torch.full_like(tokens, -1)]  # index of each guess's parent in all guesses
        levels = [torch.ones_like(tokens[0])]
        kept = torch.arange(width, device=positions.device).expand(num_rows, -1)
        beam = states[:, None].expand(-1, width, -1)
        paths = kept.new_empty(num_rows, width, 0)  # places of the guesses on the way to each
        num_guesses = 0
        for level in range(1, depth):
            places = torch.arange(width, device=positions.device) + (level - 1) * width
            paths = torch.cat([paths, places.expand(num_rows, -1)[:, :, None]], dim=2)
            batch = self._batch(positions, paths, tables, bound)
            made = self._guesser.forward(
                tokens.flatten().to(torch.int32), beam.flatten(0, 1), batch, self._kv
            )
            origins.append(kept.repeat_interleave(width, dim=1))
            candidates, tokens = self._guesses(made, joint.reshape(-1, 1))
            candidates, tokens = candidates.view(num_rows, -1), tokens.view(num_rows, -1)
            scores.append(candidates)
            guesses.append(tokens)
            levels.append(torch.full_like(tokens[0], level + 1))
            num_guesses += scores[-2].shape[1]
            if level == depth - 1:
                break
            joint, best = candidates.topk(width, dim=1)
            parents = best // width
            kept, tokens = best + num_guesses, tokens.gather(1, best)
            beam, paths = made.view(num_rows, width, -1)[rows, parents], paths[rows, parents]
        return _chosen(
            torch.cat(scores, 1), torch.cat(guesses, 1), torch.cat(origins, 1), torch.cat(levels), depth
        )

    def _guesses(self, states: Tensor, joint: Tensor) -> tuple[Tensor, Tensor]:
        """Guess behind states: [S, hidden] and the joint log-probabilities in front, [S, 1] → joint log-probabilities
        and tokens, [S, width] each."""
        shares, tokens = self._guesser.top(states, TREE_WIDTH)
        # A guess is no better than its parent, whatever rounding or broken states say.
        shares = shares.float().nan_to_num(nan=-1e30, posinf=0.0, neginf=-1e30).clamp(max=0.0)
        return joint + shares, tokens

    def _batch(self, positions: Tensor, paths: Tensor, tables: Tensor, bound: int) -> AttentionBatch:
        """Return the batch of one level's guesses, int64 [N, width, level]: each sees its request's text and its
        path."""
        num_rows, width, level = paths.shape
        own = paths[:, :, -1]
        sees = _bit(own[:, :, None] - paths).sum(dim=2) - _bit(own + 1)
        behind = torch.arange(width, device=positions.device).repeat(num_rows)
        batch = self._steps.batch(
            (positions[:, None] + own).flatten().clamp(max=bound - 1),
            tables.repeat_interleave(width, dim=0),
            bound,
        )
        return replace(
            batch,
            positions=(positions + level - 1).repeat_interleave(width).to(torch.int32),
            neighbours=torch.stack([behind, width - behind]).to(torch.int32),
            ancestors=sees.flatten().to(torch.int32),
        )


def _chosen(scores: Tensor, guesses: Tensor, origins: Tensor, levels: Tensor, depth: int) -> Tree:
    """Take the most probable of all guesses: [N, M] each, and their levels [M]. `origins` are indices of parents; -1
    stands for the newest token."""
    count = num_nodes(depth)
    # Equally probable guesses keep their order, in which parents come first.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    nodes = torch.arange(1, count + 1, device=scores.device).expand(len(scores), -1)
    rank = torch.zeros_like(guesses).scatter_(1, order, nodes)
    parents = rank.gather(1, origins.clamp(min=0)).masked_fill(origins < 0, 0).gather(1, order)
    sees = 1 - _bit(nodes + 1)
    above, is_below_root = parents, torch.ones_like(nodes, dtype=torch.bool)
    for _ in range(depth):
        sees = sees + torch.where(is_below_root, _bit(nodes - above), 0)
        is_below_root = is_below_root & (above > 0)
        above = parents.gather(1, (above - 1).clamp(min=0)).masked_fill(~is_below_root, 0)
    return Tree(guesses.gather(1, order), nodes - levels[order], sees)


def _bit(places: Tensor) -> Tensor:
    return torch.ones_like(places) << places
