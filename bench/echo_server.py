"""`penstock serve echo` as benchmarks want it: a real engine process without a model, with keys from the database,
limits and the usage ledger on."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.sockets import HOST
from penstock.core.machine import free_port

START_TIMEOUT_S = 120.0

# Limits that refuse no request, but are counted for every request.
_SETTINGS = """
[limits.key]
requests_per_minute = 100_000_000
input_tokens_per_minute = 10_000_000_000
output_tokens_per_minute = 10_000_000_000
concurrent_requests = 100_000

[limits.workspace]
requests_per_minute = 100_000_000
output_tokens_per_minute = 10_000_000_000

[prices.models.echo]
input = 0.15
output = 0.60
"""

PENSTOCK = [sys.executable, "-c", "from penstock.main import main; main()"]


@dataclass(frozen=True, slots=True)
class EchoServer:
    port: int
    api_key: str
    gateway: psutil.Process
    engine: psutil.Process

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True)
class ServerState:
    """A database with a key, and a settings file with limits and prices."""

    data_dir: Path
    settings: Path
    api_key: str

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[ServerState]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = folder / "settings.toml"
            settings.write_text(_SETTINGS)
            command = [*PENSTOCK, "keys", "create", "--name", "bench", "--json", "--data-dir", str(folder)]
            key = subprocess.run(command, check=True, capture_output=True)
            yield cls(folder, settings, json.loads(key.stdout)["secret"])


@contextlib.contextmanager
def echo_server() -> Iterator[EchoServer]:
    port = free_port()
    with ServerState.made() as state:
        command = [*PENSTOCK, "serve", "echo", "--port", str(port), "--usage-ledger"]
        command += ["--data-dir", str(state.data_dir), "--settings", str(state.settings)]
        with started(command, port, "/ready") as gateway:
            engine = next(child for child in gateway.children() if "worker" in " ".join(child.cmdline()))
            yield EchoServer(port, state.api_key, gateway, engine)


@contextlib.contextmanager
def started(command: Sequence[str], port: int, ready_path: str) -> Iterator[psutil.Process]:
    """A server process, from its first answer of 200 to `ready_path` until the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(port, ready_path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def cpu_s(process: psutil.Process) -> float:
    """Seconds of processor time that the process has used so far."""
    times = process.cpu_times()
    return times.user + times.system


def _is_ready(port: int, path: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5.0).status == 200
    except OSError:
        return False
