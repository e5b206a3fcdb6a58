#!/usr/bin/env python3
"""Microseconds of CUDA kernels beside what they replace: sampling against a sort, int8 products against bfloat16
products, and attention over prompts on Hopper against the kernel for every GPU, and against FlashInfer where that is
installed.

    python -m bench.gpu_kernels
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from penstock.kernels.interface import AttentionBatch, GroupQuantWeight, SamplingBatch
from penstock.kernels.reference import TorchOps
from penstock.kernels.triton import int8, int8_rows
from penstock.kernels.triton.ops import TritonOps

DEVICE = torch.device("cuda")
VOCABULARY = 151_936
REPETITIONS = 20
AT_ONCE = 5
PROMPTS = (
    *([(context - count, count)] for count in (256, 512, 1024) for context in (1024, 4096, 16_384)),
    *([(0, count)] for count in (2048, 4096, 8192, 16_384)),
    *([(16_384 - count, count)] for count in (2048, 8192)),
    *([(0, tokens // count)] * count for tokens, count in ((8192, 4), (8192, 16), (4000, 40))),
    [(1000, 1)] * 64 + [(16_384 - 1024, 1024)],
)


def microseconds(work: Callable[..., object], *arguments: object) -> float:
    """The median of single runs, each timed on the device."""
    for _ in range(3):
        work(*arguments)
    times: list[float] = []
    for _ in range(REPETITIONS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*arguments)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def unpack_and_multiply(x: torch.Tensor, packed: int8.Int8Linear) -> torch.Tensor:
    return x @ int8.unpack(packed, torch.bfloat16).t()


def row(*cells: object) -> None:
    print(
        "| " + " | ".join(f"{cell:,.0f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
    )


def sampling() -> None:
    ours, sort = TritonOps(DEVICE, torch.bfloat16), TorchOps(DEVICE, torch.bfloat16)
    print(f"\nsampling from {VOCABULARY:,} tokens, µs")
    row("rows", "whole vocabulary", "top-k 20", "top-p 0.95", "top-p 0.95 of a flat row", "sort, top-k 20")
    row(*["---"] * 6)
    for rows in (1, 32, 256):
        logits = torch.randn(rows, VOCABULARY, device=DEVICE) * 3
        flat = torch.randn(rows, VOCABULARY, device=DEVICE) * 0.1

        def column(value: float, dtype: torch.dtype, rows: int = rows) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=DEVICE)

        whole = SamplingBatch(
            temperature=column(0.7, torch.float32),
            top_k=column(0, torch.int32),
            top_p=column(1.0, torch.float32),
            min_p=column(0.0, torch.float32),
            seed=torch.arange(rows, device=DEVICE),
            position=torch.arange(rows, device=DEVICE),
            all_greedy=False,
            whole_vocabulary=True,
        )
        few = replace(whole, top_k=column(20, torch.int32), whole_vocabulary=False)
        most = replace(whole, top_p=column(0.95, torch.float32), whole_vocabulary=False)
        row(
            rows,
            microseconds(ours.sample, logits, whole),
            microseconds(ours.sample, logits, few),
            microseconds(ours.sample, logits, most),
            microseconds(ours.sample, flat, most),
            microseconds(sort.sample, logits, few),
        )


def products() -> None:
    print("\nproducts of int8 weights and inputs, µs")
    row(
        "rows", "outputs × width", "int8_rows", "torch._int_mm alone", "unpack and cuBLAS", "cuBLAS, bfloat16"
    )
    row(*["---"] * 6)
    for outputs, width in ((6144, 4096), (28_672, 4096), (4096, 14_336)):
        codes = torch.randint(-127, 128, (outputs, width), dtype=torch.int8, device=DEVICE)
        scales = torch.rand(outputs, 1, device=DEVICE)
        ops = TritonOps(DEVICE, torch.bfloat16)
        packed = ops.pack_linear([GroupQuantWeight(codes, scales, None, width, 8, rounds_inputs=True)])
        assert isinstance(packed, int8.Int8Linear)
        dense = int8.unpack(packed, torch.bfloat16)
        for rows in (128, 512, 2048, 8192):
            x = torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE)
            x_codes = torch.randint(-127, 128, (rows, width), dtype=torch.int8, device=DEVICE)
            row(
                rows,
                f"{outputs} × {width}",
                microseconds(int8_rows.many_rows, x, packed, torch.bfloat16),
                microseconds(torch._int_mm, x_codes, codes.t()),
                microseconds(unpack_and_multiply, x, packed),
                microseconds(torch.matmul, x, dense.t()),
            )


def attention() -> None:
    """Attention over prompts: the kernel that is chosen, the kernel for every GPU, and FlashInfer."""
    from penstock.kernels.triton import prefill_attention
    from tests.triton.cases import Bench, Heads

    bench = Bench(DEVICE, torch.bfloat16)
    heads = Heads(32, 8, 128)
    others = {"Triton": TritonOps(DEVICE, torch.bfloat16)}
    if importlib.util.find_spec("flashinfer") is not None:
        from penstock.kernels.triton.flashinfer_attention import FlashInferAttention

        others["FlashInfer, planned"] = TritonOps(
            DEVICE, torch.bfloat16, flashinfer=FlashInferAttention(DEVICE)
        )
    print("\nattention over prompts, 32 heads of 128, 8 of keys, µs (TFLOP/s)")
    row("requests", "chosen", *others)
    row(*["---"] * (2 + len(others)))
    for lengths in PROMPTS:
        num_blocks = sum(-(-sum(pair) // 16) for pair in lengths) + 1
        batch, layer = bench.batch(lengths, num_blocks), heads.layer(bench, 20_000)
        qkv = bench.normal(len(batch.positions), 48 * 128)
        ours = TritonOps(DEVICE, torch.bfloat16)
        cache = ours.allocate_kv(1, num_blocks, 16, 8, 128).layer(0)
        taken = [microseconds(_attend_often, ours, qkv, layer, cache, batch) / AT_ONCE]
        with patch.object(prefill_attention, "_has_hopper_kernel", lambda: False):
            for other in others.values():
                taken.append(microseconds(_attend_often, other, qkv, layer, cache, batch) / AT_ONCE)
        flops = sum(4 * 32 * 128 * count * (before + count / 2) for before, count in lengths)
        cells = [f"{each:,.0f} ({flops / each / 1e6:.0f})" for each in taken]
        row(f"{len(lengths)}, {lengths[-1]}", *cells)


def _attend_often(ops: TritonOps, qkv: Any, layer: Any, cache: Any, batch: AttentionBatch) -> None:
    """Several times in a row, so that the host's launches do not count."""
    for _ in range(AT_ONCE):
        ops.attend(qkv, layer, cache, batch)


if __name__ == "__main__":
    sampling()
    products()
    attention()
