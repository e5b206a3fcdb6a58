"""Compiles the kernels that the engine launches for GPUs that this machine does not have: `make compile-targets`.

    python -m tests.triton.compile_targets [--targets 80,86,gfx942] [--representative] [--jobs 2] [--record FILE]

The variants are those of the warm-up (`engine/warmup.py`), which asks for every kernel that serving meets, over
models whose weights have a shape and no memory. Triton takes the target from a driver that claims to have that GPU. A
variant fails if its compiler or assembler refuses it, or if it needs more shared memory than the target has. With
`--representative`, each kernel is compiled once, in its largest variant (but see `QUICKER`): every kernel for the
first target, and for other targets the kernels whose instructions differ from those of the first.

With `--record`, variants that a file names are not compiled again (tests/triton/compiled.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from torch import Tensor
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from penstock.engine.warmup import warm_up
from penstock.kernels.adapted import AdaptedProduct
from penstock.kernels.interface import DenseWeight, Float8Weight, GroupQuantWeight, WeightData
from penstock.kernels.triton import (
    decode_attention,
    experts,
    few_hopper,
    int4_tiles,
    prefill_attention,
    targets,
)
from penstock.kernels.triton import float8_blocks as block_products
from penstock.kernels.triton.expert_weights import ExpertStack, pack_matrix
from penstock.kernels.triton.ops import TritonOps
from penstock.models.load import load_model
from penstock.models.lora import adaptable_products
from penstock.models.model import layer_windows
from penstock.models.random_weights import RandomSource
from tests.engine.tiny import write_tiny_model
from tests.triton.compiled import Record

META = torch.device("meta")
TARGETS = ("80", "86", "89", "90", "100", "120", "gfx942")
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 1,
}  # fmt: skip
SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "vocab_size": 49152, "num_hidden_layers": 1, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2 = SMALL | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 1024,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
    "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 512, "num_hidden_layers": 7, "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 1,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip

FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 3072,
    "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
    "num_hidden_layers": 1,
}  # fmt: skip
QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 2560, "state_size": 16,
    "num_hidden_layers": 1,
}  # fmt: skip
QWEN3_NEXT = {  # a shared expert's gate has a single output
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 2, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
}  # fmt: skip
LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 2, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192,
}  # fmt: skip


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def dense(rows: int, columns: int) -> WeightData:
    return DenseWeight(_empty(rows, columns))


def grouped(bits: int, group: int, *, offsets: bool) -> Callable[[int, int], WeightData]:
    def matrix(rows: int, columns: int) -> WeightData:
        if columns % group:
            return dense(rows, columns)
        codes = _empty(rows, columns, dtype=torch.uint8 if bits == 4 else torch.int8)
        scales = _empty(rows, columns // group)
        return GroupQuantWeight(codes, scales, scales if offsets else None, group, 4 if bits == 4 else 8)

    return matrix


def float8(rows: int, columns: int) -> WeightData:
    return Float8Weight(_empty(rows, columns, dtype=torch.float8_e4m3fn), _empty(rows))


def float8_blocks(rows: int, columns: int) -> WeightData:
    if columns % 128:
        return dense(rows, columns)
    values = _empty(rows, columns, dtype=torch.float8_e4m3fn)
    return Float8Weight(values, _empty(rows, columns // 128), 128)


def float4(rows: int, columns: int) -> WeightData:
    if columns % 32:
        return dense(rows, columns)
    codes = _empty(rows, columns, dtype=torch.int8)
    return GroupQuantWeight(codes, _empty(rows, columns // 32), None, 32, 8, is_float4=True)


def rounding_int8(rows: int, columns: int) -> WeightData:
    codes = _empty(rows, columns, dtype=torch.int8)
    return GroupQuantWeight(codes, _empty(rows, 1), None, columns, 8, rounds_inputs=True)


@dataclass(frozen=True)
class Case:
    """A model, the form of its weights, and the types that it computes and caches in."""

    name: str
    settings: dict[str, Any]
    matrix: Callable[[int, int], WeightData] = dense
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None


CASES = (
    Case("8B", LLAMA_8B),
    Case("8B, float16", LLAMA_8B, dtype=torch.float16),
    Case("8B, float32", LLAMA_8B, dtype=torch.float32),
    Case("small", SMALL),
    Case("biases", QWEN2),
    Case("windows", GEMMA3),
    Case("windows, float32", GEMMA3, dtype=torch.float32),
    Case("experts", EXPERTS),
    Case("experts, float32", EXPERTS, dtype=torch.float32),
    Case("experts, fp8", EXPERTS, float8),
    Case("experts, fp8 blocks", EXPERTS, float8_blocks),
    Case("experts, fp8, float32", EXPERTS, float8, torch.float32),
    Case("experts, int8", EXPERTS, grouped(8, 32, offsets=False)),
    Case("experts, Q6_K", EXPERTS, grouped(8, 16, offsets=False)),
    Case("experts, int4", EXPERTS, grouped(4, 128, offsets=True)),
    Case("experts, Q4_K, float16", EXPERTS, grouped(4, 32, offsets=True), torch.float16),
    Case("gpt-oss", GPT_OSS),  # sinks, and experts with biases
    Case("gpt-oss, MXFP4", GPT_OSS, float4),
    Case("latents", LATENTS),
    Case("latents, float32", LATENTS, dtype=torch.float32),
    Case("fp8", LLAMA_8B, float8),
    Case("fp8, float32", SMALL, float8, torch.float32),
    Case("fp8 blocks", LLAMA_8B, float8_blocks),
    Case("int8 inputs", LLAMA_8B, rounding_int8),
    Case("int8", LLAMA_8B, grouped(8, 32, offsets=False)),
    Case("Q5_K", SMALL, grouped(8, 32, offsets=True)),
    Case("Q6_K", LLAMA_8B, grouped(8, 16, offsets=False)),
    Case("Q8_0, float32", SMALL, grouped(8, 32, offsets=False), torch.float32),
    Case("int4", LLAMA_8B, grouped(4, 128, offsets=True)),
    Case("Q4_K", LLAMA_8B, grouped(4, 32, offsets=True)),
    Case("Q4_K, float16", SMALL, grouped(4, 32, offsets=True), torch.float16),
    Case("Q4_K, float32", SMALL, grouped(4, 32, offsets=True), torch.float32),
    Case("int4, float32", LLAMA_8B, grouped(4, 128, offsets=True), torch.float32),
    Case("scans", FALCON_H1),
    Case("scans, float32", FALCON_H1, dtype=torch.float32),
    Case("channel scans", MAMBA),
    Case("channel scans, float32", MAMBA, dtype=torch.float32),
    Case("delta rules", QWEN35),
    Case("delta rules, float32", QWEN35, dtype=torch.float32),
    Case("many experts", QWEN3_NEXT),
    Case("many experts, fp8", QWEN3_NEXT, float8),
    Case("short convolutions", LFM2),
    Case("heads of 512", SMALL | {"head_dim": 512, "num_attention_heads": 8, "num_key_value_heads": 2}),
    Case("KV int8", LLAMA_8B, kv_dtype=torch.int8),
    Case("KV int8, windows", GEMMA3, kv_dtype=torch.int8),
    Case("KV fp8", LLAMA_8B, kv_dtype=torch.float8_e4m3fn),
    Case("KV fp8, float32", SMALL, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn),
)


# In the source of kernels whose instructions differ between families. (`overlaps` is in every kernel.)
FAMILY_CODE = ("converts_float8", "has_ptx", "gl.warp_specialize")
# These multiply matrices with instructions of their own. The others have those of the first target, `mma.sync`, for
# which a product of 16 bits is lowered as there; PTX that is right for an older GPU is right for a newer one.
OWN_PRODUCTS = ("90", "100", "gfx942")
# Constants with which a representative compiles in a fifth of the time. Where `mma.sync` multiplies, products of 32
# rows have the instructions of products of 64. Hopper's representative has 64.
QUICKER = {"segments.solve_kernel": {"SEGMENT": 32}}
# These meet every kernel.
REPRESENTATIVE = (
    "experts", "experts, fp8", "gpt-oss, MXFP4", "latents", "fp8", "fp8 blocks", "int8 inputs", "int4", "scans",
    "channel scans", "delta rules",
)  # fmt: skip


class NamedDriver:
    """What Triton asks of a driver before a kernel runs."""

    def __init__(self, name: str) -> None:
        is_amd = name.startswith("gfx")
        self.target = GPUTarget("hip", name, 64) if is_amd else GPUTarget("cuda", int(name), 32)
        self._device = TARGETS.index(name) if name in TARGETS else len(TARGETS)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self._device  # Triton keeps the kernels of devices apart.

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Variant:
    """A launch: a kernel is compiled for the types of arguments and for constants."""

    case: str
    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__.strip('_')}"

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(str(getattr(each, "dtype", type(each).__name__)) for each in self.arguments)

    @property
    def has_one_output(self) -> bool:
        """Triton makes a constant of an argument that is 1, and a constant is no tensor."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)).get("N") == 1

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.types, self.has_one_output, tuple(sorted(self.options.items()))

    @property
    def size(self) -> int:
        """About what a program holds: the product of its constants."""
        return prod(max(1, value) for value in self.options.values() if type(value) is int)


@contextlib.contextmanager
def on(name: str) -> Iterator[None]:
    driver.set_active(NamedDriver(name))
    targets.current.cache_clear()
    try:
        yield
    finally:
        targets.current.cache_clear()


def packing_once() -> Callable[..., ExpertStack]:
    """`pack_matrix`, which packs the same matrices once: all experts of a model have the same shapes."""
    packed: dict[tuple[int, ...], tuple[Sequence[WeightData], ExpertStack]] = {}  # with what the keys name

    def pack(
        parts: Sequence[WeightData], dtype: torch.dtype, device: torch.device, row_order: Tensor | None = None
    ) -> ExpertStack:
        if row_order is not None:
            return pack_matrix(parts, dtype, device, row_order)
        key = tuple(map(id, parts))
        if key not in packed:
            packed[key] = parts, pack_matrix(parts, dtype, device)
        return packed[key][1]

    return pack


def variants(case: Case) -> list[Variant]:
    """The launches of a warm-up on the target that is set, each once."""
    found: dict[tuple[Any, ...], Variant] = {}
    matrix_of = cache(case.matrix)

    def record(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        variant = Variant(case.name, self, args, options)
        found.setdefault(variant.key, variant)

    def matrix(self: object, name: str, rows: int, columns: int, part: object = None) -> WeightData:
        return matrix_of(rows, columns)

    with (
        patch.object(JITFunction, "run", record),
        patch.object(decode_attention, "num_processors", lambda index: 132),  # enough to split contexts over
        patch.object(prefill_attention, "num_processors", lambda index: 132),
        patch.object(few_hopper, "num_processors", lambda index: 132),
        patch.object(int4_tiles, "num_processors", lambda index: 132),
        patch.object(block_products, "num_processors", lambda index: 132),
        patch.object(experts, "pack_matrix", packing_once()),
        patch.object(RandomSource, "matrix", matrix),
        patch.object(RandomSource, "_normal", lambda self, name, *shape: _empty(*shape)),
        tempfile.TemporaryDirectory() as folder,
    ):
        ops = TritonOps(META, case.dtype, case.kv_dtype)
        model = load_model(write_tiny_model(Path(folder), **case.settings), ops, load_format="random")
        warm_up(
            model,
            ops,
            block_size=16,
            max_rows=256,
            max_tokens=8192,
            verifies=True,
            verifies_trees=not any(layer_windows(model)),
        )
        if case.matrix is dense and case.kv_dtype is None:
            adapted = adaptable_products(model.products)
            adapters = ops.batched_adapters(
                [AdaptedProduct(each.packed, each.rows, each.columns) for each in adapted], num_slots=8
            )
            for rank in (16, 64, 256):
                adapters.compile(dict.fromkeys(range(len(adapted)), rank))
    return list(found.values())


def compile_variant(target: str, variant: Variant) -> str | None:
    """Compile for the target that is set, unless a record says that it compiles. Returns what is wrong with the
    result."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            made = variant.kernel.run(*variant.arguments, grid=(1,), warmup=True, **variant.options)
    except Exception as error:
        lines = [line for line in f"{error}\n{said.getvalue()}".splitlines() if "rror" in line]
        return f"{type(error).__name__}: {' / '.join(lines[:3]) or error}"
    if made is None:
        return None  # recorded
    limit = targets.current().shared_bytes
    return (
        None
        if made.metadata.shared <= limit
        else f"{made.metadata.shared} bytes of shared memory, not {limit}"
    )


def differs(kernel: JITFunction[Any], target: str) -> bool:
    """Whether a kernel, or a function that it calls, has code that is not compiled as for the first target."""
    words = (*FAMILY_CODE, "tl.dot") if target in OWN_PRODUCTS else FAMILY_CODE
    if any(word in kernel.src for word in words):
        return True
    known = kernel.fn.__globals__.items()
    return any(
        isinstance(each, JITFunction)
        and each is not kernel
        and f"{name}(" in kernel.src
        and differs(each, target)
        for name, each in known
    )


def takes_float8(variant: Variant) -> bool:
    return "float8" in variant.name or any("float8" in each for each in variant.types)


def quicker(variant: Variant) -> Variant:
    return replace(variant, options=variant.options | QUICKER.get(variant.name, {}))


def chosen(found: list[Variant], representative: bool) -> list[Variant]:
    if not representative:
        return list({variant.key: variant for variant in found}.values())
    # Of each kernel the largest variant, in bfloat16 where there is one: float32 takes several times as long.
    largest: dict[tuple[str, bool], Variant] = {}
    for variant in sorted(found, key=lambda each: ("bfloat16" in str(each.types), each.size)):
        largest[variant.name, variant.has_one_output] = variant
    return list(largest.values())


def check(
    target: str, representative: bool, has_all: bool = True, record_path: Path | None = None
) -> dict[str, Any]:
    started = time.monotonic()
    problems: list[str] = []
    record = Record.read(record_path)
    with on(target), record.in_use():
        family = targets.current()
        cases = [
            case
            for case in CASES
            if (family.has_float8 or case.kv_dtype != torch.float8_e4m3fn)
            and (not representative or case.name in REPRESENTATIVE)
            # Elsewhere it differs by the widening of float8 alone, in the kernel that compiles longest.
            and (family.has_float8 or not representative or case.name != "experts, fp8")
        ]
        asked = chosen([variant for case in cases for variant in variants(case)], representative)
        if representative and target not in OWN_PRODUCTS:
            asked = list(map(quicker, asked))
        if not has_all:
            asked = [each for each in asked if differs(each.kernel, target) or takes_float8(each)]
        enumerated = time.monotonic()
        for variant in asked:
            problem = compile_variant(target, variant)
            if problem:
                constants = {name: value for name, value in variant.options.items() if value is not False}
                problems.append(f"{target} {variant.name} ({variant.case}; {constants}): {problem}")
    kernels = sorted({variant.name for variant in asked})
    return {
        "target": target,
        "variants": len(asked),
        "kernels": kernels,
        "problems": problems,
        "recorded": sorted(record.asked),
        "compiled": sorted(record.added),
        "enumerated_s": round(enumerated - started, 1),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--representative", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=Path, help="a file of variants that compile")
    parser.add_argument("--write", action="store_true", help="bring the record up to date")
    arguments = parser.parse_args()
    names = arguments.targets.split(",")
    has_all = [not arguments.representative or name == names[0] for name in names]
    read = [arguments.record] * len(names)
    work = (check, names, [arguments.representative] * len(names), has_all, read)
    if arguments.jobs == 1:
        reports = list(map(*work))
    else:
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            reports = list(pool.map(*work))
    if arguments.write and not any(report["problems"] for report in reports):
        Record({line for report in reports for line in report["recorded"]}).write(arguments.record)
    for report in reports:
        print(json.dumps(report))
    return 1 if any(report["problems"] for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
