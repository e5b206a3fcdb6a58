"""The rows of running requests, kept from step to step and changed only where a plan changes them.

Host side: numpy arrays, one row per running request, grown in place as tokens and blocks arrive. Each step reads
from them with a handful of vector operations, whatever the number of tokens. Knows no model and no sampler.

Ownership: a row belongs to one request from the plan in which it `begins` to the plan that names it `released`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import Chunk
from penstock.kernels.interface import AttentionBatch

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, ready for the model. `sampled_rows[i]` is the row whose token comes from `sample_indices[i]`."""

    token_ids: Tensor  # int32 [T]
    attention: AttentionBatch
    sample_indices: Tensor  # int64 [S], positions in T
    sampled_rows: NDArray[np.int64]
    sampled_ids: list[str]


class BatchRows:
    def __init__(self, max_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tokens: IntArray = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        self._blocks: IntArray = np.zeros((max_rows, -(-(max_model_len + 1) // block_size)), dtype=np.int32)
        self._num_tokens = np.zeros(max_rows, dtype=np.int64)
        self._num_blocks = np.zeros(max_rows, dtype=np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        self._row_of: dict[str, int] = {}
        # The newest sampled token of each row, on the device: what a step reads whose input is still in flight.
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def release(self, request_id: str) -> int:
        row = self._row_of.pop(request_id)
        self._free.append(row)
        return row

    def begin(self, request_id: str, tokens: Sequence[int]) -> int:
        row = self._free.pop()
        self._row_of[request_id] = row
        self._tokens[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)
        self._num_blocks[row] = 0
        return row

    def append_token(self, request_id: str, token_ids: Sequence[int]) -> None:
        row = self._row_of[request_id]
        have = int(self._num_tokens[row])
        self._tokens[row, have : have + len(token_ids)] = token_ids
        self._num_tokens[row] = have + len(token_ids)

    def append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        have = int(self._num_blocks[row])
        self._blocks[row, have : have + len(block_ids)] = block_ids
        self._num_blocks[row] = have + len(block_ids)

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """Turn chunks (whose rows and blocks are up to date) into one flat step."""
        count = len(chunks)
        rows = np.fromiter((self._row_of[c.request_id] for c in chunks), dtype=np.int64, count=count)
        starts = np.fromiter((c.start for c in chunks), dtype=np.int64, count=count)
        lengths = np.fromiter((c.num_tokens for c in chunks), dtype=np.int64, count=count)
        query_starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_starts[1:])
        total = int(query_starts[-1])
        if total == count:  # decode only: one token each
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(total) + np.repeat(starts - query_starts[:-1], lengths)
        block_ids = self._blocks[token_rows, positions // self._block_size]
        slots = block_ids * self._block_size + positions % self._block_size
        context_lens = starts + lengths
        max_context = int(context_lens.max())
        table_width = -(-max_context // self._block_size)

        token_ids = self._to_device(self._tokens[token_rows, positions])
        in_flight = [(int(query_starts[i + 1]) - 1, rows[i]) for i, c in enumerate(chunks) if c.in_flight]
        if in_flight:
            where, from_rows = (self._to_device(np.array(column)) for column in zip(*in_flight, strict=True))
            token_ids[where] = self.last_tokens[from_rows]

        sampled = [i for i, c in enumerate(chunks) if c.samples]
        return StepInput(
            token_ids=token_ids,
            attention=AttentionBatch(
                positions=self._to_device(positions.astype(np.int32)),
                slots=self._to_device(slots.astype(np.int32)),
                query_starts=self._to_device(query_starts.astype(np.int32)),
                context_lens=self._to_device(context_lens.astype(np.int32)),
                block_tables=self._to_device(self._blocks[rows, :table_width]),
                num_requests=count,
                max_query_len=int(lengths.max()),
                max_context_len=max_context,
            ),
            sample_indices=self._to_device(query_starts[1:][sampled] - 1),
            sampled_rows=rows[sampled],
            sampled_ids=[chunks[i].request_id for i in sampled],
        )

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
