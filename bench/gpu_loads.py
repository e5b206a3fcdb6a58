#!/usr/bin/env python3
"""Servers of one model shape under the loads of a GPU: Penstock, and vLLM one after the other on the same GPU.

    python -m bench.gpu_loads FOLDER [--vllm-python PATH] [--load TEXT ...] [FLAGS OF `penstock serve`]

FOLDER needs only a config.json: weights are random. A regular expression needs a tokenizer.json too, and is left out
without one. PATH is the Python that vLLM is installed for. Both servers have their default flags and a context of
32,768 tokens; each load is sent twice, and the second time counts. Prints a line for each load as soon as it is
measured, and a table at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.bench.load import ClosedLoop, IntRange, PoissonArrivals, Workload, find_target, run_load
from penstock.bench.summary import Summary, summarize
from penstock.cli.bench_gpu import read_vocabulary, wait_until_ready

PORT = 8802
CONTEXT = 32_768
PLAIN_TEXT = {"structured_outputs": {"regex": "[a-z ]{4000}"}}


def streams(count: int, num_requests: int, tokens_in: int, tokens_out: int) -> Workload:
    return Workload(
        arrivals=ClosedLoop(count),
        num_requests=num_requests,
        input_len=IntRange(tokens_in, tokens_in),
        output_len=IntRange(tokens_out, tokens_out),
    )


LOADS: dict[str, Workload] = {
    "64 streams, 2,048 in, 256 out": streams(64, 192, 2048, 256),
    "128 streams, 64 in, 512 out": streams(128, 256, 64, 512),
    "16 streams, 8,192 in, 128 out": streams(16, 48, 8192, 128),
    "32 streams, 8,192 shared + 128 in, 128 out": replace(streams(32, 160, 128, 128), shared_prefix_len=8192),
    "20 requests/s, 100–2,000 in, 50–400 out": Workload(
        arrivals=PoissonArrivals(20.0),
        num_requests=300,
        input_len=IntRange(100, 2000),
        output_len=IntRange(50, 400),
    ),
    "128 streams, temperature 0.8, top-p 0.95": replace(
        streams(128, 384, 512, 128), fields={"temperature": 0.8, "top_p": 0.95}
    ),
    "16 streams, 16,000 in, 256 out": streams(16, 32, 16_000, 256),
    "64 streams, a regular expression": replace(streams(64, 128, 128, 128), fields=PLAIN_TEXT),
    "256 streams, 128 in, 256 out": streams(256, 768, 128, 256),
    "64 streams, 128 in, 256 out": streams(64, 256, 128, 256),
    "1 stream, 128 in, 256 out": streams(1, 4, 128, 256),
}


@contextlib.contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[str]:
    """Start a server, and wait until it answers at the path `ready`. Yields its address."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{PORT}", ready)
        yield f"http://127.0.0.1:{PORT}"
    finally:
        process.terminate()
        process.wait()


async def measure(name: str, url: str, loads: dict[str, Workload]) -> dict[str, Summary]:
    target = await find_target(name, url, None, None)
    found = {}
    for load, workload in loads.items():
        await run_load(target, workload.warm_up(workload.num_requests // 2 or 1))
        found[load] = summarize(target, workload, await run_load(target, workload))
        print(f"{name}: {load}: {line(found[load])}", flush=True)
    return found


def line(summary: Summary) -> str:
    times = [
        f"{label} {each.p50:.0f} / {each.p99:.0f} ms"
        for label, each in (("first token", summary.ttft_ms), ("between tokens", summary.itl_ms))
        if each
    ]
    failed = f", {summary.num_errors} failed" if summary.num_errors else ""
    return ", ".join((f"{summary.output_tokens_per_s or 0:,.0f} tok/s", *times)) + failed


def table(ours: dict[str, Summary], theirs: dict[str, Summary]) -> Iterator[str]:
    yield (
        "| load | "
        + ("vLLM tok/s | " if theirs else "")
        + "Penstock tok/s | "
        + ("ratio | ITL p99 ms, vLLM / Penstock |" if theirs else "TTFT p50 ms | ITL p99 ms |")
    )
    yield "|---" * (5 if theirs else 4) + "|"
    for load, summary in ours.items():
        rate, peer = summary.output_tokens_per_s or 0.0, theirs.get(load)
        itl = f"{summary.itl_ms.p99:.0f}" if summary.itl_ms else "–"
        if peer is None:
            ttft = f"{summary.ttft_ms.p50:.0f}" if summary.ttft_ms else "–"
            yield f"| {load} | {rate:,.0f} | {ttft} | {itl} |"
        else:
            their_rate = peer.output_tokens_per_s or 0.0
            ratio = f"{rate / their_rate:.2f}" if their_rate else "–"
            their_itl = f"{peer.itl_ms.p99:.0f}" if peer.itl_ms else "–"
            yield f"| {load} | {their_rate:,.0f} | {rate:,.0f} | {ratio} | {their_itl} / {itl} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm-python", type=Path, help="the Python that vLLM is installed for")
    parser.add_argument("--load", action="append", help="only loads whose names contain this")
    arguments, flags = parser.parse_known_args()
    folder: Path = arguments.folder
    vocabulary = read_vocabulary(folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    loads = {
        name: replace(workload, vocabulary=vocabulary)
        for name, workload in LOADS.items()
        if (not arguments.load or any(part in name for part in arguments.load))
        and (has_tokenizer or "structured_outputs" not in workload.fields)
    }
    common = ["--port", str(PORT), "--max-model-len", str(CONTEXT)]
    ours = [sys.executable, "-m", "penstock.main", "serve", str(folder), "--load-format", "random"]
    with running([*ours, *common, *flags], "/ready") as url:
        figures = asyncio.run(measure("Penstock", url, loads))
    theirs: dict[str, Summary] = {}
    if arguments.vllm_python:
        peer = [str(arguments.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
        peer += ["--model", str(folder), "--load-format", "dummy"]
        peer += [] if has_tokenizer else ["--skip-tokenizer-init"]
        with running([*peer, *common], "/health") as url:
            theirs = asyncio.run(measure("vLLM", url, loads))
    print("\n".join(("", *table(figures, theirs))))


if __name__ == "__main__":
    main()
