"""Drafts on the device right after a step, from samples that the host has not seen yet.

The device counts how many drafts of the step were accepted, so that the next drafts follow from the newest token
without a round trip to the host. The host gets the count and the new drafts in one copy. On a GPU each drafted token
is one replay of a CUDA graph, whose inputs are the results of the replay before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from penstock.core.plan import Chunk
from penstock.engine.batch import HostStep, Int64Array
from penstock.engine.drafters.guessers import Guesser
from penstock.engine.graphs import MIN_CONTEXT, padded_rows, recorded
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, KVStore


@dataclass(frozen=True, slots=True)
class Verified:
    """Requests of a step, N of them, each with one known token and up to K drafts after it. Tensors are on the
    device."""

    request_ids: list[str]
    positions: Int64Array  # [N] on the host, of the known tokens
    starts: Tensor  # the same
    num_drafts: Tensor  # int64 [N]
    tokens: Tensor  # int64 [N, K + 1], the known token and the drafts
    sampled: Tensor  # int64 [N, K + 1], the samples after them
    at: Tensor  # int64 [N, K + 1], indices in T of the step
    num_accepted: Tensor  # int64 [N]


def verified(
    chunks: Mapping[str, Chunk], step: HostStep, sampled: Tensor, draft_tokens: Tensor, staging: Staging
) -> Verified | None:
    """Count the accepted drafts of some requests of a step. `sampled` are the samples of the step, int64 [S], and
    `draft_tokens` the drafts that the host did not know."""
    samples = step.samples
    found = [
        (chunks[request_id], first)
        for request_id, first in zip(samples.request_ids, samples.firsts(), strict=True)
        if request_id in chunks
    ]
    if not found:
        return None
    # No path of a tree is longer than the tree is deep.
    num_drafts = np.array(
        [min(len(chunk.drafts), chunk.tree_depth or len(chunk.drafts)) for chunk, _ in found], dtype=np.int64
    )
    offsets = np.arange(int(num_drafts.max()) + 1)
    index = np.array([first for _, first in found])[:, None] + np.minimum(offsets, num_drafts[:, None])
    at = samples.at[index]
    positions = np.array([chunk.start for chunk, _ in found], dtype=np.int64)
    is_draft = offsets[1:] <= num_drafts[:, None]
    chosen, placed, known, counted, starts, counts = staging.all_to_device(
        index, at, step.token_ids[at].astype(np.int64), is_draft, positions, num_drafts
    )
    if step.drafts_at.size:
        late = np.full(len(step.token_ids), -1, dtype=np.int64)
        late[step.drafts_at] = step.drafts_from
        places = staging.to_device(late[at])
        known = torch.where(places >= 0, draft_tokens[places.clamp(min=0)].to(torch.int64), known)
    drawn = sampled[chosen]
    accepts = (drawn[:, :-1] == known[:, 1:]) & counted
    num_accepted = accepts.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return Verified(
        [chunk.request_id for chunk, _ in found],
        positions,
        starts,
        counts,
        known,
        drawn.clamp_(min=0),  # a position that could not be sampled
        placed,
        num_accepted,
    )


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Drafts that the device computes while the host commits the previous step. The host need not know the drafts of
    `blind` requests before they are verified."""

    request_ids: list[str]
    starts: list[int]  # the position of each request's known token in the step
    made: Tensor  # int64 [N, 1 + most], accepted drafts of the step, and new drafts; on the host once done
    blind: Collection[str] = ()
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # the beginning and the end, on a GPU
    has_recorded: bool = False  # a graph was recorded meanwhile, so that the time is not representative
    tree_depth: int | None = None  # of drafts that are trees

    @property
    def length(self) -> int:
        return self.made.shape[1] - 1

    def read(self) -> list[list[int]]:
        if self.events is not None:
            self.events[1].synchronize()
        made: list[list[int]] = self.made.tolist()
        return made

    def of(self, request_id: str) -> tuple[int, ...]:
        """Return the drafts of a request."""
        return tuple(self.read()[self.request_ids.index(request_id)][1:])

    @property
    def elapsed_s(self) -> float | None:
        """Return the seconds that the GPU took, once done."""
        if self.events is None:
            return None
        self.events[1].synchronize()
        return float(self.events[0].elapsed_time(self.events[1])) / 1000.0


def send(
    step: Verified,
    drafted: Tensor,
    blind: Collection[str] = (),
    began: torch.cuda.Event | None = None,
    *,
    has_recorded: bool = False,
    tree_depth: int | None = None,
) -> OnTheWay:
    """Start the copy of new drafts to the host: int64 [N, most]."""
    made, events = torch.cat([step.num_accepted[:, None], drafted], dim=1), None
    if made.device.type == "cuda":
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        made = host.copy_(made, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        events = (began or done, done)
    return OnTheWay(step.request_ids, step.positions.tolist(), made, blind, events, has_recorded, tree_depth)


@dataclass(frozen=True, slots=True)
class Newest:
    """The start of the next drafts, for N requests: the states behind their newest tokens, and the positions of the
    next inputs."""

    states: Tensor  # [N, hidden]
    positions: Tensor  # int64 [N]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph of one drafted token for each row, and its inputs, which its results replace."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    states: Tensor
    positions: Tensor
    tables: Tensor

    def draft(self, tokens: Tensor, states: Tensor, positions: Tensor, count: int) -> Tensor:
        num_rows = len(tokens)
        drafted = tokens.new_empty(num_rows, count)
        drafted[:, 0] = tokens
        self.tokens[:num_rows], self.states[:num_rows], self.positions[:num_rows] = tokens, states, positions
        for index in range(1, count):
            self.graph.replay()
            drafted[:, index] = self.tokens[:num_rows]
        return drafted


class DraftSteps:
    """Runs a guesser from the last verified tokens on, for as many tokens as are wanted."""

    def __init__(
        self, guesser: Guesser, kv: KVStore, max_rows: int, max_positions: int, *, records_graphs: bool
    ) -> None:
        """The last block of `kv` must belong to no request: padding rows write to it."""
        self._guesser, self._kv = guesser, kv
        self.max_rows, self._max_positions = max_rows, max_positions
        self._spare_slot = (kv.num_blocks - 1) * kv.block_size
        self.records_graphs = records_graphs
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._has_recorded = False
        self._recording_s = 0.0
        self.graph_pool = torch.cuda.graph_pool_handle() if records_graphs else None

    def take_has_recorded(self) -> bool:
        """Return whether a graph was recorded since the last call."""
        has_recorded, self._has_recorded = self._has_recorded, False
        return has_recorded

    def take_recording_s(self) -> float:
        """Return the seconds that recordings took since the last call."""
        taken_s, self._recording_s = self._recording_s, 0.0
        return taken_s

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note that a graph is recorded, and for how long."""
        began_s = perf_counter()
        self._has_recorded = True
        try:
            yield
        finally:
            self._recording_s += perf_counter() - began_s

    def width(self, max_context: int) -> int:
        """Return the number of blocks in a table for contexts of up to this many tokens."""
        return -(-self.bound(max_context) // self._kv.block_size)

    def catch_up(self, step: Verified, states: Tensor | None, tables: Tensor, max_context: int) -> Newest:
        """Compute the verified tokens. `states` is the input of a head for each token of the step, [N, K + 1, ...].
        `tables` is int32 [N, width(max_context)]."""
        lag, num_rows = self._guesser.lag, len(tables)
        device, bound = tables.device, self.bound(max_context)
        starts, rows = step.starts, torch.arange(num_rows, device=device)
        offsets = torch.arange(step.tokens.shape[1], device=device)
        positions = starts[:, None] + offsets
        newest = step.sampled[rows, step.num_accepted]
        if lag:
            tokens, is_used = step.sampled, offsets <= step.num_drafts[:, None]
        else:  # the newest token comes last, in place of drafts that were not accepted
            last = starts + step.num_accepted + 1
            tokens = torch.cat([step.tokens, newest[:, None]], dim=1)
            positions = torch.cat([positions, last[:, None]], dim=1)
            is_used = positions <= last[:, None]
            is_used[:, :-1] &= offsets <= step.num_accepted[:, None]
        per_row = tokens.shape[1]
        batch = self._batch(
            torch.where(is_used, positions, 0).view(-1),
            is_used.reshape(-1),
            tables.repeat_interleave(per_row, dim=0),
            bound,
        )
        flat = None if states is None else states.reshape(num_rows * per_row, -1)
        hidden = self._guesser.forward(tokens.reshape(-1).to(torch.int32), flat, batch, self._kv)
        hidden = hidden.view(num_rows, per_row, -1)
        newest_state = hidden[rows, step.num_accepted] if lag else hidden[:, -1].contiguous()
        return Newest(newest_state, starts + step.num_accepted + 2 - lag)

    def extend(
        self, tokens: Tensor, states: Tensor, positions: Tensor, tables: Tensor, max_context: int, count: int
    ) -> Tensor:
        """Return drafts of `count` tokens, of which the first are known: int64 [N] → [N, count]. `states` are those
        behind which the first tokens follow, and the next inputs are at `positions`."""
        bound = self.bound(max_context)
        if count > 1 and self.records_graphs:
            return self._graph(tokens, states, positions, tables, bound).draft(
                tokens, states, positions, count
            )
        drafted = [tokens]
        is_used = torch.ones_like(tokens, dtype=torch.bool)
        for _ in range(count - 1):
            batch = self._batch(positions, is_used, tables, bound)
            states = self._guesser.forward(drafted[-1].to(torch.int32), states, batch, self._kv)
            drafted.append(self._guesser.argmax(states))
            positions = positions + 1
        return torch.stack(drafted, dim=1)

    def _graph(
        self, tokens: Tensor, states: Tensor, positions: Tensor, tables: Tensor, bound: int
    ) -> _Recorded:
        num_rows = len(tokens)
        size = padded_rows(num_rows, self.max_rows)
        found = self._recorded.get((size, bound))
        if found is None:
            with self.recording():
                found = self._recorded[size, bound] = self._record(
                    tokens.new_zeros(size),
                    states.new_zeros(size, states.shape[1]),
                    positions.new_zeros(size),
                    tables.new_full((size, tables.shape[1]), self._kv.num_blocks - 1),
                    bound,
                )
        found.tables[:num_rows] = tables
        found.tables[num_rows:] = self._kv.num_blocks - 1
        found.positions[num_rows:] = 0
        return found

    def _record(
        self, tokens: Tensor, states: Tensor, positions: Tensor, tables: Tensor, bound: int
    ) -> _Recorded:
        is_used = torch.ones_like(
            tokens, dtype=torch.bool
        )  # rows without a request have a table of the spare block

        def forward() -> tuple[Tensor, Tensor]:
            batch = self._batch(positions.clamp(max=bound - 1), is_used, tables, bound)
            made = self._guesser.forward(tokens.to(torch.int32), states, batch, self._kv)
            return made, self._guesser.argmax(made)

        def advance() -> None:
            made, chosen = forward()
            states.copy_(made)
            tokens.copy_(chosen)
            positions.add_(1)

        # The first run writes KV to the spare block.
        graph, _ = recorded(advance, self.graph_pool)
        return _Recorded(graph, tokens, states, positions, tables)

    def _batch(self, positions: Tensor, is_used: Tensor, tables: Tensor, bound: int) -> AttentionBatch:
        """Return a batch of single tokens. A token that is not used is at position 0, and writes to the spare
        block."""
        size, count = self._kv.block_size, len(positions)
        blocks = tables.gather(1, (positions // size)[:, None]).squeeze(1).to(torch.int64)
        slots = torch.where(is_used, blocks * size + positions % size, self._spare_slot)
        query_starts = torch.arange(count + 1, dtype=torch.int32, device=positions.device)
        context_lens = (positions + 1).to(torch.int32)
        on_host = positions.device.type == "cpu"
        return AttentionBatch(
            positions.to(torch.int32),
            slots.to(torch.int32),
            query_starts,
            context_lens,
            tables,
            num_requests=count,
            max_query_len=1,
            max_context_len=bound,
            num_decodes=count,
            lengths=(query_starts, context_lens) if on_host else None,
        )

    def batch(self, positions: Tensor, tables: Tensor, bound: int) -> AttentionBatch:
        """Return a batch of single tokens: int64 [N], with a table for each."""
        return self._batch(positions, torch.ones_like(positions, dtype=torch.bool), tables, bound)

    def bound(self, max_context: int) -> int:
        bound = MIN_CONTEXT
        while bound < max_context:
            bound *= 2
        return min(bound, self._max_positions)


def followed_chunks(chunks: Sequence[Chunk]) -> dict[str, Chunk]:
    """Return the chunks behind which drafts can follow: those with one known token, which samples."""
    return {
        chunk.request_id: chunk
        for chunk in chunks
        if chunk.samples and not chunk.in_flight and chunk.num_tokens == len(chunk.drafts) + 1
    }


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that is recorded now, on a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
