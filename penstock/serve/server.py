"""Runs a server: the engine processes, the control plane, and one gateway or several API workers.

Builds the parts, connects them, and takes them down in order. Makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from penstock.api.http.browsers import check_web_settings
from penstock.cluster.early import EarlyProcess
from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.ray_launcher import RayLauncher
from penstock.cluster.replica import Launcher, ReplicaSpec
from penstock.cluster.supervisor import Supervisor
from penstock.core.config import ServeConfig
from penstock.core.errors import UsageError
from penstock.core.gateway_config import ServerConfig
from penstock.core.messages import EngineReady, LoadProgress
from penstock.dispatch import DispatchConfig
from penstock.serve.api_workers import ApiWorkers
from penstock.serve.control import Control, open_control, open_link
from penstock.serve.environment import bytecode_dir, visible_gpus
from penstock.serve.process import configure_server_logging, prepare_process, until

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The planned replicas, and the supervisor that keeps them alive."""

    supervisor: Supervisor
    specs: Sequence[ReplicaSpec]

    async def launch(self, control: Control) -> list[EngineReady]:
        """Launch all replicas at once, as releases have changed them. Returns descriptions of the models, the first
        model first; an empty list if only external servers answer."""
        launched = await asyncio.gather(*map(self.supervisor.launch, control.specs))
        ready = map(self.supervisor.ready, launched)
        return [description for description in ready if description is not None]

    def models(self) -> dict[str, EngineReady]:
        """Return the served models by name."""
        ready = {member.spec.model: self.supervisor.ready(member.id) for member in self.supervisor.members()}
        return {name: description for name, description in ready.items() if description is not None}


def run(
    config: ServeConfig,
    specs: Sequence[ReplicaSpec],
    *,
    is_open: bool,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[EngineReady | None, str], None] | None = None,
    log_level: str = "INFO",
    early: EarlyProcess | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_ready` is called with the URL, and the first model if there is one, once the
    server accepts requests. `early` becomes the first engine process on this machine."""
    # The port is taken before the model loads, so that a port in use is reported at once.
    check_web_settings(config.server)
    listener = bind(config.server)
    configure_server_logging(config.telemetry)
    config = prepare_process(config)
    supervisor = Supervisor(
        launchers(config, log_level, early),
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        on_progress=on_progress,
    )

    def announce(ready: EngineReady | None) -> None:
        if early is not None:
            early.close()  # if no engine has used the process
        if on_ready is not None:
            host, port = listener.getsockname()[:2]
            scheme = "http" if config.server.ssl_certfile is None else "https"
            on_ready(ready, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    serve = _serve_here if config.server.num_api_workers == 1 else _serve_by_workers
    with contextlib.closing(listener):
        uvloop.run(serve(config, Replicas(supervisor, specs), listener, is_open, announce))


def launchers(config: ServeConfig, log_level: str, early: EarlyProcess | None = None) -> dict[str, Launcher]:
    """Return the launchers by name. A launcher does nothing until it is used."""
    log_format = config.telemetry.log_format
    return {
        "local": LocalLauncher(
            gpus=visible_gpus(),
            log_level=log_level,
            log_format=log_format,
            early=early,
            bytecode=bytecode_dir(),
        ),
        "ray": RayLauncher(
            config.cluster.ray_address,
            placement=config.cluster.ray_placement,
            log_level=log_level,
            log_format=log_format,
        ),
    }


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
            hint=(
                "Choose another port with --port, or stop what uses this one."
                if error.errno in (errno.EADDRINUSE, errno.EACCES)
                else "Name an address of this machine with --host, such as 127.0.0.1, or 0.0.0.0 for all of them."
            ),
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def _serve_here(
    config: ServeConfig,
    replicas: Replicas,
    listener: socket.socket,
    is_open: bool,
    announce: Callable[[EngineReady | None], None],
) -> None:
    stop = stop_event()
    fleet = Fleet(
        DispatchConfig(routing_policy=config.cluster.routing_policy),
        starts_on_demand=config.scaling.min_replicas == 0,
        record_to=None if (log_file := config.cluster.record_dispatch) is None else Path(log_file),
    )
    replicas.supervisor.on_change.append(fleet.update)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(fleet.close)
        stack.push_async_callback(replicas.supervisor.close)
        control = await stack.enter_async_context(open_control(config, replicas.supervisor, replicas.specs))
        launched, _ = await asyncio.gather(
            until(replicas.launch(control), stop),
            # This takes a second, and engines load meanwhile.
            asyncio.to_thread(importlib.import_module, "penstock.serve.gateway"),
        )
        if launched is None:
            return
        from penstock.serve.gateway import open_gateway

        ready = await fleet.wait_ready() if launched else None
        await stack.enter_async_context(control.plane.running(control.socket))
        link = await stack.enter_async_context(open_link(control.socket, fleet))
        async with open_gateway(config, fleet, listener, is_open=is_open, control=link) as running:
            announce(ready)
            await stop.wait()
            announce_leave(config.server)
            stop.clear()  # a second signal cuts answers short
            await until(running.leave(config.server), stop)
            await running.close()


async def _serve_by_workers(
    config: ServeConfig,
    replicas: Replicas,
    listener: socket.socket,
    is_open: bool,
    announce: Callable[[EngineReady | None], None],
) -> None:
    stop = stop_event()
    # The workers reload the settings file on SIGHUP. The parent ignores the signal, which would end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(replicas.supervisor.close)
        control = await stack.enter_async_context(open_control(config, replicas.supervisor, replicas.specs))
        workers = ApiWorkers(config, listener, control.socket, is_open=is_open)
        stack.push_async_callback(workers.stop)
        replicas.supervisor.on_change.append(workers.announce_members)
        launched = await until(replicas.launch(control), stop)
        if launched is None:
            return
        if config.scaling.min_replicas == 0:
            workers.models = replicas.models()
        await stack.enter_async_context(control.plane.running(control.socket))
        if not await until(workers.start(), stop):
            return
        announce(launched[0] if launched else None)
        await stop.wait()
        announce_leave(config.server)
        stop.clear()
        if await until(workers.drain(), stop) is None:
            await workers.cut_short()


def announce_leave(server: ServerConfig) -> None:
    if server.lame_duck_s:
        logger.info(
            "leaving: /ready fails, requests are taken for %.0f s more, then running answers get %.0f s to finish",
            server.lame_duck_s,
            server.drain_timeout,
        )
    else:
        logger.info("draining: running answers get %.0f s to finish", server.drain_timeout)


def stop_event() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
