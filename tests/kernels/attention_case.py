"""Requests over a paged cache, driven step by step through any backend."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer, Ops

BLOCK_SIZE = 16


def make_layer(
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    window: int | None = None,
    softcap: float | None = None,
    head_norms: bool = False,
    max_positions: int = 2048,
    sinks: bool = False,
    chunk: int | None = None,
) -> AttentionLayer:
    return AttentionLayer(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=make_rope(head_dim, max_positions),
        window=window,
        softcap=softcap,
        q_norm=torch.rand(head_dim) + 0.5 if head_norms else None,
        k_norm=torch.rand(head_dim) + 0.5 if head_norms else None,
        sinks=torch.randn(num_heads) * 2 if sinks else None,
        chunk=chunk,
    )


@functools.cache
def make_rope(head_dim: int, max_positions: int) -> Tensor:
    half = head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(max_positions).unsqueeze(1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


@dataclass
class Sequence:
    """One request's whole input, the blocks it lives in, and how much of it has been computed."""

    qkv: Tensor  # [tokens, (H + 2G) × D]
    blocks: list[int]
    computed: int = 0
    tail_offset: int = 0  # slot of the last block where its tokens begin
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def output(self) -> Tensor:
        return torch.cat(self.outputs)


def make_sequences(
    lengths: list[int], layer: AttentionLayer, num_blocks: int, dtype: torch.dtype
) -> list[Sequence]:
    """Blocks are handed out in shuffled order, as a used cache would."""
    free = torch.randperm(num_blocks).tolist()
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    sequences = []
    for length in lengths:
        blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        sequences.append(Sequence(torch.randn(length, width).to(dtype), blocks))
    return sequences


def make_batch(
    work: list[tuple[list[int], int, int]], tail_offsets: list[int] | None = None
) -> AttentionBatch:
    """Of (block table, tokens already in the cache, tokens of this step) for each request."""
    positions, slots, starts, contexts = [], [], [0], []
    for (blocks, computed, count), tail_offset in zip(work, tail_offsets or [0] * len(work), strict=True):
        for position in range(computed, computed + count):
            positions.append(position)
            index, offset = divmod(position, BLOCK_SIZE)
            offset += tail_offset if index == len(blocks) - 1 else 0
            slots.append(blocks[index] * BLOCK_SIZE + offset)
        starts.append(starts[-1] + count)
        contexts.append(computed + count)
    longest = max(len(blocks) for blocks, _, _ in work)
    tables = [blocks + [-1] * (longest + 1 - len(blocks)) for blocks, _, _ in work]
    return AttentionBatch(
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        num_requests=len(work),
        max_query_len=max(count for _, _, count in work),
        max_context_len=max(contexts),
    )


def run_step(ops: Ops, layer: AttentionLayer, cache: object, work: list[tuple[Sequence, int]]) -> None:
    """Computes the next `n` tokens of each sequence in one batch."""
    batch = make_batch(
        [(sequence.blocks, sequence.computed, count) for sequence, count in work],
        [sequence.tail_offset for sequence, _ in work],
    )
    rows = [sequence.qkv[sequence.computed : sequence.computed + count] for sequence, count in work]
    out = ops.attend(torch.cat(rows), layer, cache, batch)
    for (sequence, count), start in zip(work, batch.query_starts.tolist(), strict=False):
        sequence.outputs.append(out[start : start + count])
        sequence.computed += count


def run_all(ops: Ops, layer: AttentionLayer, cache: object, sequences: list[Sequence], chunk: int) -> None:
    """Every sequence to its end, `chunk` tokens of each per step."""
    for sequence in sequences:
        sequence.computed = 0
        sequence.outputs = []
    while True:
        work = [
            (s, min(chunk, s.qkv.shape[0] - s.computed)) for s in sequences if s.computed < s.qkv.shape[0]
        ]
        if not work:
            return
        run_step(ops, layer, cache, work)
