"""The composition root of `penstock serve`: one engine process, the gateway and the HTTP server in this one.

Nothing here decides anything; it builds the parts, connects them and takes them down in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop

from penstock.api.app import create_app
from penstock.cluster.local import LocalReplica
from penstock.core.config import ServeConfig, ServerConfig
from penstock.core.errors import UsageError
from penstock.core.messages import EngineReady, LoadProgress
from penstock.gateway.gateway import Gateway

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM must drain before the server stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    config: ServeConfig,
    model_path: Path,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[EngineReady, str], None] | None = None,
    log_level: str = "INFO",
) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` is called with the model and the URL once both are there."""
    listener = bind(
        config.server
    )  # before the model loads: a port in use should not cost a minute to find out
    uvloop.run(_serve(config, model_path, listener, on_progress, on_ready, log_level))


def bind(server: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {server.host}:{server.port}: {error.strerror or error}.",
            hint="Choose another port with --port, or stop what uses this one.",
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def _serve(
    config: ServeConfig,
    model_path: Path,
    listener: socket.socket,
    on_progress: Callable[[LoadProgress], None] | None,
    on_ready: Callable[[EngineReady, str], None] | None,
    log_level: str,
) -> None:
    replica = LocalReplica(config.engine, model_path, log_level=log_level, on_progress=on_progress)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        ready = await _until(replica.start(), stop)
        if ready is None:
            return
        gateway = Gateway(replica.client, config.gateway)
        server = _Server(
            uvicorn.Config(
                create_app(gateway, config.server),
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        if on_ready is not None:
            host, port = listener.getsockname()[:2]
            on_ready(ready, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await stop.wait()
        log.info("draining: running answers get %.0f s to finish", config.server.drain_timeout)
        stop.clear()  # a second signal cuts the drain short
        await _until(gateway.drain(config.server.drain_timeout), stop)
        server.should_exit = True
        await serving
    finally:
        await replica.stop()
        listener.close()


async def _until(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`, or None when `stop` is set first."""
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
