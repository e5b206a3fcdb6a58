"""Facts about this machine: the cores and the memory that this process may use (fewer in a container), its own
addresses, and free ports. Also builds the commands that install extras, from the metadata of the installed
distribution.

The distribution is not called `penstock` on PyPI: another project has that name. A hint that guesses the name would
fetch that project.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shlex
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.core.engine_config import DEFAULT_CPU_KV_MEMORY
from penstock.core.figures import parse_bytes

GROUPS = Path("/proc/self/cgroup")
GROUP_ROOT = Path("/sys/fs/cgroup")
# The share of the memory for the KV caches of all engines on a CPU. Evicted blocks may take as much again.
CPU_KV_SHARE = 0.25
GONE_S = 15  # after which a machine that does not answer counts as gone


def usable_cores(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> int:
    """Return the cores that this process may run on, or fewer if a control group grants less time than these give."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _folders("cpu", groups, root):
        with suppress(OSError, ValueError):  # ValueError: "max"
            allowed_us, period_us = map(int, (folder / "cpu.max").read_text().split())
            cores = min(cores, allowed_us // period_us)
        with suppress(OSError, ValueError):
            allowed_us = int((folder / "cpu.cfs_quota_us").read_text())  # version 1; -1 is no limit
            if allowed_us > 0:
                cores = min(cores, allowed_us // int((folder / "cpu.cfs_period_us").read_text()))
    return max(1, cores)


def usable_memory(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> int:
    """Return the bytes of memory of this machine, or fewer if a control group grants less."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _folders("memory", groups, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # ValueError: "max"
                size = min(size, int((folder / name).read_text()))
    return size


def default_cpu_kv_bytes(num_engines: int = 1) -> int:
    """Return the size of the KV cache of each of `num_engines` engines that share this machine's CPU."""
    return min(parse_bytes(DEFAULT_CPU_KV_MEMORY), int(usable_memory() * CPU_KV_SHARE) // num_engines)


def notice_loss(connected: socket.socket, gone_s: int = GONE_S) -> None:
    """Let a TCP connection end when the machine at its other end is silently gone, without power or behind a cut
    network. The kernel answers for a frozen process, so the connection to such a process stays."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # when no data waits to be confirmed
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, gone_s // 3)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, gone_s // 5)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * gone_s)  # when data does


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name `localhost`, is this machine's and no other machine can reach it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _folders(controller: str, groups: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups whose limits count: the group of this process and those around it.

    A container may see itself as the root, whatever the path of its group is; absent folders are passed over."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # A line of version 2 names no controllers.
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        inner = PurePosixPath(path)
        for group in (inner, *inner.parents):
            yield top.joinpath(*group.parts[1:])


_ENTRY_POINT = "penstock.main:main"  # only the distribution of this package installs it
_PUBLISHED_NAME = "penstock-llm"  # for a copy of the sources that was never installed


def install_command(extra: str) -> str:
    """Return the command that adds an optional extra to this installation."""
    return f"pip install {_requirement(_distribution(), extra)}"


def reinstall_command() -> str:
    """Return the command that builds and installs this distribution again, without its dependencies."""
    return f"pip install --force-reinstall --no-deps {_requirement(_distribution(), None)}"


def _distribution() -> metadata.Distribution | None:
    ours = [
        distribution
        for distribution in metadata.distributions()
        if any(entry.value == _ENTRY_POINT for entry in distribution.entry_points)
    ]
    # A source checkout with build metadata may come first on the path; the installed distribution knows its origin.
    return max(ours, key=lambda distribution: bool(_origin(distribution)), default=None)


def _requirement(distribution: metadata.Distribution | None, extra: str | None) -> str:
    """Return the argument for pip by which it finds the distribution again: in the index, a folder or a URL."""
    extras = f"[{extra}]" if extra else ""
    if distribution is None:
        return shlex.quote(f"{_PUBLISHED_NAME}{extras}")
    name = distribution.metadata["Name"]
    origin = _origin(distribution)
    url = origin.get("url", "")
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{editable}{shlex.quote(unquote(urlsplit(url).path) + extras)}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs.get('requested_revision') or vcs['commit_id']}"
    return shlex.quote(f"{name}{extras} @ {url}" if url else f"{name}{extras}")


def _origin(distribution: metadata.Distribution) -> dict[str, Any]:
    """Return the distribution's direct_url.json; empty for a distribution from an index."""
    text = distribution.read_text("direct_url.json")
    return dict(json.loads(text)) if text else {}


# Below the ports that the kernel takes for outgoing connections, so that none of these takes a server's port between
# the choice and the start; and below the node ports of Kubernetes.
SERVER_PORTS = range(20_000, 30_000)
_NUM_ATTEMPTS = 32

_random = random.SystemRandom()  # processes that were forked from one another must not choose the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port. If another process takes the port first, the server fails and must be started again."""
    for port in _random.sample(SERVER_PORTS, _NUM_ATTEMPTS):
        try:
            return _bind(host, port)
        except OSError:
            continue
    return _bind(host, 0)


def _bind(host: str, port: int) -> int:
    """Bind to the port for a moment, and return the port. 0 lets the kernel choose."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
