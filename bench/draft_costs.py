"""Shapes of drafts, chains and trees, what a step with each costs, and a stopwatch for the engine's kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.graphs import no_garbage_collection, padded_rows
from penstock.kernels.interface import AttentionBatch
from penstock.models.drafters.heads import EagleHead, Target

BLOCK_SIZE = 16
CONTEXT = 512
LARGEST_GRAPH = 4096  # rows
ROUNDS, REPLAYS = 11, 10


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step verifies: a chain has width 1 and as many nodes as it is deep."""

    width: int
    depth: int
    nodes: int

    @property
    def is_chain(self) -> bool:
        return self.width == 1

    def __str__(self) -> str:
        if not self.nodes:
            return "none"
        return f"{self.nodes}" if self.is_chain else f"{self.nodes} ({self.width} wide, {self.depth} deep)"


NOTHING = Shape(1, 0, 0)


def shapes(nodes: Sequence[int], widths: Sequence[int], depth: int) -> list[Shape]:
    """Return the chains and trees to compare. A tree has room for its nodes, and needs each of its depths."""
    chains = [Shape(1, count, count) for count in range(depth + 1)]
    return chains + [
        Shape(width, deep, count)
        for count in nodes
        for width in widths
        for deep in range(1, min(depth, count) + 1)
        if 1 < width <= count <= width + (deep - 1) * width**2
    ]


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds by number of rows, for this many requests at once."""

    requests: int
    step: dict[int, float]  # the model verifies
    head: dict[int, float]  # the head without its choice of tokens
    argmax: dict[int, float]
    top: dict[int, float]  # the choice for trees
    tree: float  # of each step with a tree

    def ms(self, shape: Shape) -> float:
        requests, choice = self.requests, self.argmax if shape.is_chain else self.top
        verified = between(self.step, requests * (1 + shape.nodes))
        if not shape.nodes:
            return verified
        rows = requests * shape.width
        first = between(self.head, requests * (1 + shape.depth)) + between(choice, requests)
        further = between(self.head, rows) + between(choice, rows)
        return verified + first + (shape.depth - 1) * further + (0 if shape.is_chain else self.tree)


def between(table: dict[int, float], rows: int) -> float:
    """Look up, interpolate, or go on from the last two entries."""
    known = sorted(table)
    if rows in table or len(known) == 1:
        return table.get(rows, table[known[0]])
    high = next((index for index in range(1, len(known)) if known[index] >= rows), len(known) - 1)
    low, high = known[high - 1], known[high]
    return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)


class Stopwatch:
    """Times the engine's model and a head."""

    def __init__(self, head: EagleHead, target: Target, requests: int, candidates: Sequence[Shape]) -> None:
        self.head, self.target, self.requests, self._candidates = head, target, requests, candidates
        self.device, self.is_cuda = target.ops.device, target.ops.device.type == "cuda"
        most = 2 * (8 + max(max(each.nodes, each.width) for each in candidates))  # rows of a request, padded
        self._blocks = -(-(CONTEXT + most) // BLOCK_SIZE)
        self._kv, self._head_kv = (
            target.ops.allocate_kv(
                each.num_layers, requests * self._blocks, BLOCK_SIZE, each.num_kv_heads, each.head_dim
            )
            for each in (target.model, head)
        )

    def costs(self) -> Costs:
        requests, candidates = self.requests, self._candidates
        width, depth = max(each.width for each in candidates), max(each.depth for each in candidates)
        drafted = {requests * each for shape in candidates for each in (1, 1 + shape.depth, shape.width)}
        verified = {requests * (1 + shape.nodes) for shape in candidates}
        chosen = {requests * each for shape in candidates for each in (1, shape.width)}
        moved = {0: self._tree_work(depth, width)}
        return Costs(
            requests,
            step=self._table(verified, self._verify),
            head=self._table(drafted, self._draft),
            argmax=self._table({requests}, lambda rows: lambda: self.head.argmax(self._features(rows))),
            top=self._table(chosen, lambda rows: lambda: self._top(self._features(rows), width)),
            tree=self._milliseconds(moved)[0],
        )

    def _table(self, rows: set[int], made: Callable[[int], Callable[[], object]]) -> dict[int, float]:
        sizes = {each: padded_rows(each, LARGEST_GRAPH) if self.is_cuda else each for each in rows}
        taken = self._milliseconds({size: made(size) for size in sorted(set(sizes.values()))})
        return {each: taken[size] for each, size in sorted(sizes.items())}

    def _features(self, rows: int) -> Tensor:
        size = self.target.model.config.hidden_size
        return torch.ones(rows, size, dtype=self.target.ops.dtype, device=self.device)

    def _verify(self, rows: int) -> Callable[[], object]:
        tokens, batch = self._tokens(rows), self._batch(rows, as_decodes=self.is_cuda)
        return lambda: self.target.argmax(self.target.model.forward(tokens, batch, self._kv))

    def _draft(self, rows: int) -> Callable[[], object]:
        tokens, features = self._tokens(rows), self._features(rows)
        batch = self._batch(rows, as_decodes=True)
        return lambda: self.head.forward(tokens, features, batch, self._head_kv)

    def _top(self, features: Tensor, width: int) -> Tensor:
        ops, output = self.target.ops, self.head._head
        logits = self.target.model.logits(features) if output is None else ops.logits(features, output)
        shares = logits.log_softmax(dim=1).topk(width).values
        return shares.view(self.requests, -1).topk(width).indices

    def _tree_work(self, depth: int, width: int) -> Callable[[], object]:
        """Return the choice of a tree's nodes, and the move of the KV of a path of full depth."""
        model, dtype = self.target.model, self.target.ops.dtype
        shape = (model.num_layers, self.requests * CONTEXT, 2 * model.num_kv_heads * model.head_dim)
        kv = torch.zeros(shape, dtype=dtype, device=self.device)
        source = torch.arange(self.requests * depth, device=self.device) * 2
        guesses = torch.rand(self.requests, width + (depth - 1) * width**2, device=self.device)

        def work() -> None:
            guesses.sort(dim=1, descending=True, stable=True)
            kv[:, source + 1] = kv[:, source]

        return work

    def _tokens(self, rows: int) -> Tensor:
        return torch.arange(3, 3 + rows, dtype=torch.int32, device=self.device)

    def _batch(self, rows: int, *, as_decodes: bool) -> AttentionBatch:
        """Return a batch in which all requests have about the same number of rows behind their context."""
        requests = min(self.requests, rows)
        owners, offsets = torch.arange(rows) * requests // rows, torch.arange(rows)
        offsets = offsets - torch.searchsorted(owners, owners)
        tables = torch.arange(requests * self._blocks).view(requests, self._blocks)
        counts = owners.bincount()
        positions = CONTEXT + offsets
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        lengths = CONTEXT + counts
        slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        if as_decodes:
            tables, starts, lengths = tables[owners], torch.arange(rows + 1), positions + 1
        on_device = [
            each.to(self.device, torch.int32) for each in (positions, slots, starts, lengths, tables)
        ]
        return AttentionBatch(
            *on_device,
            num_requests=len(lengths),
            max_query_len=1 if as_decodes else int(counts.max()),
            max_context_len=int(lengths.max()),
            num_decodes=rows if as_decodes else 0,
            lengths=None if self.is_cuda else (starts.to(torch.int32), lengths.to(torch.int32)),
        )

    @torch.inference_mode()
    def _milliseconds(self, works: dict[int, Callable[[], object]]) -> dict[int, float]:
        """Time several works in turns, so that all meet the same machine. Returns the medians."""
        turns = {key: (_replayed if self.is_cuda else _called)(work) for key, work in works.items()}
        rounds = [{key: turn() for key, turn in turns.items()} for _ in range(ROUNDS)]
        return {key: statistics.median(each[key] for each in rounds) for key in works}


def _called(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does the work and returns the CPU time of this thread."""
    work()

    def turn() -> float:
        began_s = time.thread_time()
        work()
        return 1000 * (time.thread_time() - began_s)

    return turn


def _replayed(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that replays the work from a graph and returns the time on the GPU."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph):
        work()

    def turn() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS

    return turn
