"""Paged attention. Keys and values are read in place through the block table: no gather, no padding.

Requests with one query token and those with several have kernels of their own: the first are a matter of memory
speed, the others of arithmetic. Cache layout: see `paged_kv`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.triton.decode_attention import decode_attention
from penstock.kernels.triton.flashinfer_attention import FlashInferAttention
from penstock.kernels.triton.paged_kv import PagedLayer
from penstock.kernels.triton.prefill_attention import prefill_attention


def attention(
    q: Tensor,
    cache: PagedLayer,
    layer: AttentionLayer,
    batch: AttentionBatch,
    flashinfer: FlashInferAttention | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H, D] → [T, H × D], in `out` if that is given. The first `batch.num_decodes` requests have one query token
    each. `flashinfer` computes the prompts that it accepts."""
    out = torch.empty_like(q) if out is None else out
    if batch.num_decodes:
        decode_attention(q, cache, out, layer, batch)
    if batch.num_requests > batch.num_decodes and not (
        flashinfer is not None and flashinfer.attends(q, cache, out, layer, batch)
    ):
        prefill_attention(q, cache, out, layer, batch)
    return out.view(q.shape[0], -1)
