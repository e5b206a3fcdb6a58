#!/usr/bin/env python3
"""How long `penstock serve` takes from its command to a first token over HTTP, with less and less kept from before.

    python -m bench.gpu_starts FOLDER [--rounds 2] [options of `penstock serve`]

FOLDER needs nothing but a config.json: weights are random. The first line is the machine as it was found. Caches of
kernels and of bytecode are in a folder of this script, so the user's caches stay. For "nothing in the page cache" the
kernel drops the page cache, which needs root and an otherwise idle machine; without root those lines say so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.echo_server import free_port
from bench.sockets import HOST

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
TIMEOUT_S = 300.0
PROMPT = list(range(100, 116))


@dataclass(frozen=True)
class Kept:
    """What a start finds of the ones before it."""

    name: str
    kernels: bool
    bytecode: bool
    page_cache: bool


CASES = (
    Kept("everything", kernels=True, bytecode=True, page_cache=True),
    Kept("no compiled kernels", kernels=False, bytecode=True, page_cache=True),
    Kept("no compiled kernels, no bytecode", kernels=False, bytecode=False, page_cache=True),
    Kept(
        "compiled kernels and bytecode, nothing in the page cache",
        kernels=True,
        bytecode=True,
        page_cache=False,
    ),
    Kept("bytecode alone, nothing in the page cache", kernels=False, bytecode=True, page_cache=False),
    Kept("nothing at all", kernels=False, bytecode=False, page_cache=False),
)


@dataclass(frozen=True)
class Caches:
    folder: Path

    @property
    def kernels(self) -> Path:
        return self.folder / "kernels"

    @property
    def bytecode(self) -> Path:
        return self.folder / "penstock"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def environment(self) -> dict[str, str]:
        kernels, driver = str(self.kernels / "triton"), str(self.kernels / "driver")
        return os.environ | {
            "TRITON_CACHE_DIR": kernels,
            "CUDA_CACHE_PATH": driver,
            "PENSTOCK_CACHE": str(self.bytecode),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }

    def leave(self, kept: Kept) -> None:
        if not kept.kernels:
            shutil.rmtree(self.kernels, ignore_errors=True)
        if not kept.bytecode:
            shutil.rmtree(self.bytecode, ignore_errors=True)
        if not kept.page_cache:
            os.sync()
            DROP_CACHES.write_text("3")


def time_start(caches: Caches, folder: Path, options: Sequence[str]) -> float:
    port = free_port()
    command = [sys.executable, "-m", "penstock.main", "serve", str(folder), "--port", str(port), *options]
    started = time.monotonic()
    with caches.log.open("w") as log:
        process = subprocess.Popen(command, env=caches.environment(), stdout=log, stderr=log)
    try:
        while not _has_first_token(f"http://{HOST}:{port}"):
            if process.poll() is not None or time.monotonic() - started > TIMEOUT_S:
                raise SystemExit(f"The server did not start: {' '.join(command)}\n{caches.log.read_text()}")
            time.sleep(0.01)
        return time.monotonic() - started
    finally:
        process.terminate()
        process.wait()


def _has_first_token(url: str) -> bool:
    with contextlib.suppress(OSError):
        model = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=TIMEOUT_S))["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=TIMEOUT_S))
        return bool(answer["usage"]["completion_tokens"] == 1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments, options = parser.parse_known_args()
    options = ["--load-format", "random", *options]
    with tempfile.TemporaryDirectory() as name:
        caches = Caches(Path(name))
        print("kept from before: seconds to the first token", flush=True)
        print(f"the machine as it was found: {time_start(caches, arguments.folder, options):.2f}", flush=True)
        for kept in CASES:
            if not kept.page_cache and not os.access(DROP_CACHES, os.W_OK):
                print(f"{kept.name}: not measured, it needs root", flush=True)
                continue
            seconds = []
            for _ in range(arguments.rounds):
                caches.leave(kept)
                seconds.append(time_start(caches, arguments.folder, options))
            shown = ", ".join(f"{value:.2f}" for value in seconds)
            print(f"{kept.name}: {shown} (median {statistics.median(seconds):.2f})", flush=True)


if __name__ == "__main__":
    main()
