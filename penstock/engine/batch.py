"""Keeps the rows of running requests from step to step. Knows no model and no sampler.

Rows on the host are numpy arrays, one row per running request, grown in place as tokens and blocks arrive. Each step
reads from them with a handful of vector operations, whatever the number of tokens.

Ownership: a row belongs to one request from the plan in which it `begins` to the plan that names it `released`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import ON_DEVICE, Chunk
from penstock.engine.staging import Staging
from penstock.engine.windows import WindowContexts, WindowRows, WindowTokens, with_parts
from penstock.kernels.interface import AttentionBatch
from penstock.kernels.states import StateBatch, StateStore

DEVICE_DRAFTS = 16  # most drafted tokens of a row that stay on the device


Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one step, S of them, of N requests. A request with k drafts has k + 1 samples, one after the
    other; any other request has one."""

    request_ids: list[str]  # [N]
    request_rows: Int64Array  # [N]
    at: Int64Array  # [S], positions in T
    rows: Int64Array  # [S]
    offsets: Int64Array | None = None  # [S], how many drafts are before the sample; None without drafts
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by index in N
    late: frozenset[int] = frozenset()  # indices in N of requests that start late (`LateTokens`)
    in_flight: frozenset[int] = frozenset()  # indices in N of requests whose newest token is not committed
    # [S], the index in `BatchRows.draft_lags` of the node of a tree that is sampled at; -1 for other samples
    nodes: Int64Array | None = None

    def firsts(self) -> Sequence[int]:
        """Return the index of each request's first sample."""
        if self.offsets is None:
            return range(len(self.request_ids))
        return np.flatnonzero(self.offsets == 0).tolist()

    def plain(self) -> Int64Array | None:
        """Return the indices of the samples of requests without drafts; None when there are no drafts at all."""
        if self.offsets is None:
            return None
        kept = [first for index, first in enumerate(self.firsts()) if index not in self.drafts]
        return np.array(kept, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of chunks with `unsettled` drafts, L of them, of Q sequences. Their positions, slots and contexts are
    laid out as if all of those drafts were accepted. The device moves them back before the step runs."""

    at: Int64Array  # [L], positions in T
    rows: Int64Array  # [L]
    sequences: Int64Array  # [L], indices in the step's block tables
    last_blocks: Int64Array  # [L], of the row: the index of its last block ...
    tail_offsets: Int64Array  # [L], ... and the slot of that block where its tokens begin
    contexts: Int64Array  # [Q], sequences whose contexts are shorter ...
    context_rows: Int64Array  # [Q], ... of these rows


NO_SAMPLES = Samples([], np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step in host memory, of C chunks. Chunks with a single token come first, as in the plan.

    For attention a step has R sequences of queries: one for each chunk. On a GPU, each token of a chunk with drafts
    is a separate sequence: a decode whose context includes the tokens before it. So the code for decodes,
    including CUDA graphs, also verifies drafts."""

    chunk_starts: Int32Array  # [C + 1], positions in T
    rows: Int64Array  # [R], the row of each sequence's request
    token_ids: Int32Array  # [T]; tokens in flight have any value
    positions: Int32Array  # [T]
    slots: Int32Array  # [T]
    query_starts: Int32Array  # [R + 1]
    context_lens: Int32Array  # [R]
    in_flight_at: Int64Array  # positions in T whose token an earlier step is still sampling ...
    in_flight_rows: Int64Array  # ... for these rows
    drafts_at: Int64Array  # positions in T of drafts that only the device knows ...
    drafts_from: Int64Array  # ... and their indices in `BatchRows.draft_tokens`
    samples: Samples
    max_query_len: int
    max_context_len: int
    num_decodes: int
    looks_ahead: bool = False  # some contexts end after their last query
    spare_places: Int64Array | None = None  # [N, 3], what spare rows of the rope table mix, for image tokens
    windows: WindowTokens | None = None  # of models whose layers have windows
    late: LateTokens | None = None
    neighbours: Int32Array | None = None  # of `AttentionBatch`, where tokens of chunks are separate sequences
    # The drafts that only the device knows are nodes of trees. Their positions are laid out as if they were a chain,
    # and the device moves them back (`place_trees`).
    has_trees: bool = False
    ahead: StepAhead | None = None


@dataclass(frozen=True, slots=True)
class StepAhead:
    """A step as some of the layers see it: those in which the tokens of an image attend to each other. To the other
    layers, the tokens of an image are as those of text."""

    step: HostStep
    part_of_layer: tuple[int | None, ...]  # 0 for these layers, None for the others


class BatchRows:
    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        staging: Staging,
        states: StateStore | None = None,
        windows: WindowRows | None = None,
    ) -> None:
        """`states` is the memory of layers with a fixed state, `windows` has the blocks of layers with windows, for
        models that have such layers."""
        self.states = states
        self.windows = windows
        self._state_slots = np.zeros(max_rows if states is not None else 0, dtype=np.int64)
        self.max_rows = max_rows
        self.block_size = block_size
        self._staging = staging
        self._splits_drafts = device.type == "cuda"
        self._tokens: Int32Array = np.zeros((max_rows, max_model_len + 1), dtype=np.int32)
        self._blocks: Int32Array = np.zeros((max_rows, -(-(max_model_len + 1) // block_size)), dtype=np.int32)
        self._num_tokens = np.zeros(max_rows, dtype=np.int64)
        # The index of a row's last block in `_blocks`, and the slot of that block where its tokens begin.
        self._last_block = np.zeros(max_rows, dtype=np.int64)
        self._tail_offset = np.zeros(max_rows, dtype=np.int32)
        self._free = list(range(max_rows - 1, -1, -1))
        self._row_of: dict[str, int] = {}
        # The newest sampled token of each row, on the device, for steps whose input is still in flight.
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # Drafts of each row that were made on the device.
        self.draft_tokens = torch.zeros(max_rows * DEVICE_DRAFTS, dtype=torch.int32, device=device)
        # For drafts that are trees: how many places a node lies behind its position, and `AttentionBatch.ancestors`.
        self.draft_lags = torch.zeros_like(self.draft_tokens)
        self.draft_ancestors = torch.zeros_like(self.draft_tokens)
        # Number of rejected drafts in the latest step that verified drafts; read by steps that start late.
        self.num_rejected = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @property
    def num_device_tokens(self) -> int:
        return len(self.last_tokens) + len(self.draft_tokens)

    def keep_tokens_in(self, place: Tensor) -> None:
        """Store the newest tokens, and after them the drafts, in this tensor from now on: int32 [num_device_tokens]
        on the device."""
        self.last_tokens, self.draft_tokens = place[: self.max_rows], place[self.max_rows :]

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
        return row

    def append_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        row = self._row_of[request_id]
        have = int(self._num_tokens[row])
        self._tokens[row, have : have + len(token_ids)] = token_ids
        self._num_tokens[row] = have + len(token_ids)

    def place_drafts(self, chunk: Chunk) -> None:
        """Write a chunk's drafts after the tokens of its request, where the next tokens overwrite them."""
        end = chunk.start + chunk.num_tokens
        self._tokens[self._row_of[chunk.request_id], end - len(chunk.drafts) : end] = chunk.drafts

    def num_tokens(self, request_id: str) -> int:
        """Return how many tokens of a request are known. Drafts do not count."""
        return int(self._num_tokens[self._row_of[request_id]])

    def tokens(self, request_id: str) -> Int32Array:
        """Return the known tokens of a request: a view, to be read at once."""
        row = self._row_of[request_id]
        return self._tokens[row, : self._num_tokens[row]]

    def own_blocks(self, request_id: str) -> Int32Array:
        """Return the blocks of a request, without a last one that is shared with another request."""
        row = self._row_of[request_id]
        count = self._last_block[row] + (not self._tail_offset[row])
        return self._blocks[row, :count].copy()

    def place_blocks(self, row: int, chunk: Chunk) -> None:
        first = 0 if chunk.begins else chunk.start // self.block_size
        end = first + len(chunk.new_block_ids)
        self._blocks[row, first:end] = chunk.new_block_ids
        self._last_block[row] = end - 1
        self._tail_offset[row] = chunk.tail_offset
        if chunk.state_slot is not None:
            self._state_slots[row] = chunk.state_slot

    def place_windows(self, chunk: Chunk) -> None:
        assert self.windows is not None, "a plan of a model without windows has no blocks of them"
        self.windows.place(self._row_of[chunk.request_id], chunk)

    def block_tables(self, rows: Int64Array, width: int) -> Int32Array:
        return self._blocks[rows, :width]

    def state_slots(self, rows: Int64Array) -> Int64Array:
        return self._state_slots[rows]

    def build(self, chunks: Sequence[Chunk], pooled: Collection[str] = ()) -> HostStep:
        """Concatenate chunks, whose rows and blocks must be up to date. `pooled` are requests that never sample."""
        count = len(chunks)
        rows = np.fromiter((self._row_of[c.request_id] for c in chunks), dtype=np.int64, count=count)
        starts = np.fromiter((c.start for c in chunks), dtype=np.int64, count=count)
        lengths = np.fromiter((c.num_tokens for c in chunks), dtype=np.int64, count=count)
        chunk_starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lengths, out=chunk_starts[1:])
        total = int(chunk_starts[-1])
        if total == count:  # one token each
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(total) + np.repeat(starts - chunk_starts[:-1], lengths)
        block_at, offsets = positions // self.block_size, positions % self.block_size
        if self._tail_offset.any():
            offsets += np.where(block_at == self._last_block[token_rows], self._tail_offset[token_rows], 0)
        samples = _samples(chunks, rows, chunk_starts, pooled)
        query_starts, context_lens, sequence_rows = chunk_starts, starts + lengths, rows
        neighbours = None
        if self._splits_drafts and samples.drafts:
            has_drafts = np.fromiter((bool(c.drafts) for c in chunks), dtype=np.bool_, count=count)
            ends = np.zeros(total, dtype=np.bool_)  # of sequences
            ends[chunk_starts[1:] - 1] = True
            ends |= np.repeat(has_drafts, lengths)
            (last,) = np.nonzero(ends)
            query_starts = np.concatenate(([0], last + 1)).astype(np.int32)
            context_lens, sequence_rows = positions[last] + 1, token_rows[last]
            num_before = (np.arange(total) - np.repeat(chunk_starts[:-1], lengths))[last]
            num_from = np.repeat(lengths, lengths)[last] - num_before
            lengths = np.diff(query_starts)
            neighbours = np.stack((num_before, num_from)).astype(np.int32)
        in_flight = np.fromiter((c.in_flight for c in chunks), dtype=np.bool_, count=count)
        in_flight_at = chunk_starts[1:][in_flight].astype(np.int64) - 1
        late = None
        if samples.late:
            in_flight_at -= np.array([len(c.drafts) for c in chunks if c.in_flight], dtype=np.int64)
            late = self._late_tokens(chunks, chunk_starts, query_starts, token_rows)
        num_decodes = len(lengths) if total == len(lengths) else int(np.argmax(lengths > 1))
        token_ids = self._tokens[token_rows, positions]
        # A token in flight may have the place of a draft of an earlier step.
        drafts_at = np.flatnonzero(token_ids == ON_DEVICE)
        if drafts_at.size:
            drafts_at = np.setdiff1d(drafts_at, in_flight_at, assume_unique=True)
        places = positions[drafts_at] - self._num_tokens[token_rows[drafts_at]]
        drafts_from = token_rows[drafts_at] * DEVICE_DRAFTS + np.minimum(places, DEVICE_DRAFTS - 1)
        has_trees = drafts_at.size > 0 and any(c.tree_depth is not None for c in chunks)
        if has_trees:
            nodes = np.full(total, -1, dtype=np.int64)
            nodes[drafts_at] = drafts_from
            samples = replace(samples, nodes=nodes[samples.at])
        return HostStep(
            chunk_starts=chunk_starts,
            rows=sequence_rows,
            token_ids=token_ids,
            positions=positions.astype(np.int32),
            slots=(self._blocks[token_rows, block_at] * self.block_size + offsets).astype(np.int32),
            query_starts=query_starts,
            context_lens=context_lens.astype(np.int32),
            in_flight_at=in_flight_at,
            in_flight_rows=rows[in_flight],
            drafts_at=drafts_at,
            drafts_from=drafts_from,
            samples=samples,
            max_query_len=int(lengths.max()),
            max_context_len=int(context_lens.max()),
            num_decodes=num_decodes,
            windows=None if self.windows is None else self.windows.tokens(token_rows, positions),
            late=late,
            neighbours=None if neighbours is None else neighbours[:, :num_decodes],
            has_trees=has_trees,
        )

    def _late_tokens(
        self,
        chunks: Sequence[Chunk],
        chunk_starts: Int32Array,
        query_starts: Int32Array,
        token_rows: Int64Array,
    ) -> LateTokens:
        is_late = np.fromiter((bool(c.unsettled) for c in chunks), dtype=np.bool_, count=len(chunks))
        (at,) = np.nonzero(np.repeat(is_late, np.diff(chunk_starts)))
        rows = token_rows[at]
        sequences = np.searchsorted(query_starts, at, side="right") - 1
        contexts, first = np.unique(sequences, return_index=True)
        return LateTokens(
            at,
            rows,
            sequences,
            self._last_block[rows],
            self._tail_offset[rows].astype(np.int64),
            contexts,
            rows[first],
        )

    def start_late(
        self, late: LateTokens, positions: Tensor, slots: Tensor, context_lens: Tensor, tables: Tensor
    ) -> None:
        """Move the tokens of chunks that start late back by the rejected drafts: int32 on the device, in place."""
        size = self.block_size
        tokens = np.stack((late.at, late.rows, late.sequences, late.last_blocks, late.tail_offsets))
        of_tokens, of_contexts = self._staging.all_to_device(
            tokens, np.stack((late.contexts, late.context_rows))
        )
        at, rows, sequences, last_blocks, tails = of_tokens
        contexts, context_rows = of_contexts
        moved = positions[at] - self.num_rejected[rows]
        block_at = moved // size
        offsets = moved % size + torch.where(block_at == last_blocks, tails, 0)
        positions[at] = moved
        slots[at] = tables[sequences, block_at.to(torch.int64)] * size + offsets.to(torch.int32)
        context_lens[contexts] -= self.num_rejected[context_rows]

    def settle(self, rows: Int64Array, num_rejected: Tensor, newest: Tensor) -> None:
        """Keep the outcome of a step's drafts for steps that start late: int64 [N] on the device."""
        places = self._staging.to_device(rows)
        self.num_rejected[places] = num_rejected.to(torch.int32)
        self.last_tokens[places] = newest.to(torch.int32)

    def num_taken_back(self, samples: Samples) -> Tensor | None:
        """Return by how many positions each sample lies before the position that the host expects: int64 [S] on the
        device; None if all lie where the host expects."""
        if samples.nodes is not None:
            places = self._staging.to_device(samples.nodes)
            lags = self.draft_lags[places.clamp(min=0)].to(torch.int64)
            return torch.where(places >= 0, lags, 0)
        if not samples.late:
            return None
        is_late = np.zeros(len(samples.request_ids), dtype=np.bool_)
        is_late[list(samples.late)] = True
        counts = np.ones(len(is_late), dtype=np.int64)
        for index, drafts in samples.drafts.items():
            counts[index] += len(drafts)
        rows, counted = self._staging.all_to_device(samples.rows, np.repeat(is_late, counts))
        return torch.where(counted, self.num_rejected[rows].to(torch.int64), 0)

    def place_trees(self, step: HostStep, positions: Tensor, ancestors: Tensor | None = None) -> None:
        """Move the nodes of a step's trees to their positions, and write what they see: int32 [T] and
        [num_decodes] on the device, in place."""
        at, places = self._staging.all_to_device(step.drafts_at, step.drafts_from)
        positions[at] -= self.draft_lags[places]
        if ancestors is not None:
            ancestors[at] = self.draft_ancestors[places]

    def token_ids(self, step: HostStep) -> Tensor:
        """Return int32 [T] on the device, with tokens in flight and drafts on the device filled in."""
        token_ids = self._staging.to_device(step.token_ids)
        self.fill_in(step, token_ids)
        return token_ids

    def fill_in(self, step: HostStep, token_ids: Tensor) -> None:
        """Write the tokens that only the device knows into int32 [T] on the device."""
        for at, places, known in (
            (step.in_flight_at, step.in_flight_rows, self.last_tokens),
            (step.drafts_at, step.drafts_from, self.draft_tokens),
        ):
            if at.size:
                targets, sources = self._staging.all_to_device(at, places)
                token_ids[targets] = known[sources]

    def attention_batch(self, step: HostStep) -> AttentionBatch:
        batch = self._attention_batch(step)
        if step.ahead is None:
            return batch
        ahead = self._attention_batch(step.ahead.step)
        if ahead.parts:  # of all layers with windows, which are those that look ahead
            return replace(batch, parts=ahead.parts, part_of_layer=ahead.part_of_layer)
        return replace(batch, parts=(replace(ahead, part=0),), part_of_layer=step.ahead.part_of_layer)

    def _attention_batch(self, step: HostStep) -> AttentionBatch:
        width = -(-step.max_context_len // self.block_size)
        contexts = self.window_contexts(step)
        more = [array for each in contexts for array in (each.context_lens, each.block_tables)]
        if step.windows is not None:
            more.append(step.windows.slots)
        if step.neighbours is not None:
            more.append(step.neighbours)
        positions, slots, query_starts, context_lens, block_tables, *others = self._staging.all_to_device(
            step.positions,
            step.slots,
            step.query_starts,
            step.context_lens,
            self.block_tables(step.rows, width),
            *more,
        )
        if step.late is not None:
            self.start_late(step.late, positions, slots, context_lens, block_tables)
        ancestors = None
        if step.has_trees:
            ancestors = torch.full((step.num_decodes,), -1, dtype=torch.int32, device=positions.device)
            positions = positions.clone()  # on a CPU the array of the step
            self.place_trees(step, positions, ancestors)
        batch = AttentionBatch(
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            num_requests=len(step.rows),
            halves_blocks=not step.looks_ahead,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            num_decodes=step.num_decodes,
            neighbours=others.pop() if step.neighbours is not None else None,
            ancestors=ancestors,
            lengths=(torch.from_numpy(step.query_starts), torch.from_numpy(step.context_lens)),
            states=self._state_batch(step),
        )
        if self.windows is None:
            return batch
        *pairs, window_slots = others
        return with_parts(
            batch,
            self.windows.layout,
            window_slots,
            list(zip(pairs[::2], pairs[1::2], strict=True)),
            [each.context_lens for each in contexts],
        )

    def window_contexts(self, step: HostStep) -> list[WindowContexts]:
        """Return the contexts of a step's sequences in each group of layers with windows."""
        if self.windows is None or step.windows is None:
            return []
        first_positions = step.windows.positions[step.query_starts[:-1]]
        return [
            self.windows.contexts(group, step.rows, first_positions, step.context_lens)
            for group in range(len(self.windows.layout.groups))
        ]

    def _state_batch(self, step: HostStep) -> StateBatch | None:
        if self.states is None:
            return None
        return StateBatch(self.states, self._staging.to_device(self.state_slots(step.rows)))


def _samples(
    chunks: Sequence[Chunk], rows: Int64Array, query_starts: Int32Array, pooled: Collection[str]
) -> Samples:
    sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
    if pooled:
        sampling = [index for index in sampling if chunks[index].request_id not in pooled]
    request_ids = [chunks[index].request_id for index in sampling]
    request_rows = rows[sampling]
    last = query_starts[1:][sampling].astype(np.int64) - 1
    late = frozenset(n for n, index in enumerate(sampling) if chunks[index].unsettled)
    in_flight = frozenset(n for n, index in enumerate(sampling) if chunks[index].in_flight)
    drafts: dict[int, tuple[int, ...]] = {}
    if query_starts[-1] > len(chunks):  # else each request has one token
        drafts = {n: chunks[index].drafts for n, index in enumerate(sampling) if chunks[index].drafts}
    if not drafts:
        return Samples(request_ids, request_rows, last, request_rows, late=late, in_flight=in_flight)
    num_drafts = np.zeros(len(sampling), dtype=np.int64)
    for n, token_ids in drafts.items():
        num_drafts[n] = len(token_ids)
    counts = num_drafts + 1
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
    at = np.repeat(last - num_drafts, counts) + offsets
    sample_rows = np.repeat(request_rows, counts)
    return Samples(request_ids, request_rows, at, sample_rows, offsets, drafts, late, in_flight)
