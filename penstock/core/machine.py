"""This machine: the processor cores and the memory that this process may use (fewer in a container), and whether an
address is its own."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from penstock.core.engine_config import DEFAULT_CPU_KV_MEMORY
from penstock.core.figures import parse_bytes

GROUPS = Path("/proc/self/cgroup")
GROUP_ROOT = Path("/sys/fs/cgroup")
# The share of the memory for the KV caches of all engines on a CPU. Evicted blocks may take as much again.
CPU_KV_SHARE = 0.25


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


def is_loopback(host: str) -> bool:
    """Say whether an address, or the name `localhost`, is this machine's and no other machine can reach it."""
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
