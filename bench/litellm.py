#!/usr/bin/env python3
"""Penstock's gateway beside LiteLLM's proxy, in one run: the gateway table of the README.

    python -m bench.litellm --litellm-python PATH [--rounds 3] [--seconds 4] [--json FILE]

PATH is the Python that `litellm[proxy]` is installed for. Each gateway is one process in front of something that
answers at once with 16 tokens: LiteLLM of a tiny HTTP server (`bench.instant_upstream`), with a master key and no
database; Penstock of its own engine process, which has no model but everything else of an engine, with keys from a
database, limits and the usage ledger on. The load comes from plain sockets of another process. Rounds alternate
between the servers, and the table shows medians. What a gateway adds is its latency less that of what it stands in
front of, measured in the same run: over HTTP to the upstream, over ZeroMQ to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.echo_server import cpu_s, echo_server, free_port, started
from bench.instant_upstream import NUM_TOKENS
from bench.sockets import HOST, Call, run
from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.supervisor import Supervisor
from penstock.core.engine_config import EngineConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from penstock.engine.echo import ECHO_MODEL

PATH = "/v1/chat/completions"
PROMPT = "Tell me something about rivers, please."
MASTER_KEY = "sk-bench"
NUM_CLIENTS = 32
WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load. `processes` are those whose processor time counts as the gateway's."""

    name: str
    port: int
    headers: dict[str, str]
    processes: tuple[psutil.Process, ...]

    def call(self, *, stream: bool) -> Call:
        chat = {
            "model": ECHO_MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": NUM_TOKENS,
            "stream": stream,
        }
        return Call.post(self.port, PATH, json.dumps(chat).encode(), self.headers)

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.processes))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server in one round, or medians over rounds."""

    one_client_p50_ms: float
    requests_per_s: float
    streams_per_s: float
    cpu_us_per_request: float
    cpu_us_per_stream: float


def measure(target: Target, seconds: float) -> Figures:
    one_client = run(target.call(stream=False), num_clients=1, seconds=seconds)
    whole, whole_cpu_us = _load(target, seconds, stream=False)
    streamed, streamed_cpu_us = _load(target, seconds, stream=True)
    return Figures(one_client.p50_ms, whole, streamed, whole_cpu_us, streamed_cpu_us)


def _load(target: Target, seconds: float, *, stream: bool) -> tuple[float, float]:
    """Requests per second of many clients, and what one costs the gateway."""
    before_s = target.cpu_s()
    load = run(target.call(stream=stream), num_clients=NUM_CLIENTS, seconds=seconds)
    return load.requests_per_s, 1e6 * (target.cpu_s() - before_s) / len(load.latencies_s)


@contextlib.contextmanager
def instant_upstream() -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "-m", "bench.instant_upstream", str(port)]
    with started(command, port, "/") as process:
        yield Target("upstream", port, {}, (process,))


@contextlib.contextmanager
def litellm(python: Path, upstream: Target) -> Iterator[Target]:
    port = free_port()
    config = {
        "model_list": [
            {
                "model_name": ECHO_MODEL,
                "litellm_params": {
                    "model": f"openai/{ECHO_MODEL}",
                    "api_base": f"http://{HOST}:{upstream.port}/v1",
                    "api_key": "none",
                },
            }
        ],
        "general_settings": {"master_key": MASTER_KEY},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(python.with_name("litellm")), "--config", str(path), "--port", str(port)]
        with started([*command, "--host", HOST], port, "/health/liveliness") as process:
            yield Target("LiteLLM", port, {"Authorization": f"Bearer {MASTER_KEY}"}, (process,))


def litellm_version(python: Path) -> str:
    program = "import importlib.metadata as m; print(m.version('litellm'))"
    shown = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True)
    return shown.stdout.strip()


@contextlib.contextmanager
def penstock() -> Iterator[Target]:
    with echo_server() as server:
        yield Target("Penstock", server.port, server.headers, (server.gateway,))


class DirectEngine:
    """The engine process that Penstock stands in front of, asked over ZeroMQ without a gateway."""

    def __init__(self) -> None:
        self._supervisor = Supervisor({"local": LocalLauncher(log_level="ERROR")})
        self._fleet = Fleet()
        self._supervisor.on_change.append(self._fleet.update)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def __enter__(self) -> DirectEngine:
        spec = ReplicaSpec(model=ECHO_MODEL, engine=EngineConfig(), model_path=ECHO_MODEL)
        self._runner.run(self._supervisor.launch(spec))
        self._runner.run(self._fleet.wait_ready())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._supervisor.close())
        self._fleet.close()
        self._runner.close()

    def p50_ms(self, seconds: float) -> float:
        return 1e3 * statistics.median(self._runner.run(self._ask(seconds)))

    async def _ask(self, seconds: float) -> list[float]:
        loop = asyncio.get_running_loop()
        latencies_s: list[float] = []
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at:
            is_over: asyncio.Future[None] = loop.create_future()
            asked_at = time.perf_counter()
            request = Request(
                id=f"direct-{asked_at}",
                prompt_token_ids=tuple(PROMPT.encode()),
                sampling=SamplingParams(max_tokens=NUM_TOKENS),
            )
            self._fleet.add(
                request,
                timeout_s=None,
                on_event=partial(_note_end, is_over),
                on_error=is_over.set_exception,
            )
            await is_over
            latencies_s.append(time.perf_counter() - asked_at)
        return latencies_s


def _note_end(is_over: asyncio.Future[None], event: TokenEvent) -> None:
    if event.finish_reason is not None:
        is_over.set_result(None)


def medians(rounds: list[Figures]) -> Figures:
    columns = zip(*(asdict(figures).values() for figures in rounds), strict=True)
    return Figures(*map(statistics.median, columns))


def table(figures: dict[str, Figures], engine_p50_ms: float) -> str:
    upstream, other, ours = figures["upstream"], figures["LiteLLM"], figures["Penstock"]
    other_added_ms = other.one_client_p50_ms - upstream.one_client_p50_ms
    our_added_ms = ours.one_client_p50_ms - engine_p50_ms
    rows = [
        (
            "1 client, p50 ms",
            f"{upstream.one_client_p50_ms:.2f}",
            f"{other.one_client_p50_ms:.1f}",
            f"{engine_p50_ms:.2f}",
            f"{ours.one_client_p50_ms:.2f}",
            f"{other.one_client_p50_ms / ours.one_client_p50_ms:.1f} × faster",
        ),
        (
            "added by the gateway, p50 ms",
            "",
            f"{other_added_ms:.1f}",
            "",
            f"{our_added_ms:.2f}",
            f"{other_added_ms / our_added_ms:.1f} × less",
        ),
    ]
    for name, field, note in (
        (f"{NUM_CLIENTS} clients, requests/s", "requests_per_s", "more"),
        (f"{NUM_CLIENTS} clients streaming, requests/s", "streams_per_s", "more"),
        ("gateway CPU per request, µs", "cpu_us_per_request", "less"),
        ("gateway CPU per streamed request, µs", "cpu_us_per_stream", "less"),
    ):
        values = [float(getattr(row, field)) for row in (upstream, other, ours)]
        ratio = values[2] / values[1] if note == "more" else values[1] / values[2]
        direct, theirs, mine = (f"{value:,.0f}" for value in values)
        rows.append((name, direct, theirs, "", mine, f"{ratio:.1f} × {note}"))
    head = ("", "direct to the upstream", "LiteLLM", "direct to the engine", "Penstock", "Penstock is")
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--litellm-python", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds: dict[str, list[Figures]] = defaultdict(list)
    engine_p50s_ms: list[float] = []
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(instant_upstream())
        engine = stack.enter_context(DirectEngine())
        targets = [
            upstream,
            stack.enter_context(litellm(arguments.litellm_python, upstream)),
            stack.enter_context(penstock()),
        ]
        for target in targets:
            run(target.call(stream=False), num_clients=4, seconds=WARM_UP_S)
            run(target.call(stream=True), num_clients=4, seconds=WARM_UP_S)
        for number in range(1, arguments.rounds + 1):
            engine_p50s_ms.append(engine.p50_ms(arguments.seconds / 2))
            for target in targets:
                figures = measure(target, arguments.seconds)
                rounds[target.name].append(figures)
                print(f"round {number}: {target.name:8s} {figures}", file=sys.stderr, flush=True)
    typical = {name: medians(found) for name, found in rounds.items()}
    engine_p50_ms = statistics.median(engine_p50s_ms)
    print(f"LiteLLM {litellm_version(arguments.litellm_python)}, medians of {arguments.rounds} rounds\n")
    print(table(typical, engine_p50_ms))
    if arguments.json is not None:
        document = {
            "engine_p50_ms": engine_p50s_ms,
            "rounds": {name: [asdict(one) for one in found] for name, found in rounds.items()},
        }
        arguments.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
