"""Drafts with a smaller model, or with heads on the served model's hidden states.

The drafter's KV lies in a store of its own under the block ids of the served model, so that block tables, cached
prefixes and preemption need no second bookkeeping. Drafts, and tokens whose block is shared with another request, lie
in scratch blocks: each row has a few behind the last block id. KV that is missing or wrong lowers acceptance and
nothing else.

Work is done when drafts are asked for: first the tokens that are new since the last time, for all requests in one
pass, then one pass for each further drafted token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.clock import Clock
from penstock.core.plan import Draft
from penstock.core.request import Request
from penstock.engine.batch import BatchRows, HostStep, Int32Array, Int64Array, Staging
from penstock.engine.drafters.length import DraftLength
from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.drafters.heads import EagleHead
from penstock.models.model import Model

MAX_TOKENS = 8  # of a draft
SCRATCH_BLOCKS = 3  # of a row: a shared block, and the drafts behind it
CATCH_UP_TOKENS = 1024  # most known tokens in one call; requests with more wait for the next call
KEPT_STATES = 8192  # most hidden states that wait for a call


class Guesser(Protocol):
    """The model or head that a drafter runs. `lag` is 1 for a head, whose input at a position is the token of the
    next position, and the served model's hidden state."""

    lag: int

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Compute int32 [T] (and hidden states [T, ...]) → [T, hidden]."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor:
        """Guess the next tokens: [S, hidden] → int64 [S]."""
        ...


class ModelGuesser:
    lag = 0

    def __init__(self, model: Model) -> None:
        self._model = model

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        return self._model.forward(token_ids, batch, kv)

    def argmax(self, hidden: Tensor) -> Tensor:
        chosen = self._model.argmax(hidden)
        return chosen if chosen is not None else self._model.logits(hidden).argmax(dim=1)


class EagleGuesser:
    lag = 1

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self.argmax = head.argmax

    def forward(self, token_ids: Tensor, states: Tensor | None, batch: AttentionBatch, kv: KVStore) -> Tensor:
        assert states is not None, "a head reads hidden states"
        return self._head.forward(token_ids, states, batch, kv)


@dataclass(slots=True)
class _Followed:
    """A request that the drafter follows. KV of the first `num_computed` positions lies where `table`, the request's
    own blocks, and the scratch blocks behind them say. The first `num_noted` blocks can serve other requests."""

    table: Int32Array
    row: int
    num_computed: int = 0
    num_noted: int = 0
    num_known: int = 0  # tokens of the request when it was drafted for
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chunk:
    request_id: str
    start: int
    count: int
    states: Tensor | None = None  # [count, hidden]


class HiddenStates:
    """Keeps hidden states of the served model's latest steps, by request, until a head reads them."""

    def __init__(
        self,
        width: int,
        features: Callable[[Tensor], Tensor] | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`features` turns hidden states, each of `width` numbers, into a head's input. `taps` are the layers whose
        inputs the states are; without any, the states are the model's final ones."""
        self.width, self.taps = width, taps
        self._features = features
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._num_kept = 0

    def take_step(self, request_ids: Sequence[str], step: HostStep, hidden: Tensor) -> None:
        """Keep the hidden states of a step: [T, ...]. With too many, those of requests that came first go."""
        hidden = hidden.clone()  # a graph writes the next step to the same place
        for index, request_id in enumerate(request_ids):
            begin, end = int(step.chunk_starts[index]), int(step.chunk_starts[index + 1])
            parts = self._parts.setdefault(request_id, [])
            parts.append((int(step.positions[begin]), hidden[begin:end]))
            self._num_kept += end - begin
        while self._num_kept > KEPT_STATES and len(self._parts) > 1:
            self.forget(next(iter(self._parts)))

    def take(self, request_id: str, start: int, end: int) -> tuple[int, Tensor | None]:
        """Take the head's input for positions up to `end`, from `start` on or from the first position behind which
        none is missing. Returns that position too. A later step replaces an earlier one."""
        found: list[Tensor] = []
        last = end
        for first, rows in reversed(self._parts.get(request_id, ())):
            if first < end <= first + len(rows) and start < end:
                begin = max(first, start)
                found.insert(0, rows[begin - first : end - first])
                end = begin
        self.forget(request_id)
        if end == last:
            return end, None
        states = torch.cat(found)
        return end, states if self._features is None else self._features(states)

    def forget(self, request_id: str) -> None:
        self._num_kept -= sum(len(rows) for _, rows in self._parts.pop(request_id, ()))


class ModelDrafter:
    def __init__(
        self,
        name: str,
        guesser: Guesser,
        kv: KVStore,
        rows: BatchRows,
        clock: Clock,
        *,
        device: torch.device,
        vocab_size: int,
        max_positions: int,
        states: HiddenStates | None = None,
    ) -> None:
        """`kv` has SCRATCH_BLOCKS blocks for each row behind the blocks of the served model."""
        self._name, self._guesser, self._kv, self._rows = name, guesser, kv, rows
        self._staging = Staging(device, 1 << 20)
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self.states = states
        self._first_scratch = kv.num_blocks - rows.max_rows * SCRATCH_BLOCKS
        self._written = np.zeros(
            self._first_scratch, dtype=np.int64
        )  # a hash of the text up to the end of a block
        self._followed: dict[str, _Followed] = {}
        self._length = DraftLength(clock, MAX_TOKENS)

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        followed = self._followed.get(request_id)
        if followed is None or not followed.draft:
            return
        draft, followed.draft = followed.draft, ()
        agreed = 0
        while agreed < min(len(draft), len(token_ids)) and draft[agreed] == token_ids[agreed]:
            agreed += 1
        # The last draft was never an input, so its KV is not there.
        kept = followed.num_known - self._guesser.lag + min(agreed, len(draft) - 1)
        followed.num_computed = min(followed.num_computed, kept)
        self._length.observe(len(draft), min(agreed, len(token_ids) - 1))

    def remove(self, request_id: str) -> None:
        self._followed.pop(request_id, None)
        if self.states is not None:
            self.states.forget(request_id)

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        most = min(self._length.begin(), max(wanted.values()))
        if most <= 0:
            return {}
        self._staging.next_step()
        with torch.inference_mode():
            request_ids, drafted, num_tokens = self._draft(
                [each for each in wanted if each in self._rows], most
            )
        self._length.end(most, num_tokens, len(request_ids))
        drafts: dict[str, Draft] = {}
        for request_id, token_ids in zip(request_ids, drafted, strict=True):
            draft = tuple(token_ids[: wanted[request_id]])
            unknown = next((at for at, token_id in enumerate(draft) if token_id >= self._vocab_size), None)
            if draft := draft[:unknown]:
                self._followed[request_id].draft = draft
                drafts[request_id] = Draft(draft, self._name)
        return drafts

    def _draft(self, request_ids: list[str], most: int) -> tuple[list[str], list[list[int]], int]:
        """Return the requests for which there was time to draft, their drafts, and the known tokens computed."""
        chunks = self._missing(request_ids, most)
        if not chunks:
            return [], [], 0
        hidden = self._run(chunks)
        for chunk in chunks:
            self._note(chunk)
        lag, rows, num_tokens = self._guesser.lag, self._rows, len(hidden)
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        ready = [
            (at, chunk)
            for at, chunk in zip(ends, chunks, strict=True)
            if chunk.start + chunk.count == rows.num_tokens(chunk.request_id) - lag
        ]
        if not ready:
            return [], [], num_tokens
        states = hidden[self._staging.to_device(np.array([at for at, _ in ready], dtype=np.int64))]
        guessed = [self._guesser.argmax(states)]
        for step in range(most - 1):
            batch = self._batch(
                [_Chunk(each.request_id, each.start + each.count + step, 1) for _, each in ready]
            )
            states = self._guesser.forward(guessed[-1].to(torch.int32), states, batch, self._kv)
            guessed.append(self._guesser.argmax(states))
        for _, chunk in ready:
            followed = self._followed[chunk.request_id]
            followed.num_computed = chunk.start + chunk.count + most - 1
            followed.num_known = chunk.start + chunk.count + lag
        return [each.request_id for _, each in ready], torch.stack(guessed, dim=1).tolist(), num_tokens

    def _missing(self, request_ids: list[str], most: int) -> list[_Chunk]:
        """Return the positions to compute: of requests with the fewest first, as many as there is time for."""
        missing = []
        for request_id in request_ids:
            followed, end = self._follow(request_id), self._rows.num_tokens(request_id) - self._guesser.lag
            start = min(followed.num_computed, end - 1)
            if start >= 0 and end + most <= self._max_positions:
                missing.append((end - start, start, request_id))
        missing.sort()
        chunks, left = [], CATCH_UP_TOKENS
        for count, start, request_id in missing:
            if left <= 0:
                break
            states = None
            if self.states is not None:  # they are there once, so all are read; what is missing is skipped
                start, states = self.states.take(request_id, start, end := start + count)
                if states is None:
                    continue
                count = end - start
            elif count > left:
                count = left
            chunks.append(_Chunk(request_id, start, count, states))
            left -= count
        return sorted(chunks, key=lambda chunk: chunk.count)

    def _follow(self, request_id: str) -> _Followed:
        """Find out how much of a request's KV is there: its blocks may have changed since the last call."""
        rows = self._rows
        row, table = rows.row(request_id), rows.own_blocks(request_id)
        followed = self._followed.get(request_id)
        if followed is None or followed.row != row:  # new, or preempted and resumed elsewhere
            followed = self._followed[request_id] = _Followed(table, row)
            followed.num_noted = self._num_written(request_id, table)
            followed.num_computed = followed.num_noted * rows.block_size
        else:
            common = min(len(table), len(followed.table))
            same = int((table[:common] != followed.table[:common]).argmax()) if common else 0
            if common and table[same] == followed.table[same]:
                same = common
            if same < max(len(table), len(followed.table)):
                followed.num_computed = min(followed.num_computed, same * rows.block_size)
                followed.num_noted = min(followed.num_noted, same)
            followed.table, followed.draft = table, ()
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
        size, lag = self._rows.block_size, self._guesser.lag
        part = tokens[index * size : (index + 1) * size + lag]
        return hash((before, part.tobytes())) if len(part) == size + lag else 0

    def _note(self, chunk: _Chunk) -> None:
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

    def _run(self, chunks: Sequence[_Chunk]) -> Tensor:
        lag = self._guesser.lag
        ids = [
            self._rows.tokens(each.request_id)[each.start + lag : each.start + each.count + lag]
            for each in chunks
        ]
        states = [each.states for each in chunks if each.states is not None]
        return self._guesser.forward(
            self._staging.to_device(np.concatenate(ids)),
            torch.cat(states) if states else None,
            self._batch(chunks),
            self._kv,
        )

    def _batch(self, chunks: Sequence[_Chunk]) -> AttentionBatch:
        size = self._rows.block_size
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = starts + lengths
        tables = self._tables([chunk.request_id for chunk in chunks], -(-int(context_lens.max()) // size))
        owners = np.repeat(np.arange(len(chunks)), lengths)
        positions = np.arange(int(query_starts[-1])) + np.repeat(starts - query_starts[:-1], lengths)
        slots = tables[owners, positions // size] * size + positions % size
        arrays = (positions, slots, query_starts, context_lens, tables)
        placed, places, firsts, lens, blocks = self._staging.all_to_device(
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

    def _tables(self, request_ids: Sequence[str], width: int) -> Int64Array:
        """Return block tables: a request's own blocks, then scratch blocks."""
        tables = np.zeros((len(request_ids), width), dtype=np.int64)
        for index, request_id in enumerate(request_ids):
            followed = self._followed[request_id]
            own = min(len(followed.table), width)
            scratch = self._first_scratch + followed.row * SCRATCH_BLOCKS
            tables[index, :own] = followed.table[:own]
            tables[index, own:] = scratch + np.arange(width - own) % SCRATCH_BLOCKS
        return tables
