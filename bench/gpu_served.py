#!/usr/bin/env python3
"""The served workloads of one GPU, with random weights: start the server, load it over HTTP, print the table.

    python bench/gpu_served.py FOLDER_WITH_CONFIG [--itl-target-ms 30] [--port 8001]

512 tokens in and 128 out unless the row says otherwise. In the last row 32 streams of 128 in and 512 out run while
two clients send prompts of 16,000 tokens, one after the other, for 128 tokens each. vLLM's figures are those of
Llama-3.1-8B on an H200 (vLLM 0.26).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from penstock.bench.load import LoadResult, Target, find_target, run_load
from penstock.bench.summary import Summary, summarize
from penstock.bench.workload import ClosedLoop, IntRange, Workload

START_TIMEOUT_S = 300.0
LONG_PROMPTS = Workload(
    arrivals=ClosedLoop(2),
    num_requests=60,
    input_len=IntRange(16_000, 16_000),
    output_len=IntRange(128, 128),
)
VLLM = {  # output tokens/s, TTFT p50 ms, ITL p50 ms, ITL p99 ms
    "1 stream": (197, 21, 4.9, 13),
    "32 streams": (3522, 349, 5.8, 27),
    "128 streams": (5980, 871, 8.6, 191),
    "256 streams": (6017, 1766, 16.7, 206),
    "64 streams, 2,048 shared": (5145, 316, 7.9, 30),
    "32 streams beside 16,000-token prompts": (2813, 140, 5.6, 277),
}


def streams(count: int, num_requests: int, seed: int) -> Workload:
    return Workload(
        arrivals=ClosedLoop(count),
        num_requests=num_requests,
        input_len=IntRange(512, 512),
        output_len=IntRange(128, 128),
        seed=seed,
    )


def workloads() -> dict[str, Workload]:
    shared = Workload(
        arrivals=ClosedLoop(64),
        num_requests=256,
        shared_prefix_len=2048,
        input_len=IntRange(64, 64),
        output_len=IntRange(64, 64),
        seed=5,
    )
    beside = Workload(
        arrivals=ClosedLoop(32),
        num_requests=96,
        input_len=IntRange(128, 128),
        output_len=IntRange(512, 512),
        seed=6,
    )
    loads = [
        streams(1, 4, 1),
        streams(32, 128, 2),
        streams(128, 512, 3),
        streams(256, 1024, 4),
        shared,
        beside,
    ]
    return dict(zip(VLLM, loads, strict=True))


@contextlib.contextmanager
def server(folder: Path, port: int, itl_target_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "penstock.main", "serve", str(folder), "--load-format", "random"]
    command += ["--device", "cuda", "--served-model-name", folder.name, "--port", str(port)]
    command += ["--max-model-len", "20000", "--max-num-batched-tokens", "8192"]
    command += ["--itl-target-ms", str(itl_target_ms)]
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=1).close()
            return
        time.sleep(0.05)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


async def measure(target: Target, name: str, workload: Workload) -> Summary:
    # A first round of the same shape: CUDA graphs are captured when a batch size is first met.
    await run_load(target, workload.warm_up(2 * _clients(workload)))
    if "beside" not in name:
        return summarize(target, workload, await run_load(target, workload))
    long_prompts = asyncio.create_task(run_load(target, LONG_PROMPTS))
    await asyncio.sleep(1.0)
    result: LoadResult = await run_load(target, workload)
    long_prompts.cancel()
    return summarize(target, workload, result)


def _clients(workload: Workload) -> int:
    assert isinstance(workload.arrivals, ClosedLoop)
    return workload.arrivals.concurrency


async def measure_all(url: str, started_s: float, only: list[str]) -> None:
    target = await find_target("penstock", url, None, None)
    await run_load(target, streams(1, 1, 77))
    print(f"start to first answer: {time.monotonic() - started_s:.1f} s (vLLM: 83 s)", flush=True)
    lines = ["| load | out tok/s | vLLM | ratio | TTFT p50 ms | vLLM | ITL p50 / p99 ms | vLLM |"]
    lines.append("|" + "---|" * 8)
    for name, workload in workloads().items():
        if only and not any(part in name for part in only):
            continue
        summary = await measure(target, name, workload)
        rate, first_ms, middle_ms, late_ms = VLLM[name]
        ttft, itl = summary.ttft_ms, summary.itl_ms
        assert ttft is not None
        assert itl is not None
        ours = summary.output_tokens_per_s
        lines.append(
            f"| {name} | {ours:,.0f} | {rate:,} | {ours / rate:.2f} × | {ttft.p50:,.0f} | {first_ms:,} | "
            f"{itl.p50:.1f} / {itl.p99:.0f} | {middle_ms} / {late_ms} |"
        )
        print(lines[-1], flush=True)
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--itl-target-ms", type=float, default=30.0)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names hold one of these words")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    with server(arguments.folder, arguments.port, arguments.itl_target_ms) as url:
        wait_until_ready(url)
        asyncio.run(measure_all(url, started_s, arguments.only))


if __name__ == "__main__":
    main()
