#!/usr/bin/env python3
"""Offline throughput, decode and prefill times on one GPU, with random weights from a config.json alone.

    python bench/gpu.py FOLDER_WITH_CONFIG [...] [--offline] [--decode 1,32,256] [--prefill]

The offline workload: 256 prompts of 100–1024 tokens in and 100–1024 out, uniform, random.Random(0), temperature 0.6,
ignore_eos. Decode: milliseconds per step at 512 tokens of context and more.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from penstock.core.request import Request, SamplingParams
from penstock.engine.offline import OfflineEngine

KVType = Literal["auto", "fp8"]
DECODE_STEPS = 64
# vLLM 0.26 on one H200, bf16, random weights: tokens per second, or milliseconds.
VLLM: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "offline": 21_803,
        "decode": {1: 1.99, 8: 2.21, 32: 2.54, 128: 5.69, 256: 7.65},
        "prefill": {1: 15.2, 256: 356},
    },
    "llama-8b": {
        "offline": 9_782,
        "decode": {1: 4.97, 8: 5.18, 32: 5.92, 128: 8.80, 256: 14.08},
        "prefill": {1: 16.5, 256: 3_086},
    },
    "qwen3-30b-a3b": {
        "offline": 6_053,
        "decode": {1: 4.14, 8: 9.43, 32: 16.35, 128: 19.87, 256: 23.62},
        "prefill": {1: 25.4, 256: 1_827},
    },
}


def build(
    folder: Path, max_tokens: int, quantization: Quantization | None = None, kv_cache_dtype: KVType = "auto"
) -> OfflineEngine:
    config = EngineConfig(
        model=ModelConfig(
            model=str(folder),
            load_format="random",
            device="cuda",
            max_model_len=4096,
            quantization=quantization,
        ),
        cache=CacheConfig(gpu_memory_utilization=0.9, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=max_tokens, itl_target_ms=None),
    )
    return OfflineEngine(config, folder)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def offline(engine: OfflineEngine, seed: int) -> float:
    """Output tokens per second. A new seed each time: nothing may come from the prefix cache."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(100, 1024)) for _ in range(256)]
    sampling = [
        SamplingParams(max_tokens=rng.randint(100, 1024), temperature=0.6, ignore_eos=True) for _ in prompts
    ]
    start = time.perf_counter()
    completions = engine.generate(prompts, sampling)
    elapsed = time.perf_counter() - start
    return sum(len(completion.token_ids) for completion in completions) / elapsed


def decode(engine: OfflineEngine, batch: int, seed: int) -> float:
    """Milliseconds per step."""
    loop = engine._engine.loop
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=DECODE_STEPS + 40, temperature=0.6, ignore_eos=True)
    for index in range(batch):
        loop.add(
            Request(id=f"{seed}-{index}", prompt_token_ids=tuple(random_prompt(rng, 512)), sampling=sampling)
        )
    counts: dict[str, int] = {}
    while min(counts.values(), default=0) < 8 or len(counts) < batch:
        for event in loop.step():
            counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps = 0
    while steps < DECODE_STEPS and loop.stats().num_running == batch:
        loop.step()
        steps += 1
    elapsed = time.perf_counter() - start
    for index in range(batch):
        loop.abort(f"{seed}-{index}")
    while loop.has_work:
        loop.step()
    return elapsed / steps * 1000


def prefill(engine: OfflineEngine, count: int, seed: int) -> float:
    """Milliseconds to the first token of all of `count` prompts of 512 tokens."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, 512) for _ in range(count)]
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
    return (time.perf_counter() - start) * 1000


def _row(model: str, what: str, ours: float, theirs: float | None, *, more_is_better: bool = False) -> str:
    figure = f"{ours:,.0f}" if ours >= 100 else f"{ours:.2f}"
    if theirs is None:
        return f"| {model} | {what} | {figure} | | |"
    ratio = ours / theirs if more_is_better else theirs / ours
    return f"| {model} | {what} | {figure} | {theirs:,} | {ratio:.2f} × |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--decode", default="1,8,32,128,256")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVType), default="auto")
    parser.add_argument("--profile", action="store_true", help="print where the time of decode steps goes")
    arguments = parser.parse_args()
    lines = ["| model | what | Penstock | vLLM 0.26 | ratio |", "|---|---|---|---|---|"]
    for folder in arguments.folders:
        peer = VLLM.get(folder.name, {})
        start = time.perf_counter()
        engine = build(
            folder, arguments.max_num_batched_tokens, arguments.quantization, arguments.kv_cache_dtype
        )
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        seconds = time.perf_counter() - start
        lines.append(f"| {folder.name} | load to first token, s | {seconds:.1f} | | |")
        for batch in [int(size) for size in arguments.decode.split(",") if size]:
            decode(engine, batch, 2 * batch)
            taken_ms = decode(engine, batch, 2 * batch + 1)
            theirs_ms = peer.get("decode", {}).get(batch)
            lines.append(_row(folder.name, f"decode, batch {batch}, ms", taken_ms, theirs_ms))
        if arguments.prefill:
            for count in (1, 256):
                prefill(engine, count, -count)
                taken_ms = prefill(engine, count, -count - 1000)
                theirs_ms = peer.get("prefill", {}).get(count)
                lines.append(_row(folder.name, f"prefill {count} × 512, ms", taken_ms, theirs_ms))
        if arguments.offline:
            offline(engine, seed=1)
            rate = offline(engine, seed=0)
            lines.append(_row(folder.name, "offline, tok/s", rate, peer.get("offline"), more_is_better=True))
        if arguments.profile:
            with torch.profiler.profile() as profile:
                decode(engine, 256, 99)
            print(
                profile.key_averages().table(
                    sort_by="cuda_time_total", row_limit=25, max_name_column_width=60
                )
            )
        engine.close()
        del engine
        torch.cuda.empty_cache()
        print("\n".join(lines), flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
