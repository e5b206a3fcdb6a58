"""`penstock bench gpu`: measure an engine and a server with random weights, and a peer beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from penstock.bench.load import IntRange
from penstock.cli.commands import PenstockCommand
from penstock.cli.console import spinner, stderr_console, stdout_console
from penstock.core.engine_config import (
    CacheConfig,
    Device,
    EngineConfig,
    ModelConfig,
    ModelImplementation,
    Quantization,
    SchedulerConfig,
)
from penstock.core.errors import EngineUnavailable, UsageError

if TYPE_CHECKING:
    from penstock.bench.gpu import Figure
    from penstock.bench.load import Target
    from penstock.engine.offline import OfflineEngine

KVType = Literal["auto", "fp8", "int8"]
Found = Callable[[Sequence["Figure"]], None]
PARTS = ("decode", "prefill", "offline", "served")
_OFFLINE_CONTEXT = 4096
_SERVED_CONTEXT = 20_000
_BATCHED_TOKENS = 8192
_ITL_TARGET_MS = 30.0
_START_TIMEOUT_S = 600.0
_PORT = 8801
_WARM_UPS, _SHORT_ROUNDS = 2, 5  # rounds of prefills, before and in a measurement


@click.command("gpu", cls=PenstockCommand, short_help="Measure a model shape on this GPU.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS),
              help="Part to measure; may be given several times. Default: all.")  # fmt: skip
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1),
              help="Size of decode batches; may be given several times. Default: 1, 8, 32, 128, 256.")  # fmt: skip
@click.option("--load", "loads", multiple=True, metavar="TEXT",
              help="Run only the served loads whose names contain TEXT; may be given several times.")  # fmt: skip
@click.option("--peer", metavar="[NAME=]URL",
              help="Another OpenAI-compatible server on this machine, measured with the same loads.")  # fmt: skip
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), default=_BATCHED_TOKENS, show_default=True,
              help="Most tokens in one step.")  # fmt: skip
@click.option(
    "--quantization", type=click.Choice(("int8", "int4", "fp8")), help="Quantize the weights while loading."
)
@click.option("--kv-cache-dtype", type=click.Choice(("auto", "fp8", "int8")), default="auto", show_default=True,
              help="Type of cached keys and values.")  # fmt: skip
@click.option("--model-implementation", "implementation", type=click.Choice(("auto", "native", "transformers")),
              default="auto", show_default=True,
              help="Code that runs the model: Penstock's own, or the code of transformers.")  # fmt: skip
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda")), default="auto", show_default=True,
              help="Where to run.")  # fmt: skip
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write figures here."
)
def bench_gpu(
    folder: Path,
    parts: tuple[str, ...],
    batches: tuple[int, ...],
    loads: tuple[str, ...],
    peer: str | None,
    max_num_batched_tokens: int,
    quantization: Quantization | None,
    kv_cache_dtype: KVType,
    implementation: ModelImplementation,
    device: Device,
    json_file: Path | None,
) -> None:
    """Measure a model shape: FOLDER needs only a config.json, and the weights are random.

    With --peer, the peer gets each served load right after Penstock's server, and the table says how many times
    better Penstock is. Give each server its share of the GPU's memory.

    \b
      penstock bench gpu models/llama-8b --part decode --part offline
      penstock bench gpu models/llama-8b --part served --peer vllm=http://127.0.0.1:8000
    """
    config = EngineConfig(
        model=ModelConfig(
            model=str(folder),
            load_format="random",
            device=device,
            quantization=quantization,
            max_model_len=_OFFLINE_CONTEXT,
            model_implementation=implementation,
        ),
        cache=CacheConfig(kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, itl_target_ms=None),
    )
    chosen = parts or PARTS
    if (loads or peer) and "served" not in chosen:
        raise UsageError("--load and --peer need the served loads.", hint="Add --part served.")
    vocabulary = read_vocabulary(folder)
    check_loads(loads, vocabulary)
    figures: list[Figure] = []

    def found(more: Sequence[Figure]) -> None:
        """Show and store figures at once, because all parts take minutes and the user may end the command."""
        figures.extend(more)
        for figure in more:
            stderr_console().print(f"{figure.what}: {_shown(figure.value)}", highlight=False)
        if json_file:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))

    if "served" in chosen:  # first, because an engine in this process does not free all of the GPU's memory
        _measure_server(config, folder, loads, vocabulary, peer, found)
    if set(chosen) - {"served"}:
        # Random weights repeat themselves, so drafts would be accepted more often than those of a real model.
        scheduler = msgspec.structs.replace(config.scheduler, max_draft_tokens=0)
        config = msgspec.structs.replace(config, scheduler=scheduler)
        _measure_engine(config, folder, chosen, batches, vocabulary, found)
    _print(folder.name, figures, peer_name(peer) if peer else None)


def check_loads(loads: Sequence[str], vocabulary: IntRange) -> None:
    from penstock.bench.gpu import served_workloads

    names = served_workloads(vocabulary)
    for part in loads:
        if not any(part in name for name in names):
            raise UsageError(f"No served load is called '{part}'.", hint=f"There are: {'; '.join(names)}.")


def read_vocabulary(folder: Path) -> IntRange:
    """Return the token ids that prompts are drawn from, for the model that the folder's config.json describes."""
    try:
        last = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]) - 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}/config.json does not describe a model: {error}.") from error
    return IntRange(min(1000, last), min(39_999, last))


def peer_name(peer: str) -> str:
    name, _, url = peer.rpartition("=")
    return name or url


def _measure_engine(
    config: EngineConfig,
    folder: Path,
    parts: Sequence[str],
    batches: Sequence[int],
    vocabulary: IntRange,
    found: Found,
) -> None:
    from penstock.bench.gpu import DECODE_BATCHES, PREFILL_COUNTS, Figure, decode_step_ms
    from penstock.core.clock import SystemClock
    from penstock.core.request import SamplingParams

    clock = SystemClock()
    started_s = clock.now()
    with spinner(f"Loading {folder.name}"):
        from penstock.engine.offline import OfflineEngine

        engine = OfflineEngine(config, folder)
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    start_s = clock.now() - started_s
    found([Figure(what="load to first token, s", value=start_s)])
    try:
        for batch in batches or DECODE_BATCHES if "decode" in parts else ():
            with spinner(f"Decoding, batch {batch}"):
                decode_step_ms(engine.loop, batch, vocabulary, 2 * batch, clock)
                taken_ms = decode_step_ms(engine.loop, batch, vocabulary, 2 * batch + 1, clock)
            found([Figure(what=f"decode, batch {batch}, ms", value=taken_ms)])
        for count in PREFILL_COUNTS if "prefill" in parts else ():
            with spinner(f"Prefilling {count} prompts"):
                taken_ms = _prefill(engine, count, vocabulary)
            found([Figure(what=f"prefill {count} × 512 tokens, ms", value=taken_ms)])
        if "offline" in parts:
            with spinner("Answering 256 prompts"):
                rate = _offline(engine, vocabulary)
            found([Figure(what="offline, output tokens/s", value=rate, more_is_better=True)])
    finally:
        engine.close()


def _prefill(engine: OfflineEngine, count: int, vocabulary: IntRange) -> float:
    from penstock.bench.gpu import prefill_ms
    from penstock.core.clock import SystemClock
    from penstock.core.request import SamplingParams

    def first_tokens(prompts: Sequence[Sequence[int]]) -> None:
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))

    def measured(round_: int) -> float:
        return prefill_ms(first_tokens, count, vocabulary, -count - 1000 * round_, SystemClock())

    for round_ in range(_WARM_UPS):  # a CUDA graph of a size is recorded when the size occurs again
        measured(round_)
    rounds = range(_WARM_UPS, _WARM_UPS + (_SHORT_ROUNDS if count == 1 else 1))
    return statistics.median(measured(round_) for round_ in rounds)


def _offline(engine: OfflineEngine, vocabulary: IntRange) -> float:
    from dataclasses import replace

    from penstock.bench.gpu import OFFLINE_WORKLOAD
    from penstock.bench.load import measure_offline
    from penstock.core.clock import SystemClock
    from penstock.core.request import SamplingParams

    def generate(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[int]:
        return [len(completion.token_ids) for completion in engine.generate(prompts, sampling)]

    rates = [
        measure_offline(
            engine.card.name,
            replace(OFFLINE_WORKLOAD, vocabulary=vocabulary, seed=seed).prompts(),
            0.6,
            generate,
            SystemClock(),
        ).output_tokens_per_s
        for seed in (1, 0)  # the first round warms up every batch size
    ]
    return rates[-1]


def _measure_server(
    config: EngineConfig,
    folder: Path,
    loads: Sequence[str],
    vocabulary: IntRange,
    peer: str | None,
    found: Found,
) -> None:
    started_s = time.monotonic()
    with _server(config, folder) as (process, url):
        with spinner("Starting the server"):
            wait_until_ready(process, url)
        asyncio.run(_load(url, loads, vocabulary, peer, started_s, found))


async def _load(
    url: str, loads: Sequence[str], vocabulary: IntRange, peer: str | None, started_s: float, found: Found
) -> None:
    from dataclasses import replace

    from penstock.bench.gpu import Figure, measure_served, served_figures, served_workloads
    from penstock.bench.load import find_target, run_load

    target = await find_target("penstock", url, None, None)
    other: Target | None = None
    if peer is not None:
        other = await find_target(peer_name(peer), peer.rpartition("=")[2], None, None)
    workloads = served_workloads(vocabulary)
    await run_load(target, replace(workloads["1 stream"].warm_up(1), output_len=IntRange(1, 1)))
    start_s = time.monotonic() - started_s
    found([Figure(what="serve to first token, s", value=start_s)])
    for name, workload in workloads.items():
        if loads and not any(part in name for part in loads):
            continue
        with spinner(f"Serving {name}"):
            summary = await measure_served(target, name, workload)
            theirs = await measure_served(other, name, workload) if other is not None else None
        found(served_figures(name, summary, theirs))


@contextlib.contextmanager
def _server(config: EngineConfig, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    model = config.model
    command = [sys.executable, "-m", "penstock.main", "serve", str(folder), "--load-format", "random"]
    command += ["--device", model.device, "--port", str(_PORT), "--max-model-len", str(_SERVED_CONTEXT)]
    command += ["--max-num-batched-tokens", str(config.scheduler.max_num_batched_tokens)]
    command += ["--itl-target-ms", str(_ITL_TARGET_MS)]
    command += ["--kv-cache-dtype", config.cache.kv_cache_dtype]
    command += ["--model-implementation", model.model_implementation]
    if model.quantization is not None:
        command += ["--quantization", model.quantization]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{_PORT}"
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, path: str = "/ready") -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise EngineUnavailable("The server did not start; its error is above.")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}{path}", timeout=1).close()
            return
        time.sleep(0.05)
    raise EngineUnavailable(f"The server was not ready after {_START_TIMEOUT_S:.0f} s.")


def _print(name: str, figures: Sequence[Figure], peer: str | None) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption_justify="left")
    table.add_column(name)
    for heading in ("Penstock", *((peer, "times better") if peer else ())):
        table.add_column(heading, justify="right")
    for figure in figures:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} ×"
        table.add_row(figure.what, _shown(figure.value), *((_shown(figure.peer), ratio) if peer else ()))
    stdout_console().print(table)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
