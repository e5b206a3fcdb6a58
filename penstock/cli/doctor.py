"""`penstock doctor`: check everything that serving a model needs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from penstock import __version__
from penstock.cli.commands import EXIT_FAILURE, PenstockCommand
from penstock.cli.console import spinner, stdout_console
from penstock.core.gateway_config import ServerConfig
from penstock.core.machine import reinstall_command, usable_cores, usable_memory
from penstock.gateway.ratelimits.decisions import load_decisions
from penstock.kernels.gpus import Gpu
from penstock.models.hub import ModelHub
from penstock.serve.environment import model_hub

Level = Literal["ok", "warn", "fail"]
_COLOURS: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_PROBE_TIMEOUT_S = 120
_LOW_MEMORY_BYTES = 2 << 30
_LOW_DISK_BYTES = 1 << 30
# Names of /proc/cpuinfo, where x86 has a line of flags and ARM a line of features.
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_CPU_FEATURES = ("asimd", "asimddp", "i8mm", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    detail: str
    hint: str | None = None


@click.command(cls=PenstockCommand, short_help="Check that this machine is ready to serve.")
def doctor() -> None:
    """Check Python, torch, the kernels, memory, disk, cached models and the default port.

    The exit code is 1 if something must be repaired before a model can be served.
    """
    console = stdout_console()
    failed = False
    for finding in _findings():
        colour = _COLOURS[finding.level]
        console.print(
            f"[{colour}]{finding.level:>4}[/{colour}]  [bold]{finding.subject:<8}[/bold] {finding.detail}",
            soft_wrap=True,
        )
        if finding.hint:
            console.print(f"{'':16}{finding.hint}", style="dim", soft_wrap=True)
        failed = failed or finding.level == "fail"
    if failed:
        raise click.exceptions.Exit(EXIT_FAILURE)


def _findings() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{sys.version.split()[0]} at {sys.executable}; Penstock {__version__}")
    yield check_cpu(Path("/proc/cpuinfo"))
    with spinner("Importing torch"):
        engine_findings = list(check_engine([sys.executable, "-m", "penstock.cli.doctor"]))
    yield from engine_findings
    yield check_limits(is_compiled=load_decisions() is not None)
    yield check_memory(Path("/proc/meminfo"), usable_memory())
    hub = model_hub()
    yield check_disk(hub.cache_dir)
    yield check_models(hub)
    yield check_port(ServerConfig().host, ServerConfig().port)


def check_cpu(cpuinfo: Path) -> Finding:
    cores = _counted(usable_cores(), "core")
    try:
        text = cpuinfo.read_text()
    except OSError:
        return Finding("ok", "CPU", cores)
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    flags = set(next(lines, "").split())
    known = [flag for flag in (*_CPU_FLAGS, *_CPU_FEATURES) if flag in flags]
    return Finding("ok", "CPU", cores + (f" with {', '.join(known)}" if known else ""))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_engine(command: list[str]) -> Iterator[Finding]:
    """Check torch, GPUs and kernels with a separate process, which runs `probe`."""
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("fail", "torch", f"could not be imported within {_PROBE_TIMEOUT_S} s")
        return
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        yield Finding(
            "fail", "torch", f"cannot be used: {reason}", "Run `pip install --force-reinstall torch`."
        )
        return
    found: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    yield Finding("ok", "torch", found["torch"])
    yield from check_gpus(found["gpus"])
    yield check_kernels(found["kernels"])


def check_limits(*, is_compiled: bool) -> Finding:
    """Limits are the same in both kinds of code, which differ in speed."""
    if is_compiled:
        return Finding("ok", "Limits", "are decided by compiled code")
    return Finding(
        "warn",
        "Limits",
        "are decided in Python, which takes more CPU time for each request",
        f"Install a C++ compiler and run `{reinstall_command()}`.",
    )


def check_gpus(found: list[dict[str, Any]]) -> Iterator[Finding]:
    """`found` holds the fields of kernels.gpus.Gpu for each GPU."""
    if not found:
        yield Finding("ok", "GPU", "none; models run on the CPU")
    for fields in found:
        gpu = Gpu(fields["name"], (fields["capability"][0], fields["capability"][1]), fields["memory_bytes"])
        hint = "Models run on the CPU." if gpu.is_too_old else None
        yield Finding("warn" if gpu.is_too_old else "ok", "GPU", gpu.describe(), hint)


def check_kernels(kernels: dict[str, Any]) -> Finding:
    """`kernels` holds the fields of kernels.select.Capabilities."""
    if kernels.get("problem"):
        return Finding("warn", "Kernels", kernels["problem"])
    if not kernels["native"]:
        return Finding(
            "warn",
            "Kernels",
            "native CPU kernels are missing, so torch does their work more slowly",
            f"Install a C++ compiler and run `{reinstall_command()}`.",
        )
    detail = f"native, for {kernels['isa']}, on {_counted(kernels['num_threads'], 'thread')}"
    return Finding("ok", "Kernels", f"{detail}; for --dtype float32 and bfloat16 on a CPU")


def check_memory(meminfo: Path, limit: int) -> Finding:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) << 10
        total = int(lines["MemTotal"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return Finding("warn", "Memory", "this system does not report its memory")
    detail = f"{available / 2**30:,.1f} of {total / 2**30:,.1f} GiB available"
    if limit < total:
        detail += f"; this process may use {limit / 2**30:,.1f} GiB"
    if min(available, limit) < _LOW_MEMORY_BYTES:
        return Finding(
            "warn", "Memory", detail, "The default model needs about 1.5 GiB; see --kv-cache-memory."
        )
    return Finding("ok", "Memory", detail)


def check_disk(cache_dir: Path) -> Finding:
    existing = next(folder for folder in (cache_dir, *cache_dir.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 1e9:,.1f} GB free for {cache_dir}"
    if not os.access(existing, os.W_OK):
        return Finding(
            "fail", "Disk", f"{existing} cannot be written to", "Choose a folder with PENSTOCK_CACHE."
        )
    if free < _LOW_DISK_BYTES:
        return Finding("warn", "Disk", detail, "Free some space, or choose another disk with PENSTOCK_CACHE.")
    return Finding("ok", "Disk", detail)


def check_models(hub: ModelHub) -> Finding:
    here = [name for name in hub.catalog if hub.is_cached(name)]
    if here:
        return Finding("ok", "Models", f"{', '.join(here)} in the cache")
    return Finding("warn", "Models", "none in the cache", "`penstock serve` fetches the default one.")


def check_port(host: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(
                "warn", "Port", f"{host}:{port} cannot be used ({error.strerror})", "Serve on another --port."
            )
    return Finding("ok", "Port", f"{host}:{port} is free")


def probe() -> None:
    """Print what torch and the kernels say about this machine, as JSON.

    Runs in a process of its own: importing torch takes seconds, and a broken installation may end the process.
    """
    import torch

    from penstock.engine.device import gpus
    from penstock.kernels.select import capabilities, set_num_threads

    set_num_threads(usable_cores())

    found = {
        "torch": torch.__version__,
        "gpus": [asdict(gpu) for gpu in gpus()],
        "kernels": asdict(capabilities()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    probe()
