"""Runs a model over a paged cache with scattered blocks, as the engine would, but one call at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.engine.device import allocate_kv
from penstock.kernels.interface import AttentionBatch, Ops
from penstock.kernels.states import StateBatch, StateStore
from penstock.models.model import Model, state_layers

BLOCK_SIZE = 16


@dataclass(slots=True)
class Sequence:
    block_ids: list[int] = field(default_factory=list)
    state_slot: int | None = None
    num_computed: int = 0


class PagedRunner:
    def __init__(self, model: Model, ops: Ops, num_blocks: int = 64) -> None:
        self.model = model
        self._device = ops.device
        self._kv = allocate_kv(model, ops, num_blocks, BLOCK_SIZE)
        layers = state_layers(model)
        self._states = StateStore(layers, 16, ops.device) if layers else None
        self._num_sequences = 0
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)

    def step(self, chunks: list[tuple[Sequence, list[int]]]) -> list[Tensor]:
        """The logits of every token of each chunk."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, chunk in chunks:
            end = sequence.num_computed + len(chunk)
            while len(sequence.block_ids) * BLOCK_SIZE < end:
                sequence.block_ids.append(self._free.pop())
            for position in range(sequence.num_computed, end):
                positions.append(position)
                slots.append(sequence.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            token_ids += chunk
            starts.append(len(token_ids))
            sequence.num_computed = end
        context_lens = [sequence.num_computed for sequence, _ in chunks]
        width = max(len(sequence.block_ids) for sequence, _ in chunks)
        tables = [sequence.block_ids + [0] * (width - len(sequence.block_ids)) for sequence, _ in chunks]
        batch = AttentionBatch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            query_starts=self._tensor(starts),
            context_lens=self._tensor(context_lens),
            block_tables=self._tensor(tables),
            num_requests=len(chunks),
            max_query_len=max(len(chunk) for _, chunk in chunks),
            max_context_len=max(context_lens),
        )
        if self._states is not None:
            batch = self._with_states(batch, [sequence for sequence, _ in chunks], self._states)
        with torch.inference_mode():
            hidden = self.model.forward(self._tensor(token_ids), batch, self._kv)
            logits = self.model.logits(hidden)
        return [logits[start:end] for start, end in pairwise(starts)]

    def _with_states(
        self, batch: AttentionBatch, sequences: list[Sequence], store: StateStore
    ) -> AttentionBatch:
        for sequence in sequences:
            if sequence.state_slot is None:
                sequence.state_slot = self._num_sequences
                self._num_sequences += 1
        slots = torch.tensor([sequence.state_slot for sequence in sequences])
        lengths = (batch.query_starts, batch.context_lens)
        return replace(batch, lengths=lengths, states=StateBatch(store, slots))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def prompt_logits(self, token_ids: list[int], chunk_size: int | None = None) -> Tensor:
        sequence = Sequence()
        size = chunk_size or len(token_ids)
        parts = [
            self.step([(sequence, token_ids[start : start + size])])[0]
            for start in range(0, len(token_ids), size)
        ]
        return torch.cat(parts)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        sequence = Sequence()
        answer: list[int] = []
        chunk = prompt
        for _ in range(num_tokens):
            (logits,) = self.step([(sequence, chunk)])
            answer.append(int(logits[-1].argmax()))
            chunk = answer[-1:]
        return answer
