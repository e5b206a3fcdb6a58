"""How fast the CPU kernels are on the shapes of SmolLM2-135M, beside torch's own linear.

    python bench/kernels_cpu.py [--rows 1,8,32,128,512] [--dtype bfloat16] [--integers] [--threads N]
    python bench/kernels_cpu.py --relative [--rows 1,2,4,8]

Prints GB/s of packed weights and GFLOP/s for each matrix, then whole decode and prefill steps made of the
backend's operations in the order a model calls them, with random weights in the model's 4-bit format. With
--relative, it prints what several rows cost in terms of one row, as speculative decoding verifies them: for every
instruction set of this machine, for five formats of weights, and for attention over several queries of a request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.kernels import library
from penstock.kernels.interface import (
    AttentionBatch,
    AttentionLayer,
    DenseWeight,
    GatedLayer,
    GroupQuantWeight,
    KVStore,
    Ops,
    PackedLinear,
    RunLayers,
    SamplingBatch,
    WeightData,
)
from penstock.kernels.native import NativeOps
from penstock.kernels.select import capabilities, select_ops, set_num_threads

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 576, 30, 9, 3, 64, 1536, 49152
MATRICES = {
    "qkv": (HIDDEN, [(HEADS + 2 * KV_HEADS) * HEAD_DIM]),
    "output": (HEADS * HEAD_DIM, [HIDDEN]),
    "gate_up": (HIDDEN, [INTERMEDIATE, INTERMEDIATE]),
    "down": (INTERMEDIATE, [HIDDEN]),
    "head": (HIDDEN, [VOCABULARY]),
}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A published format: its bits, its group and whether its scales fit float16. Dense where there is no group."""

    bits: int
    group: int | None
    exact_halves: bool = True


FORMATS = {
    "Q4_1": WeightFormat(4, 32),
    "Q4_K": WeightFormat(4, 32, exact_halves=False),
    "Q6_K": WeightFormat(8, 16, exact_halves=False),
    "int8": WeightFormat(8, 32),
    "bf16": WeightFormat(16, None),
}


def random_weight(out_features: int, in_features: int, form: WeightFormat) -> WeightData:
    if form.group is None:
        return DenseWeight(torch.randn(out_features, in_features).bfloat16())
    scales = torch.rand(out_features, in_features // form.group).mul_(0.01)
    scales = scales.half().float() if form.exact_halves else scales
    if form.bits == 4:
        codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
        offsets = (scales * -8).half().float() if form.exact_halves else scales * -8
        return GroupQuantWeight(codes, scales, offsets, form.group, 4)
    codes = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    return GroupQuantWeight(codes, scales, None, form.group, 8)


def clock() -> Callable[[], float]:
    """The clock of a measurement. One thread counts its CPU time, which other programs on its core change little."""
    return time.thread_time if capabilities().num_threads == 1 else time.perf_counter


def best_time_s(function: Callable[[], object], seconds: float = 0.3) -> float:
    """The fastest of many runs: what the machine does when nobody else is on it."""
    function()
    now = clock()
    best, end = float("inf"), now() + seconds
    while now() < end:
        start = now()
        function()
        best = min(best, now() - start)
    return best


def bench_matrices(ops: Ops, rows_list: list[int], form: WeightFormat) -> None:
    print(f"\n{'matrix':10} {'rows':>5} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8}")
    for name, (inputs, outputs) in MATRICES.items():
        # Several copies in turn, so that no call finds its weights where the last one left them.
        copies = 1 if name == "head" else LAYERS
        packed = [
            ops.pack_linear([random_weight(out, inputs, form) for out in outputs]) for _ in range(copies)
        ]
        for rows in rows_list:
            x = torch.randn(rows, inputs).to(ops.dtype)
            elapsed = (
                best_time_s(lambda x=x, packed=packed, name=name: run_all(ops, name, x, packed)) / copies
            )
            flops = 2 * rows * inputs * sum(outputs)
            print(
                f"{name:10} {rows:5} {elapsed * 1e6:9.1f} {packed[0].num_bytes / elapsed / 1e9:7.1f} "
                f"{flops / elapsed / 1e9:8.0f}"
            )


def bench_torch(ops: Ops, rows_list: list[int]) -> None:
    """Apart from the rest: torch's threads spin for a while after each call, on the cores that ours need."""
    print(f"\n{'torch':10} {'rows':>5} {'us':>9} {'GFLOP/s':>8}")
    for name, (inputs, outputs) in MATRICES.items():
        dense = torch.randn(sum(outputs), inputs).to(ops.dtype)
        for rows in rows_list:
            x = torch.randn(rows, inputs).to(ops.dtype)
            elapsed = best_time_s(lambda x=x, dense=dense: torch.nn.functional.linear(x, dense), 0.1)
            flops = 2 * rows * inputs * sum(outputs)
            print(f"{name:10} {rows:5} {elapsed * 1e6:9.1f} {flops / elapsed / 1e9:8.0f}")


def run_all(ops: Ops, name: str, x: Tensor, packed: list[PackedLinear]) -> None:
    """Each result goes before the next comes, as in a model, so that they share memory."""
    multiply = ops.logits if name == "head" else ops.linear
    for weight in packed:
        multiply(x, weight)


@dataclass
class Model:
    """SmolLM2-135M's sequence of operations with random weights."""

    ops: NativeOps
    form: WeightFormat = FORMATS["Q4_1"]

    def __post_init__(self) -> None:
        ops, angles = self.ops, torch.rand(8192, HEAD_DIM // 2)
        self.head = ops.pack_linear([random_weight(VOCABULARY, HIDDEN, self.form)])
        self.table = ops.pack_embedding(random_weight(16, HIDDEN, self.form), tied=self.head)
        self.attention = AttentionLayer(
            HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, torch.cat([angles.cos(), angles.sin()], 1)
        )
        self.norm = torch.ones(HIDDEN, dtype=ops.dtype)
        self.layers = [
            {
                name: ops.pack_linear([random_weight(out, inputs, self.form) for out in outputs])
                for name, (inputs, outputs) in MATRICES.items()
                if name != "head"
            }
            for _ in range(LAYERS)
        ]
        self.num_bytes = self.head.num_bytes + sum(
            w.num_bytes for layer in self.layers for w in layer.values()
        )

    def join(self, kv: KVStore) -> RunLayers:
        layers = [
            GatedLayer(
                self.norm,
                layer["qkv"],
                self.attention,
                layer["output"],
                self.norm,
                layer["gate_up"],
                layer["down"],
            )
            for layer in self.layers
        ]
        run = self.ops.join_layers(layers, 1e-5, "silu", kv)
        assert run is not None, "both are the library's own"
        return run

    def forward(self, ids: Tensor, batch: AttentionBatch, run: RunLayers, sampling: SamplingBatch) -> Tensor:
        ops = self.ops
        residual = ops.embed(ids, self.table)
        run(residual, batch)
        last = ops.rms_norm(residual, self.norm, 1e-5)[batch.query_starts[1:].long() - 1]
        return ops.sample(ops.logits(last, self.head), sampling)


def make_batch(tables: Tensor, query_len: int, context_len: int) -> AttentionBatch:
    requests = tables.shape[0]
    positions = torch.arange(context_len - query_len, context_len)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        positions=positions.repeat(requests).int(),
        slots=slots.flatten().int(),
        query_starts=torch.arange(0, requests * query_len + 1, query_len, dtype=torch.int32),
        context_lens=torch.full((requests,), context_len, dtype=torch.int32),
        block_tables=tables,
        num_requests=requests,
        max_query_len=query_len,
        max_context_len=context_len,
    )


def make_step(model: Model, requests: int, query_len: int, context_len: int) -> Callable[[], Tensor]:
    ops = model.ops
    blocks = -(-context_len // BLOCK_SIZE)
    store = ops.allocate_kv(LAYERS, requests * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    run = model.join(store)
    tables = torch.randperm(requests * blocks, dtype=torch.int32).view(requests, blocks)
    batch = make_batch(tables, query_len, context_len)
    ids = torch.randint(0, VOCABULARY, (requests * query_len,), dtype=torch.int32)
    sampling = SamplingBatch(
        temperature=torch.zeros(requests),
        top_k=torch.zeros(requests, dtype=torch.int32),
        top_p=torch.ones(requests),
        min_p=torch.zeros(requests),
        seed=torch.arange(requests),
        position=torch.zeros(requests, dtype=torch.int64),
        all_greedy=True,
    )
    return lambda: model.forward(ids, batch, run, sampling)


def bench_steps(ops: NativeOps, form: WeightFormat) -> None:
    model = Model(ops, form)
    print(f"\nwhole steps, {model.num_bytes / 1e6:.0f} MB of weights")
    print(f"{'step':24} {'ms':>8} {'tokens/s':>9} {'GFLOP/s':>8}")
    weights = HIDDEN * sum(
        sum(outputs) for name, (_, outputs) in MATRICES.items() if name in ("qkv", "gate_up")
    )
    weights = LAYERS * (weights + HEADS * HEAD_DIM * HIDDEN + INTERMEDIATE * HIDDEN)
    for requests, context_len in ((1, 128), (1, 1024), (8, 160), (16, 1056), (32, 160)):
        elapsed = best_time_s(make_step(model, requests, 1, context_len), 1.0)
        flops = 2 * requests * (weights + VOCABULARY * HIDDEN)
        name = f"decode {requests} × 1 @ {context_len}"
        print(f"{name:24} {elapsed * 1e3:8.2f} {requests / elapsed:9.0f} {flops / elapsed / 1e9:8.0f}")
    for prompt in (128, 512, 1024):
        elapsed = best_time_s(make_step(model, 1, prompt, prompt), 1.0)
        name = f"prefill {prompt}"
        print(
            f"{name:24} {elapsed * 1e3:8.2f} {prompt / elapsed:9.0f} {2 * prompt * weights / elapsed / 1e9:8.0f}"
        )


# The products of a layer of Qwen2.5-1.5B, whose weights no cache holds when the layers take turns.
LARGE_LAYER = {"qkv": (1536, 2048), "output": (1536, 1536), "gate_up": (1536, 17920), "down": (8960, 1536)}
LARGE_LAYERS = 4
QUERY_HEADS, QUERY_KV_HEADS, QUERY_DIM, QUERY_CONTEXT = 12, 2, 128, 1024


def times_by_rows(run: Mapping[int, Callable[[], object]], rounds: int = 7) -> dict[int, float]:
    """The fastest of several turns of each, so that all meet the same machine."""
    now = clock()
    best = dict.fromkeys(run, float("inf"))
    for _ in range(rounds):
        for rows, function in run.items():
            start = now()
            function()
            best[rows] = min(best[rows], now() - start)
    return best


def relative_products(
    ops: NativeOps, layers: Sequence[Sequence[PackedLinear]], rows_list: list[int]
) -> dict[int, float]:
    def multiply_all(inputs: list[Tensor]) -> None:
        for layer in layers:
            for x, packed in zip(inputs, layer, strict=True):
                ops.linear(x, packed)

    rows_of = {
        rows: [torch.randn(rows, inputs).to(ops.dtype) for inputs, _ in LARGE_LAYER.values()]
        for rows in rows_list
    }
    return times_by_rows({rows: partial(multiply_all, inputs) for rows, inputs in rows_of.items()})


def relative_attention(ops: NativeOps, rows_list: list[int]) -> dict[int, float]:
    angles = torch.rand(QUERY_CONTEXT, QUERY_DIM // 2)
    layer = AttentionLayer(
        QUERY_HEADS, QUERY_KV_HEADS, QUERY_DIM, QUERY_DIM**-0.5, torch.cat([angles.cos(), angles.sin()], 1)
    )
    store = ops.allocate_kv(LARGE_LAYERS, QUERY_CONTEXT // BLOCK_SIZE, BLOCK_SIZE, QUERY_KV_HEADS, QUERY_DIM)
    table = torch.randperm(QUERY_CONTEXT // BLOCK_SIZE, dtype=torch.int32).unsqueeze(0)
    width = (QUERY_HEADS + 2 * QUERY_KV_HEADS) * QUERY_DIM

    def attend_all(batch: AttentionBatch, qkv: Tensor) -> None:
        for index in range(LARGE_LAYERS):
            ops.attend(qkv, layer, store.layer(index), batch)

    calls = {
        rows: partial(
            attend_all, make_batch(table, rows, QUERY_CONTEXT), torch.randn(rows, width).to(ops.dtype)
        )
        for rows in rows_list
    }
    calls[rows_list[0]]()
    return times_by_rows(calls, rounds=40)


def bench_relative(rows_list: list[int], formats: Sequence[str]) -> None:
    native = library.load()
    assert native is not None, "main has looked"
    print(
        f"\n{'product':10} {'set':12} {'1 row, ms':>10}" + "".join(f"{rows:>7} ×" for rows in rows_list[1:])
    )
    # What `--dtype auto` computes with on each set.
    backends: dict[tuple[torch.dtype, bool], list[int]] = {}
    for isa, name in enumerate(library.ISA_NAMES):
        if name != "generic" and native.set_isa(isa):
            dtype = torch.bfloat16 if name == "amx" else torch.float32
            backends.setdefault((dtype, bool(native.fast_integers())), []).append(isa)
    for (dtype, integers), isas in backends.items():
        ops = NativeOps(native, dtype, integer_products=integers)
        for form_name in formats:
            form = FORMATS[form_name]
            layers = [
                [ops.pack_linear([random_weight(out, inputs, form)]) for inputs, out in LARGE_LAYER.values()]
                for _ in range(LARGE_LAYERS)
            ]
            for isa in isas:
                native.set_isa(isa)
                print_relative(form_name, library.ISA_NAMES[isa], relative_products(ops, layers, rows_list))
        for isa in isas:
            native.set_isa(isa)
            print_relative("attention", library.ISA_NAMES[isa], relative_attention(ops, rows_list))
    native.set_isa(native.best_isa())


def print_relative(product: str, isa: str, times: dict[int, float]) -> None:
    first, *others = times.values()
    print(f"{product:10} {isa:12} {first * 1e3:10.2f}" + "".join(f"{time / first:8.2f} " for time in others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--format", choices=list(FORMATS), help="default: Q4_1; with --relative, all")
    parser.add_argument(
        "--relative", action="store_true", help="several rows in terms of one row, and nothing else"
    )
    parser.add_argument(
        "--integers", action="store_true", help="multiply as whole numbers, as --dtype auto does"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps-only", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        set_num_threads(arguments.threads)
    ops = select_ops("cpu", getattr(torch, arguments.dtype), integer_products=arguments.integers)
    if not isinstance(ops, NativeOps):
        raise SystemExit("The CPU kernels are not built here.")
    print(f"backend {ops.name}, {ops.dtype}, {capabilities()}")
    rows_list = [int(rows) for rows in arguments.rows.split(",")]
    if arguments.relative:
        bench_relative(rows_list, [arguments.format] if arguments.format else list(FORMATS))
        raise SystemExit
    form = FORMATS[arguments.format or "Q4_1"]
    if not arguments.steps_only:
        bench_matrices(ops, rows_list, form)
    bench_steps(ops, form)
    if not arguments.steps_only:
        bench_torch(ops, rows_list)


if __name__ == "__main__":
    main()
