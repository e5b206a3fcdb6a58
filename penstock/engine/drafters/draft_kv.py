"""The KV of a drafter: which blocks hold the KV of a request, and how much of that KV is valid.

The KV lies in a store of its own under the block ids of the served model, so that block tables, cached prefixes and
preemption are shared. Drafts, and tokens whose block is shared with another request, lie in scratch blocks: each row
has a few after the last block id. Missing or wrong KV only lowers the acceptance rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import BatchRows, Int32Array, Int64Array
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, HalvesBlocks, KVStore

SCRATCH_BLOCKS = 3  # of a row: a shared block, and the drafts after it


@dataclass(slots=True)
class FollowedRequest:
    """A request that the drafter follows. KV of the first `num_computed` positions lies in the blocks of `table`, the
    request's own, and in the scratch blocks of `row`. The first `num_noted` blocks can serve other requests."""

    table: Int32Array
    row: int
    num_computed: int = 0
    num_noted: int = 0
    num_known: int = 0  # tokens of the request when it was drafted for
    draft: tuple[int, ...] = ()  # may be ON_DEVICE, and is then among the drafts in use
    tree_depth: int | None = None  # of a draft that is a tree


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """Positions of a request whose KV one pass of the drafter computes."""

    request_id: str
    start: int
    count: int
    states: Tensor | None = None  # [count, hidden]


class DraftKV:
    def __init__(self, store: KVStore, rows: BatchRows, lag: int) -> None:
        """`store` has SCRATCH_BLOCKS blocks for each row after the blocks of the served model, and a spare block. The
        input at a position is the token `lag` places after that position."""
        self.store = store
        self._rows, self._lag = rows, lag
        self._first_scratch = store.num_blocks - 1 - rows.max_rows * SCRATCH_BLOCKS
        # For each block, a hash of the text up to its end; 0 if the block is not full.
        self._written = np.zeros(self._first_scratch, dtype=np.int64)
        self._followed: dict[str, FollowedRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._followed

    def __getitem__(self, request_id: str) -> FollowedRequest:
        return self._followed[request_id]

    def get(self, request_id: str) -> FollowedRequest | None:
        return self._followed.get(request_id)

    def forget(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def follow(self, request_id: str) -> FollowedRequest:
        """Find how much of a request's KV is valid: its blocks may have changed since the last call."""
        rows = self._rows
        row, table = rows.row(request_id), rows.own_blocks(request_id)
        followed = self._followed.get(request_id)
        if followed is None or followed.row != row:  # new, or preempted and resumed elsewhere
            followed = self._followed[request_id] = FollowedRequest(table, row)
            followed.num_noted = self._num_written(request_id, table)
            followed.num_computed = followed.num_noted * rows.block_size
        else:
            common = min(len(table), len(followed.table))
            same = int((table[:common] != followed.table[:common]).argmax()) if common else 0
            if common and table[same] == followed.table[same]:
                same = common
            longest = max(len(table), len(followed.table))
            if same < longest:
                kept = same * rows.block_size
                if same == longest - 1 and isinstance(self.store, HalvesBlocks):
                    # The last block has changed between a shared and a whole one; the first scratch block stands for
                    # the second half of a shared block.
                    scratch = self._first_scratch + row * SCRATCH_BLOCKS
                    before, after = (
                        int(each[same]) if len(each) > same else scratch for each in (followed.table, table)
                    )
                    self.store.copy_half(before, 0, after)
                    kept += rows.block_size // 2
                followed.num_computed = min(followed.num_computed, kept)
                followed.num_noted = min(followed.num_noted, same)
            followed.table = table
        return followed

    def _num_written(self, request_id: str, table: Int32Array) -> int:
        """Return how many blocks have KV from earlier requests with the same beginning."""
        digest, tokens = 0, self._rows.tokens(request_id)
        for index, block in enumerate(table.tolist()):
            digest = self._digest(digest, tokens, index)
            if not digest or self._written[block] != digest:
                return index
        return len(table)

    def _digest(self, before: int, tokens: Int32Array, index: int) -> int:
        """Return the hash of a text up to the end of a block; 0 for a block that is not full."""
        size, lag = self._rows.block_size, self._lag
        part = tokens[index * size : (index + 1) * size + lag]
        return hash((before, part.tobytes())) if len(part) == size + lag else 0

    def note(self, chunk: DraftChunk) -> None:
        """Note the blocks that are full after a pass."""
        followed = self._followed[chunk.request_id]
        followed.num_computed = chunk.start + chunk.count
        num_full = min(followed.num_computed // self._rows.block_size, len(followed.table))
        tokens, noted = self._rows.tokens(chunk.request_id), followed.num_noted
        digest = int(self._written[followed.table[noted - 1]]) if noted else 0
        for index in range(noted, num_full):
            digest = self._written[followed.table[index]] = self._digest(digest, tokens, index)
        self._written[followed.table[num_full:]] = 0
        followed.num_noted = max(noted, num_full)

    def forget_after_noted(self, followed: FollowedRequest) -> None:
        """Let no other request find the blocks of a request after its noted ones."""
        self._written[followed.table[followed.num_noted :]] = 0

    def batch(self, chunks: Sequence[DraftChunk], staging: Staging) -> AttentionBatch:
        """Return the inputs of attention for one pass over all `chunks`."""
        size = self._rows.block_size
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = starts + lengths
        tables = self.tables([chunk.request_id for chunk in chunks], -(-int(context_lens.max()) // size))
        owners = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(int(query_starts[-1])) + np.repeat(starts - query_starts[:-1], lengths)
        slots = tables[owners, positions // size] * size + positions % size
        arrays = (positions, slots, query_starts, context_lens, tables)
        placed, places, firsts, lens, blocks = staging.all_to_device(
            *(each.astype(np.int32) for each in arrays)
        )
        return AttentionBatch(
            placed,
            places,
            firsts,
            lens,
            blocks,
            num_requests=len(chunks),
            max_query_len=int(lengths.max()),
            max_context_len=int(context_lens.max()),
            num_decodes=int((lengths == 1).sum()),
            lengths=(torch.from_numpy(query_starts), torch.from_numpy(context_lens.astype(np.int32))),
        )

    def tables(self, request_ids: Sequence[str], width: int) -> Int64Array:
        """Return block tables: a request's own blocks, then scratch blocks."""
        tables = np.zeros((len(request_ids), width), dtype=np.int64)
        for index, request_id in enumerate(request_ids):
            followed = self._followed[request_id]
            own = min(len(followed.table), width)
            scratch = self._first_scratch + followed.row * SCRATCH_BLOCKS
            tables[index, :own] = followed.table[:own]
            tables[index, own:] = scratch + np.arange(width - own) % SCRATCH_BLOCKS
        return tables
