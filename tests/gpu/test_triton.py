"""The Triton kernels against the torch functions that define them, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.interface import AttentionBatch, AttentionLayer
from penstock.kernels.reference import TorchOps

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
