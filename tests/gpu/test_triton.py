"""The Triton kernels against the torch functions that define them, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from penstock.core.config import Quantization
from penstock.kernels.interface import AttentionBatch, AttentionLayer, DenseWeight, ExpertWeights, Routing
from penstock.kernels.reference import TorchOps
from penstock.models.quantize import quantize

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from penstock.kernels.triton.ops import TritonOps

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16


def both(dtype: torch.dtype) -> tuple[TritonOps, TorchOps]:
    return TritonOps(DEVICE, dtype), TorchOps(DEVICE, dtype)


def random_batch(lengths: list[tuple[int, int]], num_blocks: int) -> AttentionBatch:
    """(tokens before this step, tokens of this step) for each request, over shuffled blocks."""
    order = torch.randperm(num_blocks).tolist()
    width = max(-(-(before + count) // BLOCK_SIZE) for before, count in lengths)
    tables, positions, slots, starts = [], [], [], [0]
    for before, count in lengths:
        table = [order.pop() for _ in range(-(-(before + count) // BLOCK_SIZE))]
        tables.append(table + [0] * (width - len(table)))
        for position in range(before, before + count):
            positions.append(position)
            slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(starts[-1] + count)

    def int32(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return AttentionBatch(
        positions=int32(positions),
        slots=int32(slots),
        query_starts=int32(starts),
        context_lens=int32([before + count for before, count in lengths]),
        block_tables=int32(tables),
        num_requests=len(lengths),
        max_query_len=max(count for _, count in lengths),
        max_context_len=max(before + count for before, count in lengths),
        num_decodes=next((i for i, (_, count) in enumerate(lengths) if count > 1), len(lengths)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "softcap"),
    [(32, 8, 128, None, None), (9, 3, 64, None, None), (4, 4, 80, 70, None), (8, 1, 256, 40, 30.0)],
)
@pytest.mark.parametrize(
    "lengths",
    [
        [(700, 1), (3, 1), (16, 1), (2000, 1)],
        [(0, 1)],
        [(0, 333), (64, 100), (50, 1)],
        [(33, 1), (900, 1), (500, 77), (0, 130)],
    ],
)
def test_attend(
    dtype: torch.dtype,
    norms: bool,
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    lengths: list[tuple[int, int]],
) -> None:
    torch.manual_seed(0)
    ops, reference = both(dtype)
    num_blocks = 400
    layer = AttentionLayer(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        scale=size**-0.5,
        rope=torch.randn(2100, size, device=DEVICE),
        window=window,
        softcap=softcap,
        q_norm=torch.rand(size, device=DEVICE).to(dtype) + 0.5 if norms else None,
        k_norm=torch.rand(size, device=DEVICE).to(dtype) + 0.5 if norms else None,
    )
    batch = random_batch(lengths, num_blocks)
    width = (heads + 2 * kv_heads) * size
    stores = [each.allocate_kv(1, num_blocks, BLOCK_SIZE, kv_heads, size) for each in (ops, reference)]
    # The same tokens before this step, written through each backend's own layout.
    total = [before for before, _ in lengths]
    if any(total):
        first = AttentionBatch(
            positions=torch.cat([torch.arange(n) for n in total]).int().to(DEVICE),
            slots=torch.cat(
                [
                    batch.block_tables[i].cpu().long()[torch.arange(n) // BLOCK_SIZE] * BLOCK_SIZE
                    + torch.arange(n) % BLOCK_SIZE
                    for i, n in enumerate(total)
                ]
            )
            .int()
            .to(DEVICE),
            query_starts=torch.tensor(
                [0, *torch.tensor(total).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE
            ),
            context_lens=torch.tensor(total, dtype=torch.int32, device=DEVICE),
            block_tables=batch.block_tables,
            num_requests=len(total),
            max_query_len=max(total),
            max_context_len=max(total),
        )
        before = torch.randn(sum(total), width, device=DEVICE).to(dtype)
        for each, store in zip((ops, reference), stores, strict=True):
            each.attend(before, layer, store.layer(0), first)
    qkv = torch.randn(batch.positions.shape[0], width, device=DEVICE).to(dtype)
    got, wanted = (
        each.attend(qkv, layer, store.layer(0), batch)
        for each, store in zip((ops, reference), stores, strict=True)
    )
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), error  # float32 products run as tf32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 4096), (300, 1000)])
def test_elementwise(dtype: torch.dtype, rows: int, width: int) -> None:
    ops, reference = both(dtype)
    x, residual = (torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(width, device=DEVICE).to(dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance
    )
    ours, theirs = residual.clone(), residual.clone()
    torch.testing.assert_close(
        ops.add_rms_norm(x, ours, weight, 1e-5), reference.add_rms_norm(x, theirs, weight, 1e-5), **tolerance
    )
    torch.testing.assert_close(ours, theirs, **tolerance)
    for activation in ("silu", "gelu_tanh"):
        torch.testing.assert_close(
            ops.gated(torch.cat([x, residual], 1), activation),
            reference.gated(torch.cat([x, residual], 1), activation),
            **tolerance,
        )


@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 32, 33, 100])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (576, 1536), (4096, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_block_is_its_parts(rows: int, hidden: int, inner: int, bias: bool) -> None:
    triton_ops, _ = both(torch.bfloat16)
    exact = TorchOps(DEVICE, torch.float32)

    def packed(outputs: int, width: int) -> tuple[object, object]:
        weight = DenseWeight(torch.randn(outputs, width, device=DEVICE, dtype=torch.bfloat16) / width**0.5)
        offsets = torch.randn(outputs, device=DEVICE, dtype=torch.bfloat16) if bias else None
        wide = None if offsets is None else offsets.float()
        return triton_ops.pack_linear([weight], offsets), exact.pack_linear([weight], wide)

    heads, kv_heads, size = 8, 2, 64
    gate_up, down = packed(2 * inner, hidden), packed(hidden, inner)
    qkv, output = packed((heads + 2 * kv_heads) * size, hidden), packed(hidden, heads * size)
    norm = torch.rand(hidden, device=DEVICE) + 0.5
    layer = AttentionLayer(heads, kv_heads, size, size**-0.5, torch.rand(512, size, device=DEVICE))
    batch = random_batch([(7 * i % 100, 1) for i in range(rows)], num_blocks=8 * rows)
    ours = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    theirs = ours.float()
    stores = [ops.allocate_kv(1, 8 * rows, BLOCK_SIZE, kv_heads, size) for ops in (triton_ops, exact)]
    for ops, residual, store, part in ((triton_ops, ours, stores[0], 0), (exact, theirs, stores[1], 1)):
        ops.attention_block(residual, norm, 1e-5, qkv[part], output[part], layer, store.layer(0), batch)
        ops.mlp_block(residual, norm, 1e-5, gate_up[part], down[part], "silu")
    assert (ours.float() - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize("tokens", [1, 3, 40, 256, 3000])
@pytest.mark.parametrize(("experts", "top_k", "inner"), [(128, 8, 768), (8, 2, 512), (6, 3, 96)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_experts(tokens: int, experts: int, top_k: int, inner: int, normalizes: bool) -> None:
    triton_ops, torch_ops = both(torch.bfloat16)
    hidden = 256

    def matrix(outputs: int, width: int) -> DenseWeight:
        return DenseWeight(torch.randn(outputs, width, device=DEVICE, dtype=torch.bfloat16) / width**0.5)

    parts = [
        ExpertWeights(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
        for _ in range(experts)
    ]
    router = matrix(experts, hidden)
    norm = torch.rand(hidden, device=DEVICE) + 0.5
    ours = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    theirs = ours.clone()
    routing = Routing(experts, top_k, normalizes)
    for ops, residual in ((triton_ops, ours), (torch_ops, theirs)):
        packed = ops.pack_experts(iter(parts))
        ops.moe_block(residual, norm, 1e-5, ops.pack_linear([router]), packed, routing, "silu")
    # Rounding lets a token near a tie take another expert.
    close = (ours.float() - theirs.float()).abs().amax(dim=1) < 0.03 * theirs.abs().max()
    assert close.float().mean() > 0.98


@pytest.mark.parametrize("method", ["fp8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 17, 32, 33, 100, 129, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_rounded_weights(method: Quantization, rows: int, bias: bool) -> None:
    """Against the values that the rounded weights stand for."""
    triton_ops, _ = both(torch.bfloat16)
    exact = TorchOps(DEVICE, torch.float32)
    hidden, inner = 512, 1024

    def packed(outputs: int, width: int) -> tuple[object, object]:
        dense = DenseWeight(torch.randn(outputs, width, device=DEVICE) / width**0.5)
        weight = quantize(dense, method)
        offsets = torch.randn(outputs, device=DEVICE) if bias else None
        return triton_ops.pack_linear([weight], offsets), exact.pack_linear([weight], offsets)

    gate_up, down = packed(2 * inner, hidden), packed(hidden, inner)
    norm = torch.rand(hidden, device=DEVICE) + 0.5
    ours = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    theirs = ours.float()
    for ops, residual, part in ((triton_ops, ours, 0), (exact, theirs, 1)):
        ops.mlp_block(residual, norm, 1e-5, gate_up[part], down[part], "silu")
    # Many rows are themselves rounded to float8.
    tolerance = 0.06 if method == "fp8" and rows > 32 else 0.02
    assert (ours.float() - theirs).abs().max() < tolerance * theirs.abs().max()
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    expected = exact.logits(x.float(), gate_up[1])
    assert (triton_ops.logits(x, gate_up[0]) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("lengths", [[(500, 1), (1, 1), (77, 1)], [(0, 70), (130, 33), (16, 200)]])
def test_a_cache_in_float8(lengths: list[tuple[int, int]]) -> None:
    """Against the definition with a cache of the same type, filled by the same calls."""
    kv_dtype = torch.float8_e4m3fn
    triton_ops = TritonOps(DEVICE, torch.bfloat16, kv_dtype)
    torch_ops = TorchOps(DEVICE, torch.bfloat16, kv_dtype)
    heads, kv_heads, size = 8, 2, 128
    layer = AttentionLayer(heads, kv_heads, size, size**-0.5, torch.rand(1024, size, device=DEVICE))
    width = (heads + 2 * kv_heads) * size
    stores = [ops.allocate_kv(1, 200, BLOCK_SIZE, kv_heads, size) for ops in (triton_ops, torch_ops)]
    batch = random_batch(lengths, num_blocks=200)
    before = [(0, count) for count, _ in lengths if count]
    if before:  # fill what this step finds in the cache
        history = random_batch(before, num_blocks=200)
        past = torch.randn(sum(count for _, count in before), width, device=DEVICE, dtype=torch.bfloat16)
        for ops, store in zip((triton_ops, torch_ops), stores, strict=True):
            ops.attend(past, layer, store.layer(0), history)
    qkv = torch.randn(sum(count for _, count in lengths), width, device=DEVICE, dtype=torch.bfloat16)
    ours, theirs = (
        ops.attend(qkv, layer, store.layer(0), batch)
        for ops, store in zip((triton_ops, torch_ops), stores, strict=True)
    )
    torch.testing.assert_close(ours.float(), theirs.float(), atol=0.03, rtol=0.03)
