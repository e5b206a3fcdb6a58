"""The composition root of `penstock serve`: the engine process, and one or several gateways before it.

Nothing here decides anything; it builds the parts, connects them and takes them down in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvloop

from penstock.cli.api_workers import ApiWorkers
from penstock.cli.front_door import open_front_door, prepare_process
from penstock.cli.telemetry import configure_server_logging
from penstock.cli.waiting import until
from penstock.cluster.local import LocalReplica
from penstock.core.config import ServeConfig, ServerConfig
from penstock.core.errors import UsageError
from penstock.core.messages import EngineReady, LoadProgress

log = logging.getLogger(__name__)


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
    # Before the model loads: a port in use should not cost a minute to find out.
    listener = bind(config.server)
    configure_server_logging(config.telemetry)
    config = prepare_process(config)
    replica = LocalReplica(
        config.engine,
        model_path,
        log_level=log_level,
        log_format=config.telemetry.log_format,
        on_progress=on_progress,
    )

    def announce(ready: EngineReady) -> None:
        if on_ready is not None:
            host, port = listener.getsockname()[:2]
            on_ready(ready, f"http://{f'[{host}]' if ':' in host else host}:{port}")

    serve = _serve_here if config.server.api_workers == 1 else _serve_by_workers
    with contextlib.closing(listener):
        uvloop.run(serve(config, replica, listener, is_open, announce))


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


async def _serve_here(
    config: ServeConfig,
    replica: LocalReplica,
    listener: socket.socket,
    is_open: bool,
    announce: Callable[[EngineReady], None],
) -> None:
    stop = _stop_event()
    try:
        ready = await until(replica.start(), stop)
        if ready is None:
            return
        async with open_front_door(config, replica.client, listener, is_open=is_open) as door:
            announce(ready)
            await stop.wait()
            _announce_drain(config.server)
            stop.clear()  # a second signal cuts the drain short
            await until(door.drain(config.server.drain_timeout), stop)
            await door.close()
    finally:
        await replica.stop()


async def _serve_by_workers(
    config: ServeConfig,
    replica: LocalReplica,
    listener: socket.socket,
    is_open: bool,
    announce: Callable[[EngineReady], None],
) -> None:
    stop = _stop_event()
    # Workers watch the settings file themselves; here the signal would be fatal.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    workers = ApiWorkers(config, replica.endpoint, listener, is_open=is_open)
    replica.on_change = workers.tell_of_engine
    try:
        ready = await until(replica.start(), stop)
        if ready is None or not await until(workers.start(), stop):
            return
        announce(ready)
        await stop.wait()
        _announce_drain(config.server)
        stop.clear()
        if await until(workers.drain(), stop) is None:
            await workers.cut_short()
    finally:
        await workers.stop()
        await replica.stop()


def _announce_drain(server: ServerConfig) -> None:
    log.info("draining: running answers get %.0f s to finish", server.drain_timeout)


def _stop_event() -> asyncio.Event:
    """Set by SIGINT and SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
