"""The process of a gateway: set-up before the gateway is loaded, a wait that a signal can end, when garbage is
collected, and how much free memory the process keeps."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import mmap
import os
import resource
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.api.http.connections import ClientNoise
from penstock.core.config import ServeConfig
from penstock.core.gateway_config import ServerConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESERVED_FILES = 200  # files that a server opens besides connections
THREAD_TURN_S = 0.001  # the longest time that a thread may keep the event loop waiting


def prepare_process(config: ServeConfig) -> ServeConfig:
    """Set up this process, once. Returns the settings with the number of connections that the system allows."""
    logging.getLogger("uvicorn.error").addFilter(ClientNoise())
    sys.setswitchinterval(THREAD_TURN_S)
    # A text is tokenized in the thread that asks. A pool with a thread per core would put small texts behind large.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return msgspec.structs.replace(config, server=within_file_limit(config.server))


def within_file_limit(server: ServerConfig) -> ServerConfig:
    """Raise the limit on open files to the number of connections, because every connection is an open file and the
    usual limit is 1,024. If the system refuses, return a lower number of connections."""
    wanted = server.max_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return server
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return server
    logger.info("the system allows %d open files, which bounds the connections", allowed)
    return msgspec.structs.replace(server, max_connections=max(1, allowed - RESERVED_FILES))


async def until(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or None when `stop` is set first. `work` is then cancelled, and has ended."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


# A request makes hundreds of objects and hardly a cycle among them: a search for cycles at every 700th object finds
# nothing.
GC_THRESHOLDS = (20_000, 20, 50)
# Parameters of glibc's `mallopt`, from <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
MAPPED_BYTES = 1 << 20  # buffers of this size are mapped one by one, so that freeing one returns its memory
MAX_FREE_BYTES = 8 << 20  # at the end of a heap
_MADV_COLLAPSE = 25  # since Linux 6.1
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MIN_USED_SHARE = 0.5  # of a large page: less would waste memory


def settle_memory() -> None:
    """Call once the long-lived objects of a process are built."""
    gc.collect()
    gc.freeze()  # what lives as long as the process costs the garbage collector nothing
    gc.set_threshold(*GC_THRESHOLDS)
    return_large_buffers()
    use_large_pages()


def return_large_buffers() -> None:
    """Let the C library return the memory of large buffers, such as bodies of requests, when they are freed. By
    default glibc raises the size from which it maps buffers to 32 MiB, as soon as such buffers are freed; later
    buffers then leave holes in the heaps of threads, which stay with the process. Does nothing on other C
    libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def use_large_pages() -> int:
    """Move the memory of this process into large pages, as far as most of such a page is in use, and return how many
    bytes that were. A request runs hundreds of functions whose code and objects lie all over the heap: with pages of
    4 KiB, the processor spends much time on finding out where they are. Does nothing on other systems, and where
    large pages are switched off."""
    try:
        if "[never]" in (_LARGE_PAGES / "enabled").read_text():  # which the kernel itself may overlook
            return 0
        page_bytes = int((_LARGE_PAGES / "hpage_pmd_size").read_text())
        libc = ctypes.CDLL(None)
        mincore, madvise = libc.mincore, libc.madvise
    except (OSError, ValueError, AttributeError):
        return 0
    residency = (ctypes.c_ubyte * (page_bytes // mmap.PAGESIZE))()
    num_bytes = 0
    for start, end in _anonymous_memory():
        for address in range(-(-start // page_bytes) * page_bytes, end - page_bytes + 1, page_bytes):
            place, length = ctypes.c_void_p(address), ctypes.c_size_t(page_bytes)
            if mincore(place, length, residency) or sum(residency) < _MIN_USED_SHARE * len(residency):
                continue
            if madvise(place, length, _MADV_COLLAPSE) == 0:
                num_bytes += page_bytes
    return num_bytes


def _anonymous_memory() -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each region that is private, writable, and part of no file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            region, access, _, _, inode, *name = line.split(maxsplit=5)
            if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, _, end = region.partition("-")
                yield int(start, 16), int(end, 16)
