#!/usr/bin/env python3
"""Microseconds of CUDA kernels beside what they replace: sampling against a sort, int8 products against bfloat16
products, the products of a layer of Llama-8B in every format, each of these products in four bits, the products of
Qwen3-30B-A3B's experts, the experts of several models for one token, attention over prompts on Hopper against the
kernel for every GPU, and against FlashInfer where that is installed, and attention of tokens that verify drafts,
together and as decodes of their own.

    python -m bench.gpu_kernels [sampling] [products] [layers] [four-bits] [experts] [one-token] [attention] [drafts]
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from penstock.kernels.interface import (
    AttentionBatch,
    DenseWeight,
    ExpertWeights,
    Float8Weight,
    GroupQuantWeight,
    Routing,
    SamplingBatch,
    WeightData,
)
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
        with patch.object(prefill_attention, "has_hopper_kernels", lambda: False):
            for other in others.values():
                taken.append(microseconds(_attend_often, other, qkv, layer, cache, batch) / AT_ONCE)
        flops = sum(4 * 32 * 128 * count * (before + count / 2) for before, count in lengths)
        cells = [f"{each:,.0f} ({flops / each / 1e6:.0f})" for each in taken]
        row(f"{len(lengths)}, {lengths[-1]}", *cells)


def _attend_often(ops: TritonOps, qkv: Any, layer: Any, cache: Any, batch: AttentionBatch) -> None:
    """Several times in a row, so that the host's launches do not count."""
    for _ in range(AT_ONCE):
        ops.attend(qkv, layer, cache, batch)


DRAFTS = ((1, 512), (1, 16_384), (8, 512), (8, 8192), (32, 2048))  # requests, and the context of each
VERIFIED = (1, 2, 4, 8)  # tokens of each request


def drafts() -> None:
    from tests.triton.cases import Bench, Heads, as_decodes

    bench = Bench(DEVICE, torch.bfloat16)
    layer = Heads(32, 8, 128).layer(bench, 20_000)
    print(
        "\nattention of tokens that verify drafts, 32 heads of 128, 8 of keys, µs: together / as decodes alone"
    )
    row("requests, context", *(f"{count} tokens each" for count in VERIFIED))
    row(*["---"] * (1 + len(VERIFIED)))
    for requests, context in DRAFTS:
        cells = []
        for count in VERIFIED:
            lengths = [(context - count, count)] * requests
            num_blocks = requests * -(-context // 16) + 1
            together = as_decodes(bench.batch(lengths, num_blocks))
            qkv = bench.normal(len(together.positions), 48 * 128)
            cache = bench.ops.allocate_kv(1, num_blocks, 16, 8, 128).layer(0)
            alone = replace(together, neighbours=None)
            taken = [
                microseconds(_attend_often, bench.ops, qkv, layer, cache, each) / AT_ONCE
                for each in ((together, alone) if count > 1 else (alone,))
            ]
            cells.append(" / ".join(f"{each:,.0f}" for each in taken))
        row(f"{requests}, {context:,}", *cells)


# Outputs and widths of a layer of Llama-8B: queries, keys and values; attention's output; gate and up; down.
PRODUCTS = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28_672, 4096),
    "down": (4096, 14_336),
}
LAYER = tuple(PRODUCTS.values())
LAYERS = 4  # so many that no weight stays in the cache until its next use
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def matrix(form: str, outputs: int, width: int) -> WeightData:
    """A random matrix in this form, on the GPU."""
    if form == "bfloat16":
        return DenseWeight(torch.randn(outputs, width, dtype=torch.bfloat16, device=DEVICE) / width**0.5)
    if form.startswith("int4"):
        group = int(form.rpartition(" ")[2])
        codes = torch.randint(0, 16, (outputs, width), dtype=torch.uint8, device=DEVICE)
        scales = (torch.rand(outputs, width // group, device=DEVICE) + 0.5) / 8 / width**0.5
        return GroupQuantWeight(codes, scales, -8 * scales, group, 4)
    values = torch.randn(outputs, width, device=DEVICE).to(torch.float8_e4m3fn)
    if form == "fp8 by row":
        return Float8Weight(values, (torch.rand(outputs, device=DEVICE) + 0.5) / width**0.5)
    blocks = (torch.rand(outputs // 128, width // 128, device=DEVICE) + 0.5) / width**0.5
    return Float8Weight(values, blocks.repeat_interleave(128, dim=0), 128)


FORMS = ("bfloat16", "int4 in groups of 128", "int4 in groups of 32", "fp8 by row", "fp8 in blocks")


def layer_products(ops: TritonOps, form: str) -> Callable[[torch.Tensor], None]:
    """The four products of a layer, with the norms, the gate and the sums around them."""
    qkv, output, gate_up, down = (ops.pack_linear([matrix(form, *shape)]) for shape in LAYER)
    norm = torch.rand(4096, dtype=torch.bfloat16, device=DEVICE)

    def run(residual: torch.Tensor) -> None:
        projected = ops.normed_linear(residual, norm, 1e-5, qkv)
        ops.add_linear(projected[:, :4096].contiguous(), output, residual)
        ops.mlp_block(residual, norm, 1e-5, gate_up, down, "silu")

    return run


def graph_microseconds(runs: list[Callable[[torch.Tensor], None]], residual: torch.Tensor) -> float:
    """Of one run, in a CUDA graph of several."""
    for run in runs:
        run(residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs * 3:
            run(residual)
    return microseconds(graph.replay) / (3 * len(runs))


def layers() -> None:
    ops = TritonOps(DEVICE, torch.bfloat16)
    print("\nproducts of a layer of Llama-8B with norms, gate and sums, µs (times as fast as bfloat16)")
    row("rows", *(str(count) for count in ROWS))
    row(*["---"] * (1 + len(ROWS)))
    dense: list[float] = []
    for form in FORMS:
        runs = [layer_products(ops, form) for _ in range(LAYERS)]
        taken = [
            graph_microseconds(runs, torch.randn(rows, 4096, dtype=torch.bfloat16, device=DEVICE))
            for rows in ROWS
        ]
        dense = dense or taken
        row(form, *(f"{each:,.0f} ({one / each:.2f})" for each, one in zip(taken, dense, strict=True)))


def layer_product(ops: TritonOps, name: str, form: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One product of a layer with what is fused into it, of rows with a residual of as many rows."""
    packed = ops.pack_linear([matrix(form, *PRODUCTS[name])])
    norm = torch.rand(PRODUCTS[name][1], dtype=torch.bfloat16, device=DEVICE)

    def run(x: torch.Tensor, residual: torch.Tensor) -> None:
        if name == "qkv":
            ops.normed_linear(x, norm, 1e-5, packed)
        elif name == "gate and up":
            ops.normed_gated(x, norm, 1e-5, packed, "silu")
        else:
            ops.add_linear(x, packed, residual)

    return run


def four_bits() -> None:
    """Each product of a layer in four bits and in bfloat16, in graphs."""
    ops = TritonOps(DEVICE, torch.bfloat16)
    counts = [count for count in ROWS if count <= 512] + [192, 384]
    print("\nproducts of Llama-8B with norm, gate or sum, µs (times as fast as bfloat16)")
    row("product", "form", *sorted(counts))
    row(*["---"] * (2 + len(counts)))
    for name, (outputs, width) in PRODUCTS.items():
        dense: list[float] = []
        for form in FORMS[:3]:
            runs = [layer_product(ops, name, form) for _ in range(2 * LAYERS)]
            taken = []
            for count in sorted(counts):
                x = torch.randn(count, width, dtype=torch.bfloat16, device=DEVICE)
                residual = torch.randn(count, outputs, dtype=torch.bfloat16, device=DEVICE)
                bound = [functools.partial(run, x) for run in runs]
                taken.append(graph_microseconds(bound, residual))
            dense = dense or taken
            row(
                name,
                form,
                *(f"{each:,.1f} ({one / each:.2f})" for each, one in zip(taken, dense, strict=True)),
            )


EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768  # of Qwen3-30B-A3B
EXPERT_TOKENS = (256, 1024, 2048, 4096, 8192)


def experts() -> None:
    """The products of a layer's experts for many tokens, whose experts are random."""
    from penstock.kernels.triton.expert_groups import route_and_group
    from penstock.kernels.triton.experts import multiply_groups, pack_experts

    shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    stacked = [
        pack_experts(
            (ExpertWeights(*(matrix("bfloat16", *shape) for shape in shapes)) for _ in range(EXPERTS)),
            torch.bfloat16,
            DEVICE,
        )
        for _ in range(2)
    ]
    print(f"\n{EXPERTS} experts of {INNER}, of which a token has {CHOSEN}, µs (TFLOP/s)")
    row("tokens", "gate and up", "down")
    row(*["---"] * 3)
    for tokens in EXPERT_TOKENS:
        routing = Routing(num_experts=EXPERTS, top_k=CHOSEN, normalizes=True)
        weights, groups = route_and_group(torch.randn(tokens, EXPERTS, device=DEVICE), routing)
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        active = torch.randn(tokens * CHOSEN, INNER, dtype=torch.bfloat16, device=DEVICE)
        made = torch.empty(tokens * CHOSEN, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        cells = []
        for gate, source, shares, out in (("silu", x, None, active.clone()), (None, active, weights, made)):

            def run(_: torch.Tensor, index: int, given: Any = (gate, source, shares, out, groups)) -> None:
                activation, rows, scales, to, by_expert = given
                weight = stacked[index].gate_up if activation else stacked[index].down
                multiply_groups(rows, weight, None, by_expert, scales, to, CHOSEN, gate=activation)

            taken = graph_microseconds([functools.partial(run, index=index) for index in range(2)], x)
            flops = tokens * CHOSEN * 2 * HIDDEN * INNER * (2 if gate else 1)
            cells.append(f"{taken:,.0f} ({flops / taken / 1e6:.0f})")
        row(tokens, *cells)


# Experts, the experts of a token, hidden and inner size.
MIXTURES = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-Next": (512, 10, 2048, 512),
    "DeepSeek-V2-Lite": (64, 6, 2048, 1408),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
BYTES_PER_US = 4.28e6  # that a copy reads and writes


def one_token() -> None:
    """Norm, router and experts of a layer for one token, beside the time that reading its experts takes."""
    ops = TritonOps(DEVICE, torch.bfloat16)
    print("\nexperts of one token in bfloat16, with norm and router, µs")
    row("model", "time", "bytes of the chosen experts at 4.28 TB/s")
    row(*["---"] * 3)
    for name, (count, chosen, hidden, inner) in MIXTURES.items():
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        routing = Routing(num_experts=count, top_k=chosen, normalizes=True)
        norm = torch.rand(hidden, dtype=torch.bfloat16, device=DEVICE)
        layers = [
            (
                ops.pack_linear([matrix("bfloat16", count, hidden)]),
                ops.pack_experts(
                    ExpertWeights(*(matrix("bfloat16", *shape) for shape in shapes)) for _ in range(count)
                ),
            )
            for _ in range(3)
        ]

        def run(residual: torch.Tensor, layer: Any, given: Any = (norm, routing)) -> None:
            norm, routing = given
            ops.moe_block(residual, norm, 1e-6, *layer, routing, "silu")

        runs = [functools.partial(run, layer=layer) for layer in layers]
        taken = graph_microseconds(runs, torch.randn(1, hidden, dtype=torch.bfloat16, device=DEVICE))
        row(name, f"{taken:.1f}", f"{chosen * 3 * hidden * inner * 2 / BYTES_PER_US:.1f}")


PARTS = {
    "sampling": sampling,
    "products": products,
    "layers": layers,
    "four-bits": four_bits,
    "experts": experts,
    "one-token": one_token,
    "attention": attention,
    "drafts": drafts,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
