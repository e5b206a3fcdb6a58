"""Decode steps on a GPU, replayed from CUDA graphs: one launch instead of several hundred.

A graph is captured the first time its size is needed and belongs to a padded number of requests and a bound on the
context. Its inputs live in buffers that never move; rows beyond the real requests read nothing and write their KV
to a block that no request owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.model import Model

MIN_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


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
        rows.keep_last_tokens_in(self._buffer[: rows.max_rows])

    def fits(self, step: HostStep) -> bool:
        count = len(step.rows)
        return step.num_decodes == count == len(step.sampled) and count <= self._sizes[-1]

    def logits(self, step: HostStep) -> Tensor:
        """float32 [R, V], valid until the next call."""
        count = len(step.rows)
        size = next(size for size in self._sizes if size >= count)
        context = self._context_bound(step.max_context_len)
        self._fill(step, count, size, context)
        captured = self._captured.get((size, context))
        if captured is None:
            captured = self._captured[size, context] = self._capture(size, context)
        captured.graph.replay()
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
        )
        known_tokens = self._buffer[: self._rows.max_rows + size]

        def forward() -> Tensor:
            token_ids = known_tokens.index_select(0, sources)
            return self._model.logits(self._model.forward(token_ids, batch, self._kv))

        # The warm-up compiles kernels and writes the step's KV, which the replay then writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        return _Captured(graph, logits)

    def _context_bound(self, context: int) -> int:
        bound = MIN_CONTEXT
        while bound < context:
            bound *= 2
        return min(bound, self._max_model_len)

    def _table_width(self, context: int) -> int:
        return -(-context // self._rows.block_size)


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, then every multiple of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 64, 64)]
    return [size for size in sizes if size < largest] + [largest]
