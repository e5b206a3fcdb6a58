"""CUDA graphs: decode steps are replayed whole, and steps with a few tokens of prompts are replayed except for
attention.

A graph of decode steps is captured the first time its size is needed and belongs to a padded number of requests and a
bound on the context. Its inputs live in buffers that never move; rows beyond the real requests read nothing and write
their KV to a block that no request owns. A graph of steps that verify drafts is captured the second time: many of
their sizes never return, and launching such a step piece by piece takes less time than a capture.

A step with a few tokens of prompts takes the GPU less time than the host needs for its several hundred launches. The
work between two attentions depends on the number of tokens alone: it is one graph, recorded for a padded number of
tokens. Attention, which depends on the contexts, is launched as always. These graphs are recorded when a padded size
is met for the second time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters import LoRAModel, Slots
from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.staging import Staging
from penstock.engine.windows import with_parts
from penstock.kernels.adapted import NO_ADAPTER
from penstock.kernels.interface import Attend, AttentionBatch, CutsAtAttention, KVStore
from penstock.kernels.states import StateBatch
from penstock.models.model import Model, TappedModel

T = TypeVar("T")

MIN_CONTEXT = 1024
NUM_COLUMNS = 7  # of the inputs of a step, in front of block tables


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector while a graph is recorded: freeing an old graph would break the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def recorded(run: Callable[[], T], pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record a function. It is run once before, to compile kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph, pool=pool):
        made = run()
    return graph, made


# Padded rows, bound on the context, whether the step verifies drafts, whether as trees, version of the adapters.
_Key = tuple[int, int, bool, bool, int | None]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    hidden: Tensor  # [R, hidden], or [R, len(taps) × hidden] with taps


class DecodeGraphs:
    def __init__(
        self,
        model: Model,
        kv: KVStore,
        rows: BatchRows,
        staging: Staging,
        max_model_len: int,
        taps: tuple[int, ...] = (),
        lora: LoRAModel | None = None,
    ) -> None:
        """`taps` are layers whose inputs are returned in place of final hidden states."""
        self._model = model
        self.taps = taps
        self._lora = lora
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._max_model_len = max_model_len
        self._sizes = _sizes(rows.max_rows)
        self._captured: dict[_Key, _Captured] = {}
        self._met: set[_Key] = set()  # once, by steps that verify drafts
        self._capture_s = 0.0
        self.hidden: Tensor | None = None  # of the latest call, valid until the next one
        self._pool = torch.cuda.graph_pool_handle()
        self._spare_slot = kv.num_blocks * kv.block_size
        device = rows.last_tokens.device
        largest = self._sizes[-1]
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        # One array for all inputs of a step, so that one copy is enough: where each token comes from, positions,
        # slots, context lengths, neighbours, then block tables. In front of it the rows' newest tokens and drafts on
        # the device, and after those the tokens that the host knows: `sources` are indices into these.
        first = rows.num_device_tokens
        most = first + (NUM_COLUMNS + self._table_width(max_model_len)) * largest
        self._buffer = torch.zeros(most, dtype=torch.int32, device=device)
        self._inputs = self._buffer[first:]
        self._ancestors = torch.full((largest,), -1, dtype=torch.int32, device=device)  # of steps with trees
        # States are updated in place: no row of a recording, and no padded row, may have the state of a request.
        self._state_slots: Tensor | None = None
        if rows.states is not None:
            self._state_slots = torch.full((largest,), rows.states.num_slots, device=device)
        # Inputs of layers with windows: slots of all parts, then context lengths and block tables of each group.
        self._window_inputs: Tensor | None = None
        if rows.windows is not None:
            self._window_inputs = torch.zeros(self._window_size(largest), dtype=torch.int32, device=device)
        rows.keep_tokens_in(self._buffer[:first])

    def _window_size(self, size: int) -> int:
        """Return how many integers a step of `size` requests needs for layers with windows."""
        windows = self._rows.windows
        assert windows is not None
        groups = windows.layout.groups
        tables = sum(each.num_parts * windows.decode_width(at) for at, each in enumerate(groups))
        return size * (windows.layout.num_parts + len(groups) + tables)

    def take_capture_s(self) -> float:
        """Return the seconds that captures took since the last call: no other step of their size takes them."""
        taken_s, self._capture_s = self._capture_s, 0.0
        return taken_s

    def fits(self, step: HostStep) -> bool:
        count = len(step.rows)
        return step.num_decodes == count == len(step.samples.at) and count <= self._sizes[-1]

    def logits(self, step: HostStep, slots: Slots | None = None) -> Tensor | None:
        """Return float32 [R, V], valid until the next call; None when the step must be launched piece by piece.
        `slots` says which rows have adapters."""
        count = len(step.rows)
        size = next(size for size in self._sizes if size >= count)
        context = self._context_bound(step.max_context_len)
        version = use_adapters(self._lora, slots, size)
        key = size, context, step.neighbours is not None, step.has_trees, version
        captured = self._captured.get(key)
        if captured is None and step.neighbours is not None and key not in self._met:
            self._met.add(key)
            return None
        self._fill(step, count, size, context)
        if captured is None:
            if self._state_slots is not None and self._rows.states is not None:
                self._state_slots.fill_(self._rows.states.num_slots)
            began_s = perf_counter()
            drop_outdated(self._captured, version)
            captured = self._captured[key] = self._capture(step, size, context, adapted=slots is not None)
            torch.cuda.synchronize()
            self._capture_s += perf_counter() - began_s
        if self._state_slots is not None:
            self._fill_states(step, count, size)
        captured.graph.replay()
        self.hidden = captured.hidden[:count]
        return captured.logits[:count]

    def _fill(self, step: HostStep, count: int, size: int, context: int) -> None:
        width = self._table_width(context)
        inputs = np.zeros((NUM_COLUMNS + width) * size, dtype=np.int32)
        columns, tables = np.split(inputs, [NUM_COLUMNS * size])
        tokens, sources, positions, slots, context_lens, *neighbours = columns.reshape(NUM_COLUMNS, size)
        tokens[:count] = step.token_ids
        sources[:] = self._rows.num_device_tokens + np.arange(size)
        sources[step.in_flight_at] = step.in_flight_rows
        sources[step.drafts_at] = self._rows.max_rows + step.drafts_from
        positions[:count] = step.positions
        slots[:count], slots[count:] = step.slots, self._spare_slot
        context_lens[:count] = step.context_lens
        if step.neighbours is not None:
            for column, numbers in zip(neighbours, step.neighbours, strict=True):
                column[:count] = numbers
        tables.reshape(size, width)[:count] = self._rows.block_tables(step.rows, width)
        self._staging.copy_into(self._inputs, inputs)
        if step.has_trees:
            self._ancestors[:size] = -1
            self._rows.place_trees(step, self._batch(size, context).positions, self._ancestors)
        if step.late is not None:
            batch = self._batch(size, context)
            self._rows.start_late(
                step.late, batch.positions, batch.slots, batch.context_lens, batch.block_tables
            )
        if self._window_inputs is not None:
            self._fill_windows(step, count, size)

    def _fill_windows(self, step: HostStep, count: int, size: int) -> None:
        windows = self._rows.windows
        assert windows is not None
        assert step.windows is not None
        assert self._window_inputs is not None
        inputs = np.zeros(self._window_size(size), dtype=np.int32)
        num_parts = windows.layout.num_parts
        slots, at = inputs[: num_parts * size].reshape(num_parts, size), num_parts * size
        slots[:, :count], slots[:, count:] = step.windows.slots, self._spare_slot
        for group, each in enumerate(windows.layout.groups):
            made = windows.decode_contexts(group, step.rows, step.windows.positions)
            inputs[at : at + count] = made.context_lens
            at += size
            shape = each.num_parts, size, windows.decode_width(group)
            end = at + int(np.prod(shape))
            inputs[at:end].reshape(shape)[:, :count] = made.block_tables
            at = end
        self._staging.copy_into(self._window_inputs, inputs)

    def _with_windows(self, batch: AttentionBatch, size: int) -> AttentionBatch:
        windows, inputs = self._rows.windows, self._window_inputs
        if windows is None or inputs is None:
            return batch
        num_parts = windows.layout.num_parts
        at, contexts, bounds = num_parts * size, list[tuple[Tensor, Tensor]](), list[int]()
        for group, each in enumerate(windows.layout.groups):
            width = windows.decode_width(group)
            tables = inputs[at + size : at + size + each.num_parts * size * width]
            contexts.append((inputs[at : at + size], tables.view(each.num_parts, size, width)))
            bounds.append(width * windows.block_size)
            at += size + each.num_parts * size * width
        slots = inputs[: num_parts * size].view(num_parts, size)
        return with_parts(batch, windows.layout, slots, contexts, bounds)

    def _fill_states(self, step: HostStep, count: int, size: int) -> None:
        assert self._rows.states is not None
        assert self._state_slots is not None
        slots = np.full(size, self._rows.states.num_slots, dtype=np.int64)
        slots[:count] = self._rows.state_slots(step.rows)
        self._staging.copy_into(self._state_slots, slots)

    def _batch(self, size: int, context: int) -> AttentionBatch:
        """Return the batch of a step without drafts, in the inputs of the graphs."""
        columns = self._inputs[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        tables = self._inputs[NUM_COLUMNS * size : (NUM_COLUMNS + self._table_width(context)) * size]
        return AttentionBatch(
            positions=columns[2],
            slots=columns[3],
            query_starts=self._query_starts[: size + 1],
            context_lens=columns[4],
            block_tables=tables.view(size, -1),
            num_requests=size,
            max_query_len=1,
            max_context_len=context,
            num_decodes=size,
            states=self._state_batch(size),
        )

    def _capture(self, step: HostStep, size: int, context: int, *, adapted: bool) -> _Captured:
        columns = self._inputs[: NUM_COLUMNS * size].view(NUM_COLUMNS, size)
        sources, neighbours = columns[1], columns[5:]
        batch = self._batch(size, context)
        if step.neighbours is not None:
            batch = replace(batch, neighbours=neighbours)
        if step.has_trees:
            batch = replace(batch, ancestors=self._ancestors[:size])
        batch = self._with_windows(batch, size)
        known_tokens = self._buffer[: self._rows.num_device_tokens + size]
        model = self._lora.adapted if adapted and self._lora is not None else self._model

        def forward() -> tuple[Tensor, Tensor]:
            token_ids = known_tokens.index_select(0, sources)
            if self.taps and not adapted:
                assert isinstance(model, TappedModel), "the loader has checked this"
                hidden, tapped = model.forward_tapped(token_ids, batch, self._kv, self.taps)
                return self._model.logits(hidden), tapped
            hidden = model.forward(token_ids, batch, self._kv)
            return self._model.logits(hidden), hidden

        # The warm-up compiles kernels and writes the step's KV, which the replay then writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
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


def padded_rows(count: int, largest: int) -> int:
    """Return the number of rows of the graph for this many rows."""
    return next(size for size in _sizes(largest) if size >= count)


def use_adapters(lora: LoRAModel | None, slots: Slots | None, size: int) -> int | None:
    """Set the adapters of a step that is padded to `size` rows. Returns the version of the adapters that a graph of
    the step belongs to; None for a step without adapters, whose graph has none of their launches."""
    if slots is None or lora is None:
        return None
    padded = np.full(size, NO_ADAPTER, dtype=np.int32)
    padded[: len(slots)] = slots
    lora.use(padded)
    return lora.version


def drop_outdated(graphs: dict[Any, Any], version: int | None) -> None:
    """Drop the graphs of earlier versions of the adapters. The version is the last part of a key."""
    for key in [key for key in graphs if version is not None and key[-1] not in (None, version)]:
        del graphs[key]


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
        self,
        model: Model,
        ops: CutsAtAttention,
        kv: KVStore,
        rows: BatchRows,
        staging: Staging,
        lora: LoRAModel | None = None,
    ) -> None:
        self._model = model
        self._lora = lora
        self._ops = ops
        self._kv = kv
        self._rows = rows
        self._staging = staging
        self._sizes = padded_sizes(model.num_parameters)
        self._met: set[tuple[int, int | None]] = set()
        self._recorded: dict[tuple[int, int | None], _Recorded] = {}
        self._is_full = False  # there is no memory for more sizes
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._spare_slot = kv.num_blocks * kv.block_size
        device = rows.last_tokens.device
        largest = self._sizes[-1]
        num_parts = 0 if rows.windows is None else rows.windows.layout.num_parts
        self._num_inputs = 3 + num_parts  # tokens, positions, slots; then slots of each part with windows
        self._inputs = torch.zeros(self._num_inputs * largest, dtype=torch.int32, device=device)
        shape = (largest, model.config.num_heads, model.head_dim)
        self._queries = torch.zeros(shape, dtype=ops.dtype, device=device)
        self._attended = torch.zeros_like(self._queries)

    def hidden(self, step: HostStep, slots: Slots | None = None) -> Tensor | None:
        """Return [T, hidden], valid until the next call; None when the step must be launched piece by piece."""
        count = len(step.token_ids)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        version = use_adapters(self._lora, slots, size)
        recorded = self._recorded.get((size, version))
        if recorded is None:
            if self._is_full or (size, version) not in self._met:
                self._met.add((size, version))
                return None
            drop_outdated(self._recorded, version)
            try:
                recorded = self._recorded[size, version] = self._record(size, adapted=slots is not None)
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
        inputs = np.zeros((self._num_inputs, size), dtype=np.int32)
        inputs[:3, :count] = step.token_ids, step.positions, step.slots
        if step.windows is not None:
            inputs[3:, :count] = step.windows.slots
        inputs[2:, count:] = self._spare_slot
        self._staging.copy_into(self._inputs, inputs.reshape(-1))
        self._rows.fill_in(step, self._inputs)
        if step.has_trees:
            self._rows.place_trees(step, self._inputs[size:])

    def _record(self, size: int, *, adapted: bool) -> _Recorded:
        inputs = self._inputs[: self._num_inputs * size].view(self._num_inputs, size)
        token_ids, positions, slots = inputs[:3]
        nothing = self._inputs[:0]
        batch = AttentionBatch(positions, slots, nothing, nothing, nothing, 0, 0, 0)
        if self._rows.windows is not None:
            layout = self._rows.windows.layout
            contexts = [(nothing, [nothing] * each.num_parts) for each in layout.groups]
            batch = with_parts(batch, layout, inputs[3:], contexts, [0] * len(contexts))
        recording = _Recording(self._pool)
        ops = self._ops.cut_at_attention(recording.cut, self._queries, self._attended)
        model = self._lora.on(ops) if adapted and self._lora is not None else self._model.with_ops(ops)
        torch.cuda.synchronize()
        with no_garbage_collection(), torch.cuda.stream(self._stream), recording:
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
        # Other threads may continue: they copy blocks and compile grammars.
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")


def padded_sizes(num_parameters: int) -> list[int]:
    """Return the numbers of tokens to which steps are padded, by an eighth on average."""
    largest = min(MOST, max(FEWEST, HOST_BOUND_WORK // max(num_parameters, 1)))
    sizes = [16, 32, 48, 64, 96, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, MOST + 1, 256)]
    return [size for size in sizes if size <= largest]
