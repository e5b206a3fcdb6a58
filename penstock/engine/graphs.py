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

        def buffer(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        largest = self._sizes[-1]
        self._inputs = buffer(3 * largest).view(3, largest)  # positions, slots, context lengths
        self._token_ids = buffer(largest)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._tables = buffer(largest * self._table_width(max_model_len))
        self._host_inputs = np.zeros((3, largest), dtype=np.int32)

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
        host = self._host_inputs
        host[0, :count], host[1, :count], host[2, :count] = step.positions, step.slots, step.context_lens
        host[0, count:size], host[1, count:size], host[2, count:size] = 0, self._spare_slot, 0
        self._inputs.copy_(self._staging.to_device(host))
        self._token_ids[:count] = self._rows.token_ids(step)
        tables = self._staging.to_device(self._rows.block_tables(step.rows, self._table_width(context)))
        self._tables[: tables.numel()].view_as(tables).copy_(tables)

    def _capture(self, size: int, context: int) -> _Captured:
        width = self._table_width(context)
        batch = AttentionBatch(
            positions=self._inputs[0, :size],
            slots=self._inputs[1, :size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._inputs[2, :size],
            block_tables=self._tables[: size * width].view(size, width),
            num_requests=size,
            max_query_len=1,
            max_context_len=context,
            num_decodes=size,
        )
        token_ids = self._token_ids[:size]

        def forward() -> Tensor:
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
