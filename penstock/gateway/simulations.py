"""Runs `penstock simulate` for the console: in a process of its own, one run at a time, bounded in size and time.

The simulator takes seconds of one core. In a process of its own it takes no time from requests, it can be killed, and
this room needs to know nothing about it but its command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded

MAX_REQUESTS = 5000
MAX_REPLICAS = 64
MAX_FLEETS = 4
TIMEOUT_S = 120.0
_NICENESS = 10  # requests that are served come first
_MAX_TEXT = 60


class SimulationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traffic, and the sizes of the fleets that are to serve it. Lengths are a number of tokens, a range such as
    100:1024, or lognormal(median, sigma, maximum)."""

    model: str = "llama-3.1-8b"
    hardware: str = "h200"
    format: str = "bfloat16"
    tensor_parallel: int = 1
    requests: int = 500
    rate: float = 10.0
    input: str = "lognormal(300, 1.0, 8000)"
    output: str = "lognormal(150, 0.8, 1000)"
    prefix: int = 0  # tokens that all requests share
    session_share: float = 0.0
    replicas: tuple[int, ...] = (1, 2, 4)
    seed: int = 0

    def check(self) -> None:
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("tensor_parallel", self.tensor_parallel, 1, 64),
            ("requests", self.requests, 1, MAX_REQUESTS),
            ("rate", self.rate, 0.001, 1e6),
            ("prefix", self.prefix, 0, 1_000_000),
            ("session_share", self.session_share, 0, 1),
            ("seed", self.seed, 0, 2**31),
            *(("replicas", count, 1, MAX_REPLICAS) for count in self.replicas),
        )
        for param, value, least, most in bounds:
            if not least <= value <= most:
                raise InvalidRequest(f"{param} must be between {least:g} and {most:,g}.", param=param)
        if not 1 <= len(set(self.replicas)) == len(self.replicas) <= MAX_FLEETS:
            raise InvalidRequest(
                f"replicas must list one to {MAX_FLEETS} different numbers.", param="replicas"
            )
        for param in ("model", "hardware", "format", "input", "output"):
            if len(getattr(self, param)) > _MAX_TEXT:
                raise InvalidRequest(f"{param} is too long.", param=param)

    def scenario(self, replicas: int) -> str:
        """Return the TOML of one fleet. A JSON string is a TOML string, too."""
        quoted = {name: json.dumps(getattr(self, name)) for name in ("model", "hardware", "format")}
        prefix = f"prefix = {self.prefix}\n" if self.prefix else ""
        return (
            f"seed = {self.seed}\n[model]\nname = {quoted['model']}\nhardware = {quoted['hardware']}\n"
            f"format = {quoted['format']}\ntensor_parallel = {self.tensor_parallel}\n"
            f"[traffic]\nrequests = {self.requests}\nrate = {float(self.rate)}\ninput = {_lengths(self.input)}\n"
            f"output = {_lengths(self.output)}\n{prefix}session_share = {float(self.session_share)}\n"
            f"[fleet]\nreplicas = {replicas}\n"
        )


class Percentiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one fleet. Times are seconds of virtual time."""

    replicas: int
    duration_s: float
    num_requests: int
    num_answered: int
    output_tokens_per_s: float
    cached_share: float
    num_preemptions: int
    busy_share: float
    ttft_s: Percentiles
    itl_s: Percentiles
    queue_s: Percentiles


class SimulationObject(msgspec.Struct, frozen=True, kw_only=True):
    fleets: tuple[SimulatedFleet, ...]
    took_s: float
    object: Literal["simulation"] = "simulation"


class SimulationChoices(msgspec.Struct, frozen=True, kw_only=True):
    """The values that an order may have, and their bounds."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    formats: tuple[str, ...]
    max_requests: int = MAX_REQUESTS
    max_replicas: int = MAX_REPLICAS
    max_fleets: int = MAX_FLEETS
    object: Literal["simulation_choices"] = "simulation_choices"


class Simulations:
    def __init__(self, choices: SimulationChoices, *, timeout_s: float = TIMEOUT_S) -> None:
        self.choices = choices
        self._timeout_s = timeout_s
        self._is_running = False

    async def run(self, order: SimulationOrder) -> SimulationObject:
        """Raises InvalidRequest for an order that the simulator refuses, Overloaded while another one runs, and
        DeadlineExceeded for one that takes too long."""
        order.check()
        if self._is_running:
            raise Overloaded("Another simulation is running.", retry_after_s=10.0)
        self._is_running = True
        began_s = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="penstock-simulation-") as folder:
                reports = await self._reports(order, Path(folder))
        finally:
            self._is_running = False
        fleets = tuple(_fleet(count, report) for count, report in zip(order.replicas, reports, strict=True))
        return SimulationObject(fleets=fleets, took_s=time.monotonic() - began_s)

    async def _reports(self, order: SimulationOrder, folder: Path) -> list[dict[str, Any]]:
        files = []
        for count in order.replicas:
            files.append(folder / f"{count}.toml")
            files[-1].write_text(order.scenario(count), encoding="utf-8")
        output = await self._output(["simulate", *map(str, files), "--json"])
        found = msgspec.json.decode(output, type=dict[str, dict[str, Any]])
        return [found[str(file)] for file in files]

    async def _output(self, arguments: Sequence[str]) -> bytes:
        command = (sys.executable, "-m", "penstock.main", *arguments)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            async with asyncio.timeout(self._timeout_s):
                output, complaints = await process.communicate()
        except TimeoutError:
            raise DeadlineExceeded(
                f"The simulation took longer than {self._timeout_s:.0f} seconds.",
                hint="Ask for fewer requests or fleets, or run `penstock simulate`, which has no limit.",
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise InvalidRequest(_sentence(complaints.decode(errors="replace")))
        return output


def _lengths(text: str) -> str:
    return text if text.isdecimal() else json.dumps(text)


def _sentence(complaints: str) -> str:
    """Return the command's message: `Error: …`, perhaps with a hint."""
    lines = complaints.splitlines()
    said = [line.partition(": ")[2] for line in lines if line.startswith(("Error: ", "Hint: "))]
    return " ".join(said)[:500] or "The simulation failed."


def _fleet(replicas: int, report: dict[str, Any]) -> SimulatedFleet:
    finished, latency, each = report["finished"], report["latency"], report["replicas"]
    duration_s = report["duration_s"]

    def percentiles(name: str) -> Percentiles:
        return msgspec.convert(latency[name], Percentiles)

    return SimulatedFleet(
        replicas=replicas,
        duration_s=duration_s,
        num_requests=report["num_requests"],
        num_answered=finished.get("stop", 0) + finished.get("length", 0),
        output_tokens_per_s=report["output_tokens"] / duration_s if duration_s else 0.0,
        cached_share=report["cached_tokens"] / max(1, report["prompt_tokens"]),
        num_preemptions=sum(replica["num_preemptions"] for replica in each),
        busy_share=sum(replica["busy_share"] for replica in each) / max(1, len(each)),
        ttft_s=percentiles("ttft_s"),
        itl_s=percentiles("itl_s"),
        queue_s=percentiles("queue_s"),
    )
