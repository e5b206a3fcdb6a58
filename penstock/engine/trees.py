"""Turns verified trees of drafts into chains. Knows no model and no drafter.

A step computes the nodes of a tree side by side: each at the position of its depth, in a slot of its own behind the
root, the newest known token. Once they are sampled, the answer follows one path: each node's token is the sample at
the node's parent. Samples, hidden states, KV and drafted tokens of the path move to the places that a chain has, so
that all that follows need not know of trees. The device does this, without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import Chunk
from penstock.engine.batch import DEVICE_DRAFTS, BatchRows, HostStep, Samples
from penstock.engine.staging import Staging
from penstock.kernels.interface import TREE_PLACES, MovesTokens


@dataclass(frozen=True, slots=True)
class Paths:
    """The accepted paths of N trees. Tensors are on the device, with a column for the root and for each level below
    it: columns behind the path's end lead to themselves."""

    nodes: Tensor  # int64 [N, levels + 1]: the node at each level, counted from the root, which is 0
    lengths: Tensor  # int64 [N], accepted nodes


def accepted_paths(tokens: Tensor, sampled: Tensor, ancestors: Tensor, counts: Tensor, depth: int) -> Paths:
    """Find the longest path of each tree on which every node's token is the sample at its parent: int64 [N, K + 1],
    the root and K nodes. Among equally long paths, the one that ends first counts. `counts` are the nodes of each
    tree, int64 [N], and `ancestors` are those of `AttentionBatch`."""
    num_trees, width = tokens.shape
    offsets = torch.arange(width, device=tokens.device)
    back = offsets[:, None] - offsets
    is_node = offsets <= counts[:, None]
    sees = ((ancestors[:, :, None] >> back.clamp(0, TREE_PLACES - 1)) & 1 == 1) & (back >= 0)
    sees[:, 0] = offsets == 0
    parents = (sees & (back > 0)).to(torch.int64).mul(offsets).amax(dim=2)
    agrees = (tokens == sampled.gather(1, parents)) & is_node
    agrees[:, 0] = True
    is_good = ~(sees & ~agrees[:, None]).any(dim=2) & is_node
    depths = sees.to(torch.int64).sum(dim=2) - 1
    last = torch.where(is_good, depths * width - offsets, -width).argmax(dim=1, keepdim=True)
    path = sees.gather(1, last[:, :, None].expand(-1, 1, width)).squeeze(1)
    nodes = torch.minimum(offsets, counts[:, None])
    nodes = torch.cat([nodes, nodes[:, :1]], dim=1)  # one column more takes what is not on the path
    levels = torch.where(path, depths, width)
    nodes.scatter_(1, levels, offsets.expand(num_trees, -1))
    return Paths(nodes[:, : min(depth + 1, width)], depths.gather(1, last).squeeze(1))


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """The accepted paths of a step's trees. Implements `LateDrafts`: the drafts are the drafts of the paths."""

    request_ids: list[str]
    num_levels: int
    made: Tensor  # int64 [N, levels + K], nodes of the path, then drafts; on the host once the step is done

    def of(self, request_id: str) -> tuple[int, ...]:
        """Return the drafts: the tokens of the path, then -1 for each node that was not accepted."""
        found: list[int] = self.made[self.request_ids.index(request_id), self.num_levels :].tolist()
        return tuple(found)

    def nodes_of(self, request_id: str, num_accepted: int) -> tuple[int, ...]:
        """Return the accepted nodes: their indices among the drafts."""
        found: list[int] = self.made[self.request_ids.index(request_id), :num_accepted].tolist()
        return tuple(node - 1 for node in found)

    def logprobs(self, samples: Samples, logprobs: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return log-probabilities by the place in a chain of the samples that they belong to."""
        moved = dict(logprobs)
        for request_id, first in zip(samples.request_ids, samples.firsts(), strict=True):
            if first in logprobs and request_id in self.request_ids:
                num_accepted = sum(token_id >= 0 for token_id in self.of(request_id))
                for level, node in enumerate(self.nodes_of(request_id, num_accepted), 1):
                    moved[first + level] = logprobs[first + node + 1]
        return moved


def straighten(
    chunks: Sequence[Chunk],
    step: HostStep,
    sampled: Tensor,
    hidden: Sequence[Tensor],
    kv: MovesTokens,
    rows: BatchRows,
    staging: Staging,
) -> AcceptedPaths:
    """Move what belongs to the accepted paths of a step's trees, in place. `sampled` are its samples, int64 [S], and
    `hidden` its hidden states, [T, ...] each."""
    trees = {chunk.request_id: chunk for chunk in chunks if chunk.tree_depth is not None}
    samples = step.samples
    found = [
        (trees[request_id], first, row)
        for request_id, first, row in zip(
            samples.request_ids, samples.firsts(), samples.request_rows.tolist(), strict=True
        )
        if request_id in trees
    ]
    num_nodes = np.array([len(chunk.drafts) for chunk, _, _ in found], dtype=np.int64)
    depth = max(chunk.tree_depth or 0 for chunk, _, _ in found)
    # A smaller tree repeats its last node.
    nodes = np.minimum(np.arange(int(num_nodes.max()) + 1), num_nodes[:, None])
    index = np.array([first for _, first, _ in found])[:, None] + nodes
    at = samples.at[index]
    places = np.array([row for _, _, row in found])[:, None] * DEVICE_DRAFTS + np.maximum(nodes, 1) - 1
    drawn_at, moved_at, slots, kept, own, counts = staging.all_to_device(
        index, at, step.slots[at].astype(np.int64), places, nodes, num_nodes
    )
    tokens, drawn = rows.draft_tokens[kept].to(torch.int64), sampled[drawn_at]
    paths = accepted_paths(tokens, drawn, rows.draft_ancestors[kept].to(torch.int64), counts, depth)
    levels = paths.nodes.shape[1]
    # Only what lies on the path moves: the source of anything else is its own place.
    sampled[drawn_at[:, :levels]] = drawn.gather(1, paths.nodes)
    for states in hidden:
        states[moved_at[:, :levels]] = states[moved_at.gather(1, paths.nodes)]
    kv.move_tokens(slots.gather(1, paths.nodes)[:, 1:], slots[:, 1:levels])
    drafts = torch.full_like(tokens, -1)
    drafts[:, :levels] = torch.where(
        own[:, :levels] <= paths.lengths[:, None], tokens.gather(1, paths.nodes), -1
    )
    drafts = drafts.gather(1, own)
    rows.draft_tokens[kept[:, 1:]] = drafts[:, 1:].to(torch.int32)
    # A smaller tree has nothing behind its last node.
    drafts = drafts.masked_fill(torch.arange(own.shape[1], device=own.device) > own, -1)
    made = torch.cat([paths.nodes[:, 1:], drafts[:, 1:]], dim=1)
    if made.device.type == "cuda":
        made = torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
    return AcceptedPaths([chunk.request_id for chunk, _, _ in found], levels - 1, made)
