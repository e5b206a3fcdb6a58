"""Prepares the process of a gateway: set-up before the gateway is loaded, a wait that a signal can end, the times of
garbage collection, the bound on free memory, and the logs and traces."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import logging
import mmap
import os
import queue
import resource
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock import __version__
from penstock.api.http.access_log import RequestLog
from penstock.api.http.connections import ClientNoise
from penstock.core.config import ServeConfig
from penstock.core.gateway_config import ServerConfig, TelemetryConfig
from penstock.core.log_format import formatter
from penstock.gateway.telemetry import RequestObserver
from penstock.serve.environment import otel_sampled_share, otel_service_name, otlp_headers

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
    default, glibc raises the size from which it maps buffers to 32 MiB, as soon as such buffers are freed. Later
    buffers then leave holes in the heaps of threads, and the process keeps that memory. Does nothing on other C
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


MAX_WAITING_LINES = 20_000
CLOSE_TIMEOUT_S = 2.0


class BackgroundHandler(logging.Handler):
    """Writes log lines to standard error on a thread, so that a slow reader does not block the event loop. If
    too many lines wait, new lines are dropped and counted. Lines that cannot be written, for want of room on a disk,
    are counted too."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._num_dropped:
                line = f"{self._format_dropped()}\n{line}"
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
                self._thread.join(timeout=CLOSE_TIMEOUT_S)
        super().close()

    def _format_dropped(self) -> str:
        return self._format_note(
            f"{self._num_dropped} log lines were dropped because they could not be written in time"
        )

    def _format_note(self, message: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))

    def _write(self) -> None:
        num_unsure = num_lost = 0  # lines since the last flush, and those that a failure took
        while (line := self._lines.get()) is not None:
            num_unsure += 1
            if num_lost:  # a part of a line may be there
                line = f"\n{self._format_note(f'{num_lost} log lines could not be written')}\n{line}"
            try:
                sys.stderr.write(line + "\n")
                if self._lines.empty() or num_lost:
                    sys.stderr.flush()
                    num_unsure = num_lost = 0
            except (OSError, ValueError):  # ValueError: the stream was closed
                num_lost += num_unsure
                num_unsure = 0


def configure_server_logging(config: TelemetryConfig, *, process: str = "gateway") -> None:
    """Set the format of log lines, which say which process wrote them. The level stays as it is."""
    if config.log_format != "json" and not writes_access_lines(config):
        return
    root = logging.getLogger()
    previous = root.handlers[0].formatter if root.handlers else None
    handler = BackgroundHandler()
    handler.setFormatter(
        formatter(
            config.log_format,
            process=process,
            text_format=previous._fmt or ""
            if previous is not None
            else "%(asctime)s %(levelname)s %(message)s",
        )
    )
    root.handlers[:] = [handler]


def writes_access_lines(config: TelemetryConfig) -> bool:
    return config.log_format == "json" if config.access_log is None else config.access_log


def build_observer(config: TelemetryConfig) -> RequestObserver:
    """Build the observer of requests. Raises UsageError if tracing is on and the extra `otel` is not installed."""
    if config.otlp_endpoint is None:
        return RequestObserver()
    from penstock.gateway.telemetry import OpenTelemetryTracing, TracingConfig, otlp_exporter

    tracing = TracingConfig(
        endpoint=config.otlp_endpoint,
        headers=otlp_headers(),
        service_name=otel_service_name(),
        version=__version__,
        sampled_share=otel_sampled_share(),
    )
    return RequestObserver(OpenTelemetryTracing(tracing, otlp_exporter(tracing)))


def build_request_log(config: TelemetryConfig, observer: RequestObserver) -> RequestLog | None:
    """Build the log of single requests, or return None if neither access logs nor traces are on."""
    writes_lines = writes_access_lines(config)
    if not writes_lines and config.otlp_endpoint is None:
        return None
    return RequestLog(observer.tracing, writes_lines=writes_lines, keeps_prompts=config.log_prompts)
