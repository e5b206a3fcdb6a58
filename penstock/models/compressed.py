"""Attention over a window of tokens, and over entries into which a few tokens each are compressed, as in DeepSeek V4.

A token has one vector, which is key and value of all heads. For each token the cache holds [own vector | entry | key
of the indexer]; the last two are written at the last token of the entry's span. Entries are made of two products of
the hidden state, values and gates. Those of the newest tokens are a state of the request: a ring by position.

Everything here is plain torch for any device. The host knows the positions of a step, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, Ops, PackedLinear
from penstock.kernels.states import StateShapes

SCORES_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 128  # queries of a request whose windows are read together


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one request in a step."""

    number: int  # of the request
    rows: range  # in the step
    first: int  # position

    @property
    def length(self) -> int:
        """Return the tokens of the request up to the end of the step."""
        return self.first + len(self.rows)


def chunks_of(batch: AttentionBatch) -> list[Chunk]:
    lengths = batch.lengths or (batch.query_starts, batch.context_lens)
    starts, ends = (each.tolist() for each in lengths)
    rows = [range(starts[number], starts[number + 1]) for number in range(batch.num_requests)]
    return [Chunk(number, each, ends[number] - len(each)) for number, each in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of tokens that end in a step, in a table of the rings of all its requests and, below, the step."""

    last: Tensor  # int64 [n]: the last token of each span, a row of the step
    first_positions: Tensor  # int64 [n]: of the tokens that an entry stands for
    taken: Tensor  # int64 [n, tokens that make an entry]: rows of the table
    exists: Tensor  # bool, for each of `taken`: not before the text
    kept: Tensor  # int64 [k]: rows of the step that later spans may need
    places: Tensor  # int64 [k]: where the rings get them, rows of the table


def find_spans(chunks: list[Chunk], rate: int, size: int, device: torch.device) -> Spans:
    """Find the spans of `rate` tokens that end in a step. An entry is made of the newest `size` tokens."""
    step = len(chunks) * size  # the first row of the step in the table
    ends = [
        (chunk, position)
        for chunk in chunks
        for position in range(chunk.first + (-chunk.first - 1) % rate, chunk.length, rate)
    ]
    newest = [
        (chunk, position)
        for chunk in chunks
        for position in range(max(chunk.first, chunk.length - size), chunk.length)
    ]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    positions = numbers([position for _, position in ends]).unsqueeze(1) + torch.arange(1 - size, 1)
    first = numbers([chunk.first for chunk, _ in ends]).unsqueeze(1)
    new = numbers([step + chunk.rows.start - chunk.first for chunk, _ in ends]).unsqueeze(1) + positions
    old = numbers([chunk.number * size for chunk, _ in ends]).unsqueeze(1) + positions % size
    found = Spans(
        last=numbers([chunk.rows.start + position - chunk.first for chunk, position in ends]),
        first_positions=numbers([position - rate + 1 for _, position in ends]),
        taken=torch.where(positions < first, old, new),
        exists=positions >= 0,
        kept=numbers([chunk.rows.start + position - chunk.first for chunk, position in newest]),
        places=numbers([chunk.number * size + position % size for chunk, position in newest]),
    )
    moved = {name: getattr(found, name).to(device, non_blocking=True) for name in Spans.__slots__}
    return Spans(**moved)


@dataclass(frozen=True, slots=True)
class EntryMaker:
    """Makes an entry of values: their sum by the softmax of gates, each number by itself, then normed and rotated."""

    bias: Tensor  # float32 [rate, width]: of gates, by the place in the span
    norm: Tensor
    eps: float
    rope: Tensor

    def __call__(self, values: Tensor, gates: Tensor, spans: Spans) -> Tensor:
        """float32 [n, tokens, width] twice → float32 [n, size]. With twice as many tokens as a span has, the first
        half of each number belongs to the span after that of its token."""
        rate, width = self.bias.shape
        gates = gates + self.bias.repeat(values.shape[1] // rate, 1)
        gates = gates.masked_fill(~spans.exists.unsqueeze(2), -torch.inf)
        if values.shape[1] > rate:
            values, gates = (
                torch.cat([each[:, :rate, : width // 2], each[:, rate:, width // 2 :]], dim=1)
                for each in (values, gates)
            )
        made = (values * torch.softmax(gates, dim=1)).sum(dim=1)
        made = made * torch.rsqrt(made.square().mean(dim=1, keepdim=True) + self.eps) * self.norm
        return rotate_last(made.unsqueeze(1), self.rope, spans.first_positions).squeeze(1)


@dataclass(frozen=True, slots=True)
class Compressor:
    """Makes the entries of a layer and, with an indexer, a key of each. The product gives the values and gates of
    entries, then those of keys."""

    into: PackedLinear
    rate: int
    entries: EntryMaker
    keys: EntryMaker | None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens an entry is made of."""
        return self.rate if self.keys is None else 2 * self.rate

    @property
    def state_shapes(self) -> StateShapes:
        return ((self.num_tokens, self.into.out_features),)

    def write(
        self, ops: Ops, hidden: Tensor, ring: Tensor, spans: Spans, cache: Any, batch: AttentionBatch
    ) -> None:
        """Write what the step completes to the cache, and the newest tokens to the rings."""
        assert batch.states is not None, "a step of a model with states has slots"
        raw = ops.linear(hidden, self.into).float()
        slots = batch.states.slots
        table = torch.cat([ring[slots].flatten(0, 1), raw])
        if len(spans.last):
            taken = table[spans.taken]
            width = 2 * self.entries.bias.shape[1]
            values, gates = taken[..., :width].chunk(2, dim=2)
            made = [self.entries(values, gates, spans)]
            if self.keys is not None:
                values, gates = taken[..., width:].chunk(2, dim=2)
                made.append(self.keys(values, gates, spans))
            entries = torch.cat(made, dim=1).to(hidden.dtype).unsqueeze(1)
            cache.write(batch.slots[spans.last].long(), entries, len(self.entries.norm))
        rings = table[: len(slots) * self.num_tokens]
        rings[spans.places] = raw[spans.kept]
        ring[slots] = rings.view(-1, self.num_tokens, rings.shape[1])


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small heads that choose entries: the score of an entry is the sum over heads of weight × ReLU(query · key)."""

    query: PackedLinear
    weights: PackedLinear
    num_heads: int
    top_k: int
    rope: Tensor

    def queries(self, ops: Ops, hidden: Tensor, narrow: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 queries [T, heads, size], and weights [T, heads]. The order of scores would be the same with
        any positive factor."""
        by_head = ops.linear(narrow, self.query).unflatten(1, (self.num_heads, -1))
        return rotate_last(by_head, self.rope, positions).float(), ops.router_logits(hidden, self.weights)

    def hide_others(self, query: Tensor, weights: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """Return `hidden`, bool [n, entries], with the entries that are not chosen. Among equals the earlier comes
        first."""
        if keys.shape[0] <= self.top_k:
            return hidden
        products = (query.flatten(0, 1) @ keys.T).relu_().view(len(query), self.num_heads, -1)
        scores = (weights.unsqueeze(1) @ products).squeeze(1).masked_fill_(hidden, -torch.inf)
        chosen = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self.top_k]
        return hidden | torch.ones_like(hidden).scatter_(1, chosen, False)


@dataclass(frozen=True, slots=True)
class WindowLayer:
    """The settings of attention over a window and, with a `rate`, over entries."""

    size: int  # of a vector
    scale: float
    window: int
    rate: int | None
    sinks: Tensor  # float32 [H]: a logit of each head that takes weight, and has no value
    rope: Tensor

    def attend(
        self,
        query: Tensor,
        cache: Any,
        batch: AttentionBatch,
        chunks: list[Chunk],
        indexer: Indexer | None = None,
        indexed: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[T, H, size] → [T, H, size], rotated back by the position of the query. `indexed` is what the indexer's
        `queries` gave."""
        out = torch.empty_like(query)
        for chunk in chunks:
            table = batch.block_tables[chunk.number].long()
            begin = max(0, chunk.first - self.window + 1)
            own = _entries(cache, table, torch.arange(begin, chunk.length), slice(0, self.size))
            made = keys = own[:0]
            if self.rate is not None:
                ends = torch.arange(chunk.length // self.rate) * self.rate + self.rate - 1
                both = _entries(cache, table, ends, slice(self.size, None))
                made, keys = both[:, : self.size], both[:, self.size :]
            for rows, position in self._pieces(chunk, query.shape[1], len(made)):
                first = max(0, position - self.window + 1)
                near = own[first - begin : position + len(rows) - begin]
                place = slice(rows.start, rows.stop)
                late = self._later_entries(position, len(rows), len(made), query.device)
                if indexer is not None and indexed is not None:
                    late = indexer.hide_others(indexed[0][place], indexed[1][place], keys, late)
                hidden = torch.cat(
                    [self._outside(position, first, len(rows), len(near), query.device), late], dim=1
                )
                out[place] = self._weighted(query[place].float(), torch.cat([near, made]), hidden).to(
                    out.dtype
                )
        return rotate_last(out, self.rope, batch.positions, back=True)

    def _pieces(self, chunk: Chunk, heads: int, entries: int) -> Iterator[tuple[range, int]]:
        """Yield rows of the step that are attended together, and the position of the first one."""
        at_once = SCORES_AT_ONCE // (heads * (self.window + ROWS_AT_ONCE + entries))
        at_once = max(1, min(ROWS_AT_ONCE, at_once))
        for start in range(0, len(chunk.rows), at_once):
            yield chunk.rows[start : start + at_once], chunk.first + start

    def _outside(self, position: int, first: int, count: int, length: int, device: torch.device) -> Tensor:
        """bool [count, length]: which tokens from `first` on are outside of the window of each query."""
        queries = torch.arange(position, position + count, device=device).unsqueeze(1)
        keys = torch.arange(first, first + length, device=device)
        return (keys > queries) | (keys <= queries - self.window)

    def _later_entries(self, position: int, count: int, entries: int, device: torch.device) -> Tensor:
        """bool [count, entries]: which entries stand for tokens after each query."""
        complete = torch.arange(position + 1, position + 1 + count, device=device) // (self.rate or 1)
        return torch.arange(entries, device=device) >= complete.unsqueeze(1)

    def _weighted(self, query: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
        """float32 [n, H, size] over [k, size] → [n, H, size]."""
        scores = (query.flatten(0, 1) @ keys.T).mul_(self.scale).view(len(query), -1, len(keys))
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        sinks = self.sinks.expand(len(query), -1).unsqueeze(2)
        weights = torch.softmax(torch.cat([scores, sinks], dim=2), dim=2)[..., :-1]
        return (weights.flatten(0, 1) @ keys).view_as(query)


def _entries(cache: Any, table: Tensor, positions: Tensor, columns: slice) -> Tensor:
    """Return some columns of what the cache holds at these positions, float32."""
    positions = positions.to(table.device, non_blocking=True)
    block_size = cache.entries.shape[1]
    found: Tensor = cache.entries[..., columns][table[positions // block_size], positions % block_size, 0]
    return found.float()


def rotate_last(x: Tensor, rope: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
    """Rotate the pairs of neighbours among the last numbers of every head by the angle of its position: [T, H, D]."""
    cosine, sine = rope[positions.long()].unsqueeze(1).chunk(2, dim=2)
    plain, turned = x.split([x.shape[2] - rope.shape[1], rope.shape[1]], dim=2)
    first, second = turned.float().unflatten(2, (-1, 2)).unbind(3)
    sine = -sine if back else sine
    pairs = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=3)
    return torch.cat([plain, pairs.flatten(2).to(x.dtype)], dim=2)
