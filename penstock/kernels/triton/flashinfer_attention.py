"""Attention over prompts by FlashInfer (the extra `flashinfer`).

The Triton kernels compute decodes, because they run from CUDA graphs and FlashInfer plans every step on the host. The
Triton kernels also compute layers with sinks, caches in eight bits, and head sizes that FlashInfer has no kernels
for. One plan serves all equal layers of a step. FlashInfer compiles its kernels when it first meets a kind of layer,
in the warm-up, and keeps them on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.paged_kv import PagedLayer

WORKSPACE_BYTES = 128 << 20
HEAD_SIZES = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a layer that a plan depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class _Planned:
    wrapper: Any
    batch: AttentionBatch | None = None
    copied: torch.cuda.Event | None = None  # when its last plan has left the page-locked buffer


class FlashInferAttention:
    def __init__(self, device: torch.device) -> None:
        import flashinfer  # an extra

        self._make_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[_Kind, _Planned] = {}

    def attends(
        self, q: Tensor, cache: PagedLayer, out: Tensor, layer: AttentionLayer, batch: AttentionBatch
    ) -> bool:
        """Write the rows of `out` after the first `batch.num_decodes`, or return False if FlashInfer does not take
        them."""
        if not _can_run(q, cache) or layer.sinks is not None:
            return False
        kind = _Kind(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.window, layer.softcap
        )
        planned = self._planned.get(kind) or _Planned(self._make_wrapper(self._workspace, "HND"))
        if planned.batch is not batch:
            _plan(planned, kind, cache.block_size, batch, q.dtype)
        self._planned[kind] = planned
        first = batch.num_decodes
        planned.wrapper.run(q[first:], (cache.keys, cache.values), out=out[first:])
        return True


def _can_run(q: Tensor, cache: PagedLayer) -> bool:
    return (
        cache.keys.dtype == q.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in HEAD_SIZES
    )


def _plan(planned: _Planned, kind: _Kind, block_size: int, batch: AttentionBatch, dtype: torch.dtype) -> None:
    """Plan a step. This does not wait for the device if the batch has its lengths on the host."""
    prompts = slice(batch.num_decodes, batch.num_requests)
    query_starts, context_lens = batch.lengths or (batch.query_starts.cpu(), batch.context_lens.cpu())
    lengths = context_lens[prompts]
    counts = (lengths + block_size - 1) // block_size
    page_starts = torch.nn.functional.pad(torch.cumsum(counts, dim=0, dtype=torch.int32), (1, 0))
    if planned.copied is not None:
        planned.copied.synchronize()
    planned.wrapper.plan(
        query_starts[batch.num_decodes : batch.num_requests + 1] - batch.num_decodes,
        page_starts,
        _pages(batch.block_tables[prompts], counts),
        (lengths - 1) % block_size + 1,
        kind.num_heads,
        kind.num_kv_heads,
        kind.head_dim,
        block_size,
        causal=True,
        sm_scale=kind.scale,
        window_left=-1 if kind.window is None else kind.window - 1,
        logits_soft_cap=kind.softcap,
        q_data_type=dtype,
    )
    planned.batch = batch
    if batch.block_tables.is_cuda:
        planned.copied = planned.copied or torch.cuda.Event()
        planned.copied.record()


def _pages(tables: Tensor, counts: Tensor) -> Tensor:
    """Return the first `counts[row]` entries of each row, one row after the other. `counts` is on the host."""
    return torch.cat([row[:count] for row, count in zip(tables, counts.tolist(), strict=True)])
