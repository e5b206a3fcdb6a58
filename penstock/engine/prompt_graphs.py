"""Steps with a few tokens of prompts on a GPU: everything but attention is replayed from CUDA graphs.

Such a step takes the GPU less time than the host needs for its several hundred launches. What lies between two
attentions depends on nothing but the number of tokens: it is one graph, recorded for a padded number of them.
Attention, which contexts of any length and number go into, is launched as always.

A size is recorded when it is met for the second time; rows beyond the real tokens write their KV to a block that
nobody owns.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import BatchRows, HostStep
from penstock.engine.staging import Staging
from penstock.kernels.interface import Attend, AttentionBatch, CutsAtAttention, KVStore
from penstock.models.model import Model

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
        """[T, hidden], valid until the next call. None where the step is to be launched piece by piece."""
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
    """A forward pass, in this context, as graphs with attentions between them."""

    pool: Any  # as `torch.cuda.graph_pool_handle` gives it
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
    """Numbers of tokens that steps are padded to: by an eighth on average."""
    largest = min(MOST, max(FEWEST, HOST_BOUND_WORK // max(num_parameters, 1)))
    sizes = [16, 32, 48, 64, 96, *range(128, 512, 64), *range(512, 1024, 128), *range(1024, MOST + 1, 256)]
    return [size for size in sizes if size <= largest]
