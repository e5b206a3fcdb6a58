#!/usr/bin/env python3
"""How long `penstock serve` takes from its command to a first token over HTTP, with less and less kept from before.

    python -m bench.gpu_starts FOLDER [--rounds 2] [options of `penstock serve`]
    python -m bench.gpu_starts FOLDER --in-a-row 200 [--at-once 8]

FOLDER needs nothing but a config.json: weights are random. The first line is the machine as it was found. Caches of
kernels and of bytecode are in a folder of this script, so the user's caches stay. For "nothing in the page cache" the
kernel drops the page cache, which needs root and an otherwise idle machine; without root those lines say so.

With `--in-a-row`, the server is started that many times, `--at-once` of them side by side. The script prints the
number of starts that failed, the log of each of these, and how long the others took.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.sockets import HOST
from penstock.core.machine import free_port

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


class FailedStart(Exception):
    """A server that ended, or did not answer in time, with its log."""


def time_start(caches: Caches, folder: Path, options: Sequence[str], log_name: str = "log") -> float:
    port = free_port()
    command = [sys.executable, "-m", "penstock.main", "serve", str(folder), "--port", str(port), *options]
    path = caches.folder / log_name
    started = time.monotonic()
    with path.open("w") as log:
        process = subprocess.Popen(command, env=caches.environment(), stdout=log, stderr=log)
    try:
        while not _has_first_token(f"http://{HOST}:{port}"):
            if process.poll() is not None or time.monotonic() - started > TIMEOUT_S:
                raise FailedStart(f"The server did not start: {' '.join(command)}\n{path.read_text()}")
            time.sleep(0.01)
        return time.monotonic() - started
    finally:
        process.terminate()
        process.wait()


def starts_in_a_row(caches: Caches, folder: Path, options: Sequence[str], count: int, at_once: int) -> int:
    """Returns the number of starts that failed."""

    def start(number: int) -> float | FailedStart:
        try:
            return time_start(caches, folder, options, f"log-{number}")
        except FailedStart as failure:
            return failure

    time_start(caches, folder, options)  # compiles the kernels, once for all
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(start, range(count)))
    failures = [result for result in results if isinstance(result, FailedStart)]
    seconds = sorted(result for result in results if not isinstance(result, FailedStart))
    for failure in failures:
        print(failure, flush=True)
    print(f"{count} starts, {at_once} at once: {len(failures)} failed")
    if seconds:
        median, last = statistics.median(seconds), seconds[-1]
        print(f"seconds to the first token: least {seconds[0]:.2f}, median {median:.2f}, most {last:.2f}")
    return len(failures)


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
    parser.add_argument("--in-a-row", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=8)
    arguments, options = parser.parse_known_args()
    options = ["--load-format", "random", *options]
    with tempfile.TemporaryDirectory() as name:
        caches = Caches(Path(name))
        if arguments.in_a_row:
            failed = starts_in_a_row(caches, arguments.folder, options, arguments.in_a_row, arguments.at_once)
            raise SystemExit(1 if failed else 0)
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
