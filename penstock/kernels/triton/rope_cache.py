"""Head norms, rope and the KV write, fused: one program per token and head, each reading its head once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.interface import AttentionLayer


@triton.jit
def _rope_cache_kernel(
    qkv,
    q_out,
    k_cache,
    v_cache,
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
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lower = tl.arange(0, HALF)
    inside = lower < D // 2
    source = qkv + token * (H + 2 * G) * D + head * D
    first = tl.load(source + lower, mask=inside, other=0.0)
    second = tl.load(source + D // 2 + lower, mask=inside, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    if head >= H + G:
        at = ((slot // BLOCK_SIZE) * G + (head - H - G)) * BLOCK_SIZE * D + (slot % BLOCK_SIZE) * D
        tl.store(v_cache + at + lower, first, mask=inside)
        tl.store(v_cache + at + D // 2 + lower, second, mask=inside)
    else:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
            weight = q_norm
            if head >= H:
                weight = k_norm
            a = a * scale * tl.load(weight + lower, mask=inside, other=0.0).to(tl.float32)
            b = b * scale * tl.load(weight + D // 2 + lower, mask=inside, other=0.0).to(tl.float32)
            a = a.to(qkv.dtype.element_ty).to(tl.float32)
            b = b.to(qkv.dtype.element_ty).to(tl.float32)
        position = tl.load(positions + token).to(tl.int64)
        cosine = tl.load(rope + position * D + lower, mask=inside, other=0.0)
        sine = tl.load(rope + position * D + D // 2 + lower, mask=inside, other=0.0)
        rotated_a = (a * cosine - b * sine).to(qkv.dtype.element_ty)
        rotated_b = (b * cosine + a * sine).to(qkv.dtype.element_ty)
        if head < H:
            target = q_out + (token * H + head) * D
        else:
            target = (
                k_cache + ((slot // BLOCK_SIZE) * G + (head - H)) * BLOCK_SIZE * D + (slot % BLOCK_SIZE) * D
            )
        tl.store(target + lower, rotated_a, mask=inside)
        tl.store(target + D // 2 + lower, rotated_b, mask=inside)


def rope_and_cache(
    qkv: Tensor, layer: AttentionLayer, k_cache: Tensor, v_cache: Tensor, positions: Tensor, slots: Tensor
) -> Tensor:
    """Returns the rotated queries [T, H, D]; keys and values go to their slots."""
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    tokens = qkv.shape[0]
    queries = torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device)
    has_norm = layer.q_norm is not None
    _rope_cache_kernel[(tokens, heads + 2 * kv_heads)](
        qkv,
        queries,
        k_cache,
        v_cache,
        layer.rope,
        positions,
        slots,
        layer.q_norm if has_norm else qkv,
        layer.k_norm if has_norm else qkv,
        layer.norm_eps,
        H=heads,
        G=kv_heads,
        D=size,
        BLOCK_SIZE=k_cache.shape[2],
        HAS_NORM=has_norm,
        HALF=triton.next_power_of_2(size // 2),
        num_warps=1,
    )
    return queries
