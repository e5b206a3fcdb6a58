"""Attention within chunks of the context (Llama 4): a token attends to its own chunk only.

The part of a request in each chunk is a request of its own, whose block table begins at the chunk. So no kernel needs
to know of chunks. Positions and slots stay as they are.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch


class _Last(threading.local):
    """The last batch with prompts. All layers of a step ask for the same one."""

    batch: AttentionBatch | None = None
    chunk = 0
    made: AttentionBatch | None = None


_last = _Last()


def within_chunks(batch: AttentionBatch, chunk: int | None, block_size: int) -> AttentionBatch:
    """Return a batch in which each request lies in one chunk."""
    if chunk is None or batch.max_context_len <= chunk:
        return batch
    if chunk % block_size:
        raise ValueError(f"chunks of {chunk} tokens are no whole number of blocks of {block_size}")
    if batch.num_decodes == batch.num_requests:  # computed anew in each layer: a graph may be recording
        return _single_tokens(batch, chunk, block_size)
    if _last.batch is not batch or _last.chunk != chunk or _last.made is None:
        _last.batch, _last.chunk, _last.made = batch, chunk, _pieces(batch, chunk, block_size)
    return _last.made


def _single_tokens(batch: AttentionBatch, chunk: int, block_size: int) -> AttentionBatch:
    """Requests with one token each, without waiting for the device."""
    width, last = chunk // block_size, batch.context_lens - 1
    columns = torch.arange(width, device=last.device) + (last // chunk * width).unsqueeze(1)
    tables = batch.block_tables.gather(1, columns.clamp_max(batch.block_tables.shape[1] - 1))
    return replace(
        batch,
        context_lens=last % chunk + 1,
        block_tables=tables,
        max_context_len=chunk,
        neighbours=None,
        lengths=None,
    )


def _pieces(batch: AttentionBatch, chunk: int, block_size: int) -> AttentionBatch:
    query_starts, context_lens = batch.lengths or (batch.query_starts.cpu(), batch.context_lens.cpu())
    width, starts = chunk // block_size, query_starts.tolist()
    ends, lengths, owners, offsets = [0], [], [], []
    for request, length in enumerate(context_lens.tolist()[: batch.num_requests]):
        position = length - (starts[request + 1] - starts[request])
        while position < length:
            stop = min(length, (position // chunk + 1) * chunk)
            ends.append(ends[-1] + stop - position)
            lengths.append((stop - 1) % chunk + 1)
            owners.append(request)
            offsets.append(position // chunk * width)
            position = stop
    columns = torch.arange(width) + torch.tensor(offsets).unsqueeze(1)
    columns = columns.clamp_max(batch.block_tables.shape[1] - 1)
    device = batch.block_tables.device

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    host = torch.tensor(ends, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    tables = batch.block_tables[torch.tensor(owners, device=device).unsqueeze(1), columns.to(device)]
    return replace(
        batch,
        query_starts=on_device(ends),
        context_lens=on_device(lengths),
        block_tables=tables.contiguous(),
        num_requests=len(owners),
        max_query_len=max(stop - start for start, stop in pairwise(ends)),
        max_context_len=max(lengths),
        neighbours=None,
        lengths=host,
    )
