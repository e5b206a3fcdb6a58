"""The composition root of `penstock serve`: one engine process, the gateway and the HTTP server in this one.

Nothing here decides anything; it builds the parts, connects them and takes them down in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop

from penstock.api.app import create_app
from penstock.api.http_protocol import ClientNoise, bounded_protocols
from penstock.cli.books import open_books
from penstock.cli.stores import data_dir, open_database
from penstock.cli.telemetry import build_journal, build_observer, configure_server_logging
from penstock.cluster.local import LocalReplica
from penstock.core.config import ServeConfig, ServerConfig
from penstock.core.errors import UsageError
from penstock.core.messages import EngineReady, LoadProgress
from penstock.gateway.batches.service import StoredWork
from penstock.gateway.responses.database import DatabaseResponses
from penstock.gateway.responses.store import MemoryResponses
from penstock.gateway.tenants.service import Tenants

log = logging.getLogger(__name__)

T = TypeVar("T")

WEBSOCKET_PING_S = 30.0  # between pings, and for the answer to one
RESERVED_FILES = 200  # that a server opens besides connections


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM must drain before the server stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    config: ServeConfig,
    model_path: Path,
    *,
    is_open: bool,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[EngineReady, str], None] | None = None,
    log_level: str = "INFO",
) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` is called with the model and the URL once both are there."""
    listener = bind(
        config.server
    )  # before the model loads: a port in use should not cost a minute to find out
    configure_server_logging(config.telemetry)
    logging.getLogger("uvicorn.error").addFilter(ClientNoise())
    config = msgspec.structs.replace(config, server=within_file_limit(config.server))
    uvloop.run(_serve(config, model_path, listener, is_open, on_progress, on_ready, log_level))


def within_file_limit(server: ServerConfig) -> ServerConfig:
    """Every connection is an open file, and a process may usually open 1,024. Ask for as many as are needed, and
    where the system does not give them, take fewer connections rather than fail to accept one."""
    wanted = server.max_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return server
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return server
    log.info("the system allows %d open files, which bounds the connections", allowed)
    return msgspec.structs.replace(server, max_connections=max(1, allowed - RESERVED_FILES))


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
    is_open: bool,
    on_progress: Callable[[LoadProgress], None] | None,
    on_ready: Callable[[EngineReady, str], None] | None,
    log_level: str,
) -> None:
    observer = build_observer(config.telemetry)
    database = open_database(config.store)
    tenants = Tenants(database, static_key=config.server.api_key, oidc=config.tenants.oidc, is_open=is_open)
    stack = contextlib.AsyncExitStack()
    books = await stack.enter_async_context(open_books(config, database, is_open=is_open))
    limiter = books.build_limiter(config.gateway)
    work = StoredWork(database, data_dir(config.store))
    # A laptop without a database gets none for the sake of responses that nobody may ever look up.
    responses = DatabaseResponses(database) if database.exists else MemoryResponses()
    replica = LocalReplica(
        config.engine,
        model_path,
        log_level=log_level,
        log_format=config.telemetry.log_format,
        on_progress=on_progress,
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        ready = await _until(replica.start(), stop)
        if ready is None:
            return
        await limiter.start()
        journal = build_journal(config.telemetry, observer)
        gateway = books.build_gateway(
            replica.client, config.gateway, limiter, observer if journal is not None else None
        )
        http, websocket, connections = bounded_protocols(config.server)
        gateway.metrics.register(connections)
        server = _Server(
            uvicorn.Config(
                create_app(
                    gateway,
                    config.server,
                    tenants=tenants,
                    work=work,
                    responses=responses,
                    journal=journal,
                    more_routes=books.routes(database),
                ),
                loop="none",
                http=http,
                ws=websocket,
                ws_max_size=config.server.max_body_bytes,
                ws_per_message_deflate=False,  # would cost each idle connection its compression windows
                ws_ping_interval=WEBSOCKET_PING_S,
                ws_ping_timeout=WEBSOCKET_PING_S,
                lifespan="off",
                access_log=False,
                proxy_headers=False,  # nothing here asks where a request came from
                log_config=None,  # so that its lines look like ours
                log_level="warning",
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        work.runner.start()
        # What is built stays: the collector need not walk over it again and again between requests.
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            host, port = listener.getsockname()[:2]
            on_ready(ready, f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await stop.wait()
        log.info("draining: running answers get %.0f s to finish", config.server.drain_timeout)
        stop.clear()  # a second signal cuts the drain short
        batches_paused = asyncio.create_task(work.runner.stop(config.server.drain_timeout))
        await _until(gateway.drain(config.server.drain_timeout), stop)
        await batches_paused
        server.should_exit = True
        await serving
    finally:
        await replica.stop()
        await asyncio.to_thread(observer.tracing.close)
        await limiter.close()
        await tenants.close()
        await stack.aclose()
        database.close()
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
