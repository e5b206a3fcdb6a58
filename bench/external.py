#!/usr/bin/env python3
"""Penstock before an external server, beside other gateways before the same one, in one run.

    python -m bench.external [--router-python PATH] [--litellm-python PATH] [--processes N] [--before CHECKOUT]
        [--rounds 3] [--seconds 3]

All stand in front of one HTTP server that answers at once with 16 tokens (`bench.instant_upstream`). Penstock runs
twice: open, and with keys from a database, limits and the usage ledger on. The router is `sglang-router` (Rust), and
LiteLLM its proxy with a master key and no database; each is left out without the Python that it is installed for. The
load comes from plain sockets of another process. Rounds alternate between the gateways, and the table shows medians.
Processor time is that of all processes of a gateway. Other work on the machine, the load's own included, adds to it:
it interrupts the gateway, which finds its caches cold. A second table therefore shows the least of all rounds, and
how often a request was interrupted then. With another checkout of Penstock, such as that of an older
commit, its server stands beside: on a machine with other work, only figures of one run can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.echo_server import PENSTOCK, ServerState, cpu_s, started
from bench.instant_upstream import MODEL, NUM_TOKENS
from bench.sockets import HOST, Call, run
from penstock.core.machine import free_port

PATH = "/v1/chat/completions"
PROMPT = "Tell me something about rivers, please."
MASTER_KEY = "sk-bench"
NUM_CLIENTS = 32
WARM_UP_S = 2.0
DIRECT, ROUTER, LITELLM = "direct", "sglang-router", "LiteLLM"
OPEN, FULL = "Penstock, open", "Penstock, keys, limits and ledger"


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load."""

    name: str
    port: int
    process: psutil.Process
    headers: Mapping[str, str]

    def call(self, *, stream: bool) -> Call:
        chat = {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": NUM_TOKENS,
            "stream": stream,
        }
        return Call.post(self.port, PATH, json.dumps(chat).encode(), self.headers)

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self._processes()))

    def num_interruptions(self) -> int:
        """Return how often a thread had to make room for another one."""
        threads = [thread.id for process in self._processes() for thread in process.threads()]
        return sum(_num_interruptions(thread) for thread in threads)

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def _num_interruptions(thread_id: int) -> int:
    try:
        return psutil.Process(thread_id).num_ctx_switches().involuntary
    except psutil.NoSuchProcess:  # it has just ended
        return 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server in one round, or medians over rounds."""

    one_client_p50_ms: float
    one_stream_p50_ms: float
    requests_per_s: float
    streams_per_s: float
    cpu_us_per_request: float
    cpu_us_per_stream: float
    interruptions_per_request: float
    interruptions_per_stream: float


def measure(target: Target, seconds: float) -> Figures:
    one_client = run(target.call(stream=False), num_clients=1, seconds=seconds)
    one_stream = run(target.call(stream=True), num_clients=1, seconds=seconds)
    whole = _load(target, seconds, stream=False)
    streamed = _load(target, seconds, stream=True)
    pairs = (figure for pair in zip(whole, streamed, strict=True) for figure in pair)
    return Figures(one_client.p50_ms, one_stream.p50_ms, *pairs)


def _load(target: Target, seconds: float, *, stream: bool) -> tuple[float, float, float]:
    """Requests per second of many clients, the microseconds that one costs the gateway, and its interruptions."""
    before_s, num_before = target.cpu_s(), target.num_interruptions()
    load = run(target.call(stream=stream), num_clients=NUM_CLIENTS, seconds=seconds)
    num_requests = len(load.latencies_s)
    cpu_us = 1e6 * (target.cpu_s() - before_s) / num_requests
    return load.requests_per_s, cpu_us, (target.num_interruptions() - num_before) / num_requests


@contextlib.contextmanager
def _target(
    name: str,
    command: Sequence[str],
    port: int,
    ready_path: str,
    headers: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    with started(command, port, ready_path) as process:
        yield Target(name, port, process, headers or {})


@contextlib.contextmanager
def instant_upstream() -> Iterator[Target]:
    port = free_port()
    with _target(DIRECT, [sys.executable, "-m", "bench.instant_upstream", str(port)], port, "/") as target:
        yield target


@contextlib.contextmanager
def sglang_router(python: Path, upstream: Target) -> Iterator[Target]:
    port = free_port()
    command = [str(python), "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)]
    command += ["--worker-urls", _url(upstream), "--prometheus-port", str(free_port())]
    with _target(ROUTER, command, port, "/health") as target:
        yield target


@contextlib.contextmanager
def litellm(python: Path, upstream: Target) -> Iterator[Target]:
    port = free_port()
    parameters = {"model": f"openai/{MODEL}", "api_base": f"{_url(upstream)}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "general_settings": {"master_key": MASTER_KEY},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(python.with_name("litellm")), "--config", str(path), "--port", str(port)]
        headers = {"Authorization": f"Bearer {MASTER_KEY}"}
        with _target(LITELLM, [*command, "--host", HOST], port, "/health/liveliness", headers) as target:
            yield target


@contextlib.contextmanager
def open_penstock(upstream: Target, options: Sequence[str]) -> Iterator[Target]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [*PENSTOCK, "serve", "--external", _url(upstream), "--port", str(port)]
        command += ["--data-dir", folder, *options]
        with _target(OPEN, command, port, "/ready") as target:
            yield target


@contextlib.contextmanager
def full_penstock(
    upstream: Target, options: Sequence[str], name: str = FULL, checkout: Path | None = None
) -> Iterator[Target]:
    port = free_port()
    with ServerState.made() as state:
        elsewhere = [] if checkout is None else ["env", "-C", str(checkout), f"PYTHONPATH={checkout}"]
        command = [
            *elsewhere,
            *PENSTOCK,
            "serve",
            "--external",
            _url(upstream),
            "--port",
            str(port),
            "--usage-ledger",
        ]
        command += ["--data-dir", str(state.data_dir), "--settings", str(state.settings), *options]
        headers = {"Authorization": f"Bearer {state.api_key}"}
        with _target(name, command, port, "/ready", headers) as target:
            yield target


def _url(upstream: Target) -> str:
    return f"http://{HOST}:{upstream.port}"


def version_of(python: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    shown = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True)
    return f"{package} {shown.stdout.strip()}"


def medians(rounds: Sequence[Figures]) -> Figures:
    columns = zip(*(asdict(figures).values() for figures in rounds), strict=True)
    return Figures(*map(statistics.median, columns))


def table(figures: Mapping[str, Figures]) -> str:
    """One row for each gateway. Behind each figure its ratio to the router's, where there is one."""
    direct, router = figures[DIRECT], figures.get(ROUTER)
    head = (
        "",
        "1 client, p50 ms",
        "added, ms",
        "1 stream, p50 ms",
        "added, ms",
        f"{NUM_CLIENTS} clients, requests/s",
        f"{NUM_CLIENTS} clients, streams/s",
        "CPU per request, µs",
        "CPU per stream, µs",
    )
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    for name, row in figures.items():
        values = _columns(row, direct)
        rated: Sequence[float | None] = [None] * len(values)
        if router is not None and name not in (DIRECT, ROUTER):
            rated = [a / b if b > 0 else None for a, b in zip(values, _columns(router, direct), strict=True)]
        cells = [_cell(value, ratio) for value, ratio in zip(values, rated, strict=True)]
        if name == DIRECT:
            cells[1] = cells[3] = cells[6] = cells[7] = ""
        lines.append((name, *cells))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def least_table(rounds: Mapping[str, Sequence[Figures]]) -> str:
    """The processor time of each gateway in its least disturbed round. Behind it its ratio to the router's."""
    head = ("", "CPU per request, µs", "interruptions", "CPU per stream, µs", "interruptions")
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    leasts = {
        name: (
            min(found, key=lambda row: row.cpu_us_per_request),
            min(found, key=lambda row: row.cpu_us_per_stream),
        )
        for name, found in rounds.items()
        if name != DIRECT
    }
    router = leasts.get(ROUTER)
    for name, (whole, streamed) in leasts.items():
        is_rated = router is not None and name != ROUTER
        whole_ratio = whole.cpu_us_per_request / router[0].cpu_us_per_request if is_rated else None
        stream_ratio = streamed.cpu_us_per_stream / router[1].cpu_us_per_stream if is_rated else None
        lines.append(
            (
                name,
                _cell(whole.cpu_us_per_request, whole_ratio),
                f"{whole.interruptions_per_request:.2f}",
                _cell(streamed.cpu_us_per_stream, stream_ratio),
                f"{streamed.interruptions_per_stream:.2f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _columns(row: Figures, direct: Figures) -> list[float]:
    return [
        row.one_client_p50_ms,
        row.one_client_p50_ms - direct.one_client_p50_ms,
        row.one_stream_p50_ms,
        row.one_stream_p50_ms - direct.one_stream_p50_ms,
        row.requests_per_s,
        row.streams_per_s,
        row.cpu_us_per_request,
        row.cpu_us_per_stream,
    ]


def _cell(value: float, ratio: float | None) -> str:
    shown = f"{value:,.0f}" if value >= 50 else f"{value:.2f}"
    return shown if ratio is None else f"{shown} ({ratio:.2f} ×)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router-python", type=Path, help="that sglang-router is installed for")
    parser.add_argument("--litellm-python", type=Path, help="that litellm[proxy] is installed for")
    parser.add_argument(
        "--processes", type=int, help="run Penstock with keys a third time, in so many processes"
    )
    parser.add_argument("--before", type=Path, help="another checkout, whose server runs with keys as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="further options of `penstock serve`, behind --")
    arguments = parser.parse_args()
    rounds: dict[str, list[Figures]] = defaultdict(list)
    versions = []
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(instant_upstream())
        targets = [upstream]
        if arguments.router_python is not None:
            versions.append(version_of(arguments.router_python, "sglang-router"))
            targets.append(stack.enter_context(sglang_router(arguments.router_python, upstream)))
        if arguments.litellm_python is not None:
            versions.append(version_of(arguments.litellm_python, "litellm"))
            targets.append(stack.enter_context(litellm(arguments.litellm_python, upstream)))
        targets.append(stack.enter_context(open_penstock(upstream, arguments.options)))
        checkouts = [None] if arguments.before is None else [arguments.before.resolve(), None]
        for checkout in checkouts:
            suffix = "" if checkout is None else ", before"
            full = full_penstock(upstream, arguments.options, FULL + suffix, checkout)
            targets.append(stack.enter_context(full))
            if arguments.processes is not None:
                number = str(arguments.processes)
                options = [*arguments.options, "--api-workers", number]
                full = full_penstock(upstream, options, f"{FULL}, {number} processes{suffix}", checkout)
                targets.append(stack.enter_context(full))
        for target in targets:
            run(target.call(stream=False), num_clients=4, seconds=WARM_UP_S)
            run(target.call(stream=True), num_clients=4, seconds=WARM_UP_S)
        for number in range(1, arguments.rounds + 1):
            for target in targets:
                figures = measure(target, arguments.seconds)
                rounds[target.name].append(figures)
                print(f"round {number}: {target.name:8s} {figures}", file=sys.stderr, flush=True)
    print(f"{', '.join(versions)}; medians of {arguments.rounds} rounds\n")
    print(table({name: medians(found) for name, found in rounds.items()}))
    print("\nLeast processor time of a round:\n")
    print(least_table(rounds))
    if arguments.json is not None:
        document = {name: [asdict(one) for one in found] for name, found in rounds.items()}
        arguments.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
