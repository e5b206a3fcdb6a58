"""What the warm-up compiles, by what it launches: in the interpreter a launch compiles nothing, but it has the same
arguments."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "triton", "3.9", reason="needs triton 3.9 or later, whose interpreter knows today's numpy"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled on this machine; tests/gpu runs them", allow_module_level=True)

from triton import JITFunction, knobs
from triton.runtime._async_compile import active_mode
from triton.runtime.interpreter import InterpretedFunction

from penstock.core.clock import VirtualClock
from penstock.core.engine_config import Quantization
from penstock.engine.warmup import _compiling, report_compilations, warm_up
from penstock.kernels.triton import decode_attention, prefill_attention
from penstock.kernels.triton.ops import TritonOps
from penstock.models.load import load_model
from tests.engine.tiny import write_tiny_model
from tests.triton.cases import Bench, Lengths, as_decodes, as_trees, sampling_batch
from tests.triton.sampling_cases import mixed_batch

Variant = tuple[Any, ...]

QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
PLAIN_STEPS: list[Lengths] = [
    [(700, 1)],
    [(30, 1)] * 2,
    [(30, 1)] * 3,
    [(30, 1)] * 16,
    [(30, 1)] * 30,
    [(30, 1)] * 200,
    [(0, 300), (64, 70)],
    [(64, 3)],
    [(16, 1), (480, 1), (0, 20)],
    [(16, 1)] * 40 + [(256, 12)],
    [(9000, 3), (64, 70)],
    [(0, 1500)],
    [(3000, 1500)],
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """Kernels by name, constants and types of arguments, which is what they are compiled for. Nothing runs."""
    variants: set[Variant] = set()

    def run(self: InterpretedFunction, *args: Any, **options: Any) -> None:
        types = tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
        constants = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        variants.add((self.fn.__name__, types, tuple(sorted(constants.items()))))

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    monkeypatch.setattr(InterpretedFunction, "run", run)
    # Products of torch take most of the time, and launch no kernel of ours.
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, *_, **__: self)
    for module in (decode_attention, prefill_attention):
        monkeypatch.setattr(module, "num_processors", lambda index: 132)
    return variants


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_serving_meets_no_new_variant(
    tmp_path: Path, launched: set[Variant], quantization: Quantization | None
) -> None:
    model_path = write_tiny_model(tmp_path / "tiny", hidden_size=128, intermediate_size=256)
    ops = TritonOps(torch.device("cpu"), torch.bfloat16)
    model = load_model(model_path, ops, load_format="random", quantization=quantization)
    kv = ops.allocate_kv(model.num_layers, 64, 16, model.num_kv_heads, model.head_dim)
    sizes = {"block_size": 16, "max_rows": 256, "max_tokens": 2048}
    warm_up(model, ops, **sizes, verifies=True)
    without_trees = set(launched)
    warm_up(model, ops, **sizes, verifies=True, verifies_trees=True)
    known = set(launched)
    assert 0 < len(known - without_trees) <= 3
    assert 20 < len(without_trees) < 40  # each costs a start some tenths of a second of one core

    bench = Bench(torch.device("cpu"), torch.bfloat16)
    drafts: list[Lengths] = [[(700, 2)], [(30, 7)] * 3, [(30, 5)] * 100]
    for arranged, lengths in (
        *((as_trees, each) for each in drafts),
        *((as_decodes, each) for each in drafts),
        *((lambda batch: batch, each) for each in PLAIN_STEPS),
    ):
        batch = arranged(bench.batch(lengths, num_blocks=1300))
        hidden = model.forward(torch.zeros(len(batch.positions), dtype=torch.int32), batch, kv)
        for rows in {1, min(8, len(lengths)), len(lengths)}:
            logits = model.logits(hidden[:rows])
            ops.sample(logits, sampling_batch(bench, rows, 0.0))
            ops.sample(logits, sampling_batch(bench, rows, 0.7))
            ops.sample(logits, mixed_batch(bench.device, rows))
    assert launched == known


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_experts_come_in_tiles_of_every_size(
    tmp_path: Path, launched: set[Variant], quantization: Quantization | None
) -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model_path = write_tiny_model(tmp_path / "tiny", hidden_size=128, **experts, **QWEN3_MOE)
    ops = TritonOps(torch.device("cpu"), torch.bfloat16)
    model = load_model(model_path, ops, load_format="random", quantization=quantization)
    kv = ops.allocate_kv(model.num_layers, 64, 16, model.num_kv_heads, model.head_dim)
    warm_up(model, ops, block_size=16, max_rows=256, max_tokens=4096)
    known = set(launched)
    bench = Bench(torch.device("cpu"), torch.bfloat16)
    for tokens in (1, 7, 90, 300, 500, 1000, 2000, 4000):
        batch = bench.batch([(0, tokens)], num_blocks=300)
        model.forward(torch.zeros(tokens, dtype=torch.int32), batch, kv)
    assert launched == known


def test_sizes_of_tiles_that_few_steps_have_are_compiled_too(tmp_path: Path, launched: set[Variant]) -> None:
    """From 513 to 640 tokens, pairs are counted ahead and tiles have 32 rows; from 2,049 on, tiles have 128."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    model_path = write_tiny_model(tmp_path / "tiny", **sizes, **experts, **QWEN3_MOE)
    ops = TritonOps(torch.device("cpu"), torch.bfloat16)
    model = load_model(model_path, ops, load_format="random")
    kv = ops.allocate_kv(model.num_layers, 64, 16, model.num_kv_heads, model.head_dim)
    warm_up(model, ops, block_size=16, max_rows=256, max_tokens=3000)
    known = set(launched)
    bench = Bench(torch.device("cpu"), torch.bfloat16)
    for tokens in (520, 630, 2100, 3000):
        model.forward(torch.zeros(tokens, dtype=torch.int32), bench.batch([(0, tokens)], num_blocks=200), kv)
    assert launched == known


def test_what_is_launched_while_compiling_is_only_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def run(self: object, *, grid: tuple[int], warmup: bool) -> None:
        asked.append(warmup)

    monkeypatch.setattr(JITFunction, "run", run)
    with _compiling(torch.device("cpu")):
        JITFunction.run(object(), grid=(1,), warmup=False)
    assert asked == [True]
    assert JITFunction.run is run


def test_what_is_compiled_is_loaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        is_loaded = False

        @property
        def run(self) -> None:
            self.is_loaded = True

    kernel = Kernel()
    submitted = threading.Event()

    def compile_kernel() -> Kernel:
        assert submitted.is_set()  # Compilers wait until everything is asked for.
        return kernel

    with _compiling(torch.device("cpu")):
        mode = active_mode.get()
        assert mode is not None
        mode.submit("key", compile_kernel, lambda _: None, lambda _: None)
        submitted.set()
    assert kernel.is_loaded


def test_the_log_names_kernels_that_requests_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, hook, None)
    clock = VirtualClock()
    report_compilations(clock)
    begin, end = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    for name, seconds, is_asked in (
        ("_slow", 0.5, False),
        ("_cached", 0.01, False),
        ("_of_an_adapter", 2.0, True),
    ):
        begin(key=name, is_manual_warmup=is_asked, repr="", fn=None)
        clock.advance(seconds)
        end(key=name, repr=f"{name}[num_warps=4](x: ())", fn=None, is_manual_warmup=is_asked)
    assert [each.getMessage() for each in caplog.records] == [
        "_slow was compiled while serving: its step waited for 0.50 s"
    ]
