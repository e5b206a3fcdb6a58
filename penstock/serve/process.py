"""Set-up that every gateway process does before it loads the gateway, and a wait that a signal can end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import sys
from collections.abc import Coroutine
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
