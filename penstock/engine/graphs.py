"""CUDA graphs: decode steps are replayed whole, and steps with a few tokens of prompts are replayed except for
attention.

A graph of decode steps is captured the first time its size is needed and belongs to a padded number of requests and a
bound on the context. Its inputs live in buffers that never move; rows beyond the real requests read nothing and write
their KV to a block that no request owns.

A step with a few tokens of prompts takes the GPU less time than the host needs for its several hundred launches. The
work between two attentions depends on the number of tokens alone: it is one graph, recorded for a padded number of
tokens. Attention, which depends on the contexts, is launched as always. These graphs are recorded when a padded size
is met for the second time.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import BatchRows, HostStep, Staging
from penstock.kernels.interface import Attend, AttentionBatch, CutsAtAttention, KVStore
from penstock.kernels.states import StateBatch
from penstock.models.model import Model

MIN_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    hidden: Tensor


class DecodeGraphs:
    def __init__(
        self, model: Model, kv: KVStore, rows: BatchRows, staging: Staging, max_model_len: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._max_model_len = max_model_len
        self._sizes = _sizes(rows.max_rows)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._capture_s = 0.0
        self.hidden: Tensor | None = None  # [R, hidden] of the latest call, valid until the next one
        self._pool = torch.cuda.graph_pool_handle()
        self._spare_slot = kv.num_blocks * kv.block_size
        device = rows.last_tokens.device
        largest = self._sizes[-1]
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        # One array for all that a step needs, so that one copy brings it: where each token comes from, positions,
        # slots, context lengths, then block tables. In front of it the rows' newest tokens and after those the
        # tokens that the host knows: `sources` are indices into these two.
        most = rows.max_rows + (5 + self._table_width(max_model_len)) * largest
        self._buffer = torch.zeros(most, dtype=torch.int32, device=device)
        self._inputs = self._buffer[rows.max_rows :]
        # States are updated in place: no row of a recording, and no padded row, may have the state of a request.
        self._state_slots: Tensor | None = None
        if rows.states is not None:
            self._state_slots = torch.full((largest,), rows.states.num_slots, device=device)
        rows.keep_last_tokens_in(self._buffer[: rows.max_rows])

    def take_capture_s(self) -> float:
        """Return the seconds that captures took since the last call: no other step of their size takes them."""
        taken_s, self._capture_s = self._capture_s, 0.0
        return taken_s

    def fits(self, step: HostStep) -> bool:
        count = len(step.rows)
        return step.num_decodes == count == len(step.samples.at) and count <= self._sizes[-1]

    def logits(self, step: HostStep) -> Tensor:
        """Return float32 [R, V], valid until the next call."""
        count = len(step.rows)
        size = next(size for size in self._sizes if size >= count)
        context = self._context_bound(step.max_context_len)
        self._fill(step, count, size, context)
        captured = self._captured.get((size, context))
        if captured is None:
            if self._state_slots is not None and self._rows.states is not None:
                self._state_slots.fill_(self._rows.states.num_slots)
            began_s = perf_counter()
            captured = self._captured[size, context] = self._capture(size, context)
            torch.cuda.synchronize()
            self._capture_s += perf_counter() - began_s
        if self._state_slots is not None:
            self._fill_states(step, count, size)
        captured.graph.replay()
        self.hidden = captured.hidden[:count]
        return captured.logits[:count]

    def _fill(self, step: HostStep, count: int, size: int, context: int) -> None:
        width = self._table_width(context)
        inputs = np.zeros((5 + width) * size, dtype=np.int32)
        tokens, sources, positions, slots, context_lens = inputs[: 5 * size].reshape(5, size)
        tokens[:count] = step.token_ids
        sources[:] = self._rows.max_rows + np.arange(size)
        sources[step.in_flight_at] = step.in_flight_rows
        positions[:count] = step.positions
        slots[:count], slots[count:] = step.slots, self._spare_slot
        context_lens[:count] = step.context_lens
        inputs[5 * size :].reshape(size, width)[:count] = self._rows.block_tables(step.rows, width)
        self._staging.copy_into(self._inputs, inputs)

    def _fill_states(self, step: HostStep, count: int, size: int) -> None:
        assert self._rows.states is not None
        assert self._state_slots is not None
        slots = np.full(size, self._rows.states.num_slots, dtype=np.int64)
        slots[:count] = self._rows.state_slots(step.rows)
        self._staging.copy_into(self._state_slots, slots)

    def _capture(self, size: int, context: int) -> _Captured:
        width = self._table_width(context)
        _, sources, positions, slots, context_lens = self._inputs[: 5 * size].view(5, size)
        batch = AttentionBatch(
            positions=positions,
            slots=slots,
            query_starts=self._query_starts[: size + 1],
            context_lens=context_lens,
            block_tables=self._inputs[5 * size : (5 + width) * size].view(size, width),
            num_requests=size,
            max_query_len=1,
            max_context_len=context,
            num_decodes=size,
            states=self._state_batch(size),
        )
        known_tokens = self._buffer[: self._rows.max_rows + size]

        def forward() -> tuple[Tensor, Tensor]:
            token_ids = known_tokens.index_select(0, sources)
            hidden = self._model.forward(token_ids, batch, self._kv)
            return self._model.logits(hidden), hidden

        # The warm-up compiles kernels and writes the step's KV, which the replay then writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, hidden = forward()
        return _Captured(graph, logits, hidden)

    def _state_batch(self, size: int) -> StateBatch | None:
        if self._state_slots is None or self._rows.states is None:
            return None
        return StateBatch(self._rows.states, self._state_slots[:size])

    def _context_bound(self, context: int) -> int:
        bound = MIN_CONTEXT
        while bound < context:
            bound *= 2
        return min(bound, self._max_model_len)

    def _table_width(self, context: int) -> int:
        return -(-context // self._rows.block_size)


def _sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, then every multiple of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]


logger = logging.getLogger(__name__)

# Parameters × tokens that keep an H200 busy for as long as a host needs to launch the step: 15 ms.
HOST_BOUND_WORK = 5_200_000_000_000
FEWEST, MOST = 128, 2048  # tokens up to which steps are recorded: for the largest models, for the smallest


@dataclass(frozen=True, slots=True)
class _Recorded:
    pieces: list[tuple[torch.cuda.CUDAGraph, Attend]]
    last: torch.cuda.CUDAGraph
    hidden: Tensor

    def replay(self, batch: AttentionBatch) -> None:
        for graph, attend in self.pieces:
            graph.replay()
            attend(batch)
        self.last.replay()


class PromptGraphs:
    def __init__(
        self, model: Model, ops: CutsAtAttention, kv: KVStore, rows: BatchRows, staging: Staging
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._sizes = padded_sizes(model.num_parameters)
        self._met: set[int] = set()
        self._recorded: dict[int, _Recorded] = {}
        self._is_full = False  # no memory for more sizes
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._spare_slot = kv.num_blocks * kv.block_size
        device = rows.last_tokens.device
        largest = self._sizes[-1]
        self._inputs = torch.zeros(3 * largest, dtype=torch.int32, device=device)
        shape = (largest, model.config.num_heads, model.head_dim)
        self._queries = torch.zeros(shape, dtype=ops.dtype, device=device)
        self._attended = torch.zeros_like(self._queries)

    def hidden(self, step: HostStep) -> Tensor | None:
        """Return [T, hidden], valid until the next call; None when the step must be launched piece by piece."""
        count = len(step.token_ids)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        recorded = self._recorded.get(size)
        if recorded is None:
            if self._is_full or size not in self._met:
                self._met.add(size)
                return None
            try:
                recorded = self._recorded[size] = self._record(size)
            except torch.OutOfMemoryError:
                self._is_full = True
                logger.warning(
                    "no memory to record steps of %d tokens: they are launched piece by piece", size
                )
                return None
        self._fill(step, count, size)
        recorded.replay(self._rows.attention_batch(step))
        return recorded.hidden[:count]

    def _fill(self, step: HostStep, count: int, size: int) -> None:
        inputs = np.zeros((3, size), dtype=np.int32)
        inputs[:, :count] = step.token_ids, step.positions, step.slots
        inputs[2, count:] = self._spare_slot
        self._staging.copy_into(self._inputs, inputs.reshape(-1))
        if step.in_flight_at.size:
            at, rows = self._staging.all_to_device(step.in_flight_at, step.in_flight_rows)
            self._inputs[at] = self._rows.last_tokens[rows]

    def _record(self, size: int) -> _Recorded:
        token_ids, positions, slots = self._inputs[: 3 * size].view(3, size)
        nothing = self._inputs[:0]
        batch = AttentionBatch(positions, slots, nothing, nothing, nothing, 0, 0, 0)
        recording = _Recording(self._pool)
        model = self._model.with_ops(self._ops.cut_at_attention(recording.cut, self._queries, self._attended))
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), recording:
            hidden = model.forward(token_ids, batch, self._kv)
        return _Recorded(recording.pieces, recording.graph, hidden)


@dataclass(slots=True)
class _Recording:
    """Records a forward pass, run in this context, as graphs with attentions between them."""

    pool: Any  # from `torch.cuda.graph_pool_handle`
    pieces: list[tuple[torch.cuda.CUDAGraph, Attend]] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)

    def cut(self, attend: Attend) -> None:
        self.graph.capture_end()
        self.pieces.append((self.graph, attend))
        self.graph = torch.cuda.CUDAGraph()
        self._begin()

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.graph.capture_end()
            return
        with contextlib.suppress(RuntimeError):  # of a recording that broke off
            self.graph.capture_end()

    def _begin(self) -> None:
        # Other threads may go on: they copy blocks and compile grammars.
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")


def padded_sizes(num_parameters: int) -> list[int]:
    """Return the numbers of tokens to which steps are padded, by an eighth on average."""
    largest = min(MOST, max(FEWEST, HOST_BOUND_WORK // max(num_parameters, 1)))
    sizes = [16, 32, 48, 64, 96, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, MOST + 1, 256)]
    return [size for size in sizes if size <= largest]
