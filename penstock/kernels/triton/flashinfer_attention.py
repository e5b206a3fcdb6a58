"""Attention by FlashInfer (the extra `flashinfer`), for steps in which prompts are computed.

Decodes stay with the Triton kernel: they run from CUDA graphs, and FlashInfer plans every step on the host. So do
caches in eight bits and sizes of heads that FlashInfer has no kernels for. A plan serves all layers of a step that
are alike; making it waits for the device, once per step.
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
    """What a plan depends on, beside the step."""

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


class FlashInferAttention:
    def __init__(self, device: torch.device) -> None:
        import flashinfer  # an extra

        self._make_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[_Kind, _Planned] = {}

    def takes(self, q: Tensor, cache: PagedLayer, layer: AttentionLayer, batch: AttentionBatch) -> bool:
        return (
            batch.num_decodes < batch.num_requests
            and cache.keys.dtype == q.dtype
            and q.dtype in (torch.float16, torch.bfloat16)
            and layer.head_dim in HEAD_SIZES
        )

    def attend(self, q: Tensor, cache: PagedLayer, layer: AttentionLayer, batch: AttentionBatch) -> Tensor:
        """[T, H, D] → [T, H × D]"""
        kind = _Kind(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.window, layer.softcap
        )
        planned = self._planned.get(kind)
        if planned is None:
            planned = self._planned[kind] = _Planned(self._make_wrapper(self._workspace, "HND"))
        if planned.batch is not batch:
            self._plan(planned.wrapper, kind, cache, batch, q.dtype)
            planned.batch = batch
        out: Tensor = planned.wrapper.run(q, (cache.keys, cache.values))
        return out.reshape(q.shape[0], -1)

    def _plan(
        self, wrapper: Any, kind: _Kind, cache: PagedLayer, batch: AttentionBatch, dtype: torch.dtype
    ) -> None:
        block_size = cache.block_size
        lengths = batch.context_lens[: batch.num_requests]
        counts = (lengths + block_size - 1) // block_size
        starts = torch.nn.functional.pad(torch.cumsum(counts, dim=0, dtype=torch.int32), (1, 0))
        places = torch.arange(batch.block_tables.shape[1], device=counts.device)
        tables = batch.block_tables[: batch.num_requests]
        wrapper.plan(
            batch.query_starts[: batch.num_requests + 1],
            starts,
            tables[places < counts.unsqueeze(1)],
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
