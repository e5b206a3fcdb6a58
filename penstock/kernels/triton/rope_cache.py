"""Head norms, rope and the KV write, fused: one program per token and a few of its heads, each read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import tensor_kv
from penstock.kernels.interface import AttentionLayer
from penstock.kernels.triton.device import cdiv, next_power_of_2
from penstock.kernels.triton.overlap import launch_options, let_next_start, wait_for_previous
from penstock.kernels.triton.paged_kv import PagedLayer

FEW_TOKENS = 32
LARGEST_CODE = tl.constexpr(float(tensor_kv.LARGEST_CODE))


# The small arrays of a step lie anywhere: a kernel for each alignment of them would be compiled while requests wait.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_cache_kernel(
    qkv,
    q_out,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    rope,
    positions,
    slots,
    q_norm,
    k_norm,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = heads < H
    is_key = (heads >= H) & (heads < H + G)
    is_value = (heads >= H + G) & (heads < H + 2 * G)
    lower = tl.arange(0, HALF)
    present = (lower < D // 2)[None, :]
    inside = (heads < H + 2 * G)[:, None] & present
    let_next_start()
    position = tl.load(positions + token).to(tl.int64)
    angles = rope + position * D + lower
    cosine = tl.load(angles, mask=lower < D // 2, other=0.0)[None, :]
    sine = tl.load(angles + D // 2, mask=lower < D // 2, other=0.0)[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    wait_for_previous()
    source = qkv + token * (H + 2 * G) * D + heads[:, None] * D + lower[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + eps)[:, None]
        query_a = tl.load(q_norm + lower, mask=lower < D // 2, other=0.0).to(tl.float32)[None, :]
        query_b = tl.load(q_norm + D // 2 + lower, mask=lower < D // 2, other=0.0).to(tl.float32)[None, :]
        key_a = tl.load(k_norm + lower, mask=lower < D // 2, other=0.0).to(tl.float32)[None, :]
        key_b = tl.load(k_norm + D // 2 + lower, mask=lower < D // 2, other=0.0).to(tl.float32)[None, :]
        normed_a = a * scale * tl.where(is_query[:, None], query_a, key_a)
        normed_b = b * scale * tl.where(is_query[:, None], query_b, key_b)
        a = tl.where(is_value[:, None], a, normed_a.to(qkv.dtype.element_ty).to(tl.float32))
        b = tl.where(is_value[:, None], b, normed_b.to(qkv.dtype.element_ty).to(tl.float32))
    cosine = tl.where(is_value[:, None], 1.0, cosine)
    sine = tl.where(is_value[:, None], 0.0, sine)
    rotated_a = (a * cosine - b * sine).to(qkv.dtype.element_ty)
    rotated_b = (b * cosine + a * sine).to(qkv.dtype.element_ty)

    row = (slot // BLOCK_SIZE) * G * BLOCK_SIZE * D + (slot % BLOCK_SIZE) * D + lower[None, :]
    query_at = q_out + (token * H + heads[:, None]) * D + lower[None, :]
    key_at = k_cache + row + (heads - H)[:, None] * BLOCK_SIZE * D
    value_at = v_cache + row + (heads - H - G)[:, None] * BLOCK_SIZE * D
    tl.store(query_at, rotated_a, mask=is_query[:, None] & present)
    tl.store(query_at + D // 2, rotated_b, mask=is_query[:, None] & present)
    if HAS_SCALES:
        wide_a = rotated_a.to(tl.float32)
        wide_b = rotated_b.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide_a), axis=1), tl.max(tl.abs(wide_b), axis=1))
        scales = tl.maximum(largest, 1e-12) / LARGEST_CODE
        kept_a = tl.floor(wide_a / scales[:, None] + 0.5).to(k_cache.dtype.element_ty)
        kept_b = tl.floor(wide_b / scales[:, None] + 0.5).to(k_cache.dtype.element_ty)
        entry = (slot // BLOCK_SIZE) * G * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(k_scales + entry + (heads - H) * BLOCK_SIZE, scales, mask=is_key)
        tl.store(v_scales + entry + (heads - H - G) * BLOCK_SIZE, scales, mask=is_value)
    else:
        kept_a = rotated_a.to(k_cache.dtype.element_ty)
        kept_b = rotated_b.to(k_cache.dtype.element_ty)
    tl.store(key_at, kept_a, mask=is_key[:, None] & present)
    tl.store(key_at + D // 2, kept_b, mask=is_key[:, None] & present)
    tl.store(value_at, kept_a, mask=is_value[:, None] & present)
    tl.store(value_at + D // 2, kept_b, mask=is_value[:, None] & present)


def rope_and_cache(
    qkv: Tensor,
    layer: AttentionLayer,
    cache: PagedLayer,
    positions: Tensor,
    slots: Tensor,
    queries: Tensor | None = None,
) -> Tensor:
    """Returns the rotated queries [T, H, D], in `queries` if that is given; keys and values go to their slots."""
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    tokens = qkv.shape[0]
    if queries is None:
        queries = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    has_norm = layer.q_norm is not None
    # A few tokens are spread over the chip; many fill it anyway, and then fewer, larger programs win.
    per_program = 4 if tokens <= FEW_TOKENS else 16
    _rope_cache_kernel[(tokens, cdiv(heads + 2 * kv_heads, per_program))](
        qkv,
        queries,
        cache.keys,
        cache.values,
        *cache.scale_pointers,
        layer.rope,
        positions,
        slots,
        layer.q_norm if has_norm else qkv,
        layer.k_norm if has_norm else qkv,
        layer.norm_eps,
        H=heads,
        G=kv_heads,
        D=size,
        BLOCK_SIZE=cache.block_size,
        HAS_NORM=has_norm,
        HAS_SCALES=cache.key_scales is not None,
        HEADS=per_program,
        HALF=next_power_of_2(size // 2),
        num_warps=1 if tokens <= FEW_TOKENS else 4,
        **launch_options(),
    )
    return queries
