"""Builds one gateway behind a listening socket: every part of a server except the engines.

`penstock serve` runs one gateway in its own process, or several in child processes (`serve/api_workers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from penstock.api.admin.fleet import ClusterEndpoints, ExperimentEndpoints
from penstock.api.app import create_app
from penstock.api.console import HistoryEndpoints, SimulationEndpoints
from penstock.api.http.connections import ConnectionLimits
from penstock.api.http.protocol import bounded_protocols
from penstock.cluster.control_link import ControlLink
from penstock.cluster.external.discovery import Discovery
from penstock.cluster.external.kubernetes import Kubernetes
from penstock.cluster.external.placements import Placements
from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.fleet import Fleet
from penstock.core.config import ExternalServerConfig, ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.gateway_config import ServerConfig
from penstock.core.tasks import running
from penstock.gateway.accounts import Observer
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.external.models import ExternalModels
from penstock.gateway.gateway import Gateway
from penstock.gateway.history.history import History, HistoryStore
from penstock.gateway.history.requests import RecentRequests, RequestRecorder
from penstock.gateway.metrics.gateway import PoolMetrics, ReplicaMetrics
from penstock.gateway.metrics.objective import ObjectiveMetrics
from penstock.gateway.models.catalogue import open_adapters, try_given
from penstock.gateway.ratelimits.local import MeterTable
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.responses.store import ResponseStore
from penstock.gateway.siblings import Siblings
from penstock.gateway.simulations import SimulationChoices, Simulations
from penstock.gateway.tenants.authenticator import Tenants
from penstock.planner.hardware import HARDWARE, WEIGHT_FORMATS
from penstock.planner.shapes import KNOWN_MODELS
from penstock.serve.config import external_servers_of
from penstock.serve.environment import data_dir, kubernetes_api, open_blobs, open_database
from penstock.serve.even_listener import ConnectionCounts, EvenListener
from penstock.serve.gateway_state import open_gateway_state
from penstock.serve.process import build_observer, build_request_log, settle_memory

logger = logging.getLogger(__name__)


REFRESH_INTERVAL_S = 5.0


class ExternalServers:
    """Keeps a pool up to date. Tables that cannot be used change nothing, and are logged once."""

    def __init__(self, config: ServeConfig, pool: ExternalPool, discovery: Discovery | None = None) -> None:
        self._config = config
        self._pool = pool
        self._discovery = discovery or _discovery()
        self._tables: tuple[ExternalServerConfig, ...] = config.external
        self._stamp = self._read_stamp()

    async def refresh(self) -> None:
        """Raises ConfigError for tables that cannot be used."""
        tables = self._tables
        stamp = await asyncio.to_thread(self._read_stamp)
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp  # also of an invalid file: the file is read again when it changes
            tables = await asyncio.to_thread(external_servers_of, self._config)
        await self._pool.replace(await self._discovery.servers(tables), tables)
        self._tables = tables

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            try:
                await self.refresh()
            except ConfigError as error:
                logger.error("the external servers stay as they were: %s", error.message)
            except Exception:
                logger.exception("the external servers could not be refreshed; it is tried again")

    def _read_stamp(self) -> tuple[int, int] | None:
        """Return a value that changes with the file; None if there is no file."""
        if self._config.external_file is None:
            return None
        try:
            found = Path(self._config.external_file).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


@contextlib.asynccontextmanager
async def open_external_pool(config: ServeConfig, siblings: Siblings) -> AsyncIterator[ExternalPool]:
    """Probe every external server once, then keep the pool up to date until the context ends. Processes of one server
    tell each other where they send prompts, and each of them uses its part of `max_concurrent`."""
    pool = ExternalPool([], num_processes=siblings.num_processes)
    discovery = _discovery()
    servers = ExternalServers(config, pool, discovery)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(discovery.close)
        stack.push_async_callback(pool.close)
        await servers.refresh()
        if siblings.folder is not None:
            placements = Placements(pool, siblings.folder, siblings.num_processes, siblings.number)
            placements.start()
            stack.callback(placements.close)
        await stack.enter_async_context(running(pool.run()))
        await stack.enter_async_context(running(servers.run()))
        yield pool


def _discovery() -> Discovery:
    api = kubernetes_api()
    return Discovery(kubernetes=None if api is None else Kubernetes(api))


WEBSOCKET_PING_S = 30.0  # both the time between pings and the time allowed for an answer
# The time after the drain in which slow clients may receive the last bytes, before their connections are closed.
CLOSE_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM must drain before the server stops. Connections are accepted by an
    `EvenListener`: with `counts`, the listening socket is shared with other processes. TLS handshakes are bounded by
    `limits`, as connections are."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, counts: ConnectionCounts | None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._counts = counts
        self._listeners: list[EvenListener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        limits = self._limits
        for each in sockets or ():
            listener = EvenListener(
                each,
                self._counts,
                self._make_protocol,
                self.config.ssl,
                num_free=lambda: limits.config.max_connections - limits.metrics.num_open,
                handshake_timeout_s=limits.config.header_timeout_s,
            )
            self._listeners.append(listener)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that serves. Call `leave`, then `close`, which lets clients receive the last bytes."""

    gateway: Gateway
    _work: StoredWork
    _connections: ConnectionLimits
    _server: _Server
    _serving: asyncio.Task[None]

    async def leave(self, server: ServerConfig) -> None:
        """Fail /ready at once, take requests for `lame_duck_s` more, then refuse new ones and wait until running
        answers are finished. Cancelling this call cuts the answers short."""
        self._connections.is_leaving = True
        self.gateway.leave()
        drain_s = 0.0
        try:
            await asyncio.sleep(server.lame_duck_s)
            drain_s = server.drain_timeout
        finally:
            paused = asyncio.create_task(self._work.runner.stop(drain_s))
            try:
                await self.gateway.drain(drain_s)
            finally:
                await paused

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving


@contextlib.asynccontextmanager
async def open_gateway(
    config: ServeConfig,
    fleet: Fleet,
    listener: socket.socket,
    *,
    is_open: bool,
    control: ControlLink,
    siblings: Siblings | None = None,
) -> AsyncIterator[RunningGateway]:
    """Serve `fleet`, which must be ready, until the context ends. `control` answers the admin API. `siblings` are the
    other gateway processes of this server."""
    num_processes = config.server.num_api_workers
    siblings = siblings or Siblings()
    async with contextlib.AsyncExitStack() as stack:
        observer = build_observer(config.telemetry)
        stack.push_async_callback(asyncio.to_thread, observer.tracing.close)
        database = open_database(config.store)
        stack.callback(database.close)
        tenants = Tenants(
            database, static_key=config.server.api_key, oidc=config.tenants.oidc, is_open=is_open
        )
        stack.push_async_callback(tenants.close)
        state = await stack.enter_async_context(open_gateway_state(config, database, is_open=is_open))
        table = MeterTable.made(siblings.folder, siblings.num_processes, siblings.number)
        if table is not None:
            stack.callback(table.close)
        limiter = state.build_limiter(config.gateway, table)
        stack.push_async_callback(limiter.close)
        await limiter.start()
        request_log = build_request_log(config.telemetry, observer)
        recent = RecentRequests(siblings, keeps_prompts=config.telemetry.show_prompts)
        fleet.on_sent = recent.note_sent
        if (path := config.telemetry.record_requests) is not None:
            # One file for each process: their secrets differ.
            recorder = RequestRecorder(Path(path if num_processes == 1 else f"{path}.{os.getpid()}"))
            stack.callback(recorder.close)
            fleet.observers.append(recorder)
        observers: list[Observer] = [recent] if request_log is None else [recent, observer]
        gateway = state.build_gateway(fleet, config.gateway, limiter, observers)
        if recent.keeps_prompts:
            gateway.on_request = recent.note_prompt
        adapters = await open_adapters(config.gateway.names, data_dir(config.store), database)
        gateway.catalogue.adapters = adapters
        await state.follow_adapters(adapters)
        await try_given(gateway.engine, gateway.catalogue)
        if config.external:
            pool = await stack.enter_async_context(open_external_pool(config, siblings))
            gateway.catalogue.external = ExternalModels(pool)
            gateway.metrics.register(gateway.catalogue.external)
        # Stored responses alone are no reason to create a database file: without one they stay in memory.
        is_shared = database.exists or num_processes > 1
        blobs = await asyncio.to_thread(open_blobs, config.store)
        work = StoredWork(database, blobs)
        gateway.images.files = gateway.documents.files = work.files
        http, websocket, connections = bounded_protocols(config.server)
        gateway.metrics.register(connections.metrics)
        gateway.metrics.register(PoolMetrics(control))
        objective = ObjectiveMetrics(fleet)
        fleet.observers.append(objective)
        gateway.metrics.register(objective)
        state.settings.attach(lambda settings: objective.apply(settings.objective))
        is_own_fleet = isinstance(control, ControlLink)
        server_name = f"{socket.gethostname()}:{listener.getsockname()[1]}" if is_own_fleet else None
        gateway.metrics.register(ReplicaMetrics(fleet, server_name))
        store = HistoryStore(database) if config.telemetry.keep_history else None
        history = History(gateway.metrics, gateway.engine, siblings, store)
        if store is not None:
            stack.push_async_callback(history.save, is_last=True)
            await stack.enter_async_context(running(history.keep_saving()))
        await stack.enter_async_context(running(history.run()))
        cluster = ClusterEndpoints(control, database, external=gateway.catalogue.external)
        experiments = ExperimentEndpoints(control, state.settings, database)
        app = create_app(
            gateway,
            config.server,
            tenants=tenants,
            work=work,
            responses=ResponseStore(database, max_workspace_bytes=config.gateway.stored_response_bytes)
            if is_shared
            else None,
            objects=ObjectStore(database, max_workspace_bytes=config.gateway.stored_response_bytes),
            request_log=request_log,
            pending_bodies=connections.pending_bodies,
            more_routes=[
                *state.routes(database),
                *cluster.routes(),
                *experiments.routes(),
                *HistoryEndpoints(history, recent).routes(),
                *SimulationEndpoints(Simulations(_simulation_choices())).routes(),
            ],
        )
        counts = None
        if siblings.folder is not None:
            counts = ConnectionCounts(
                siblings.folder / "connections", siblings.num_processes, siblings.number
            )
            connections.on_count = counts.publish
        server = _build_server(app, http, websocket, connections, counts)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        work.runner.start()
        settle_memory()
        yield RunningGateway(gateway, work, connections, server, serving)


def _simulation_choices() -> SimulationChoices:
    return SimulationChoices(
        models=tuple(KNOWN_MODELS), hardware=tuple(HARDWARE), formats=tuple(WEIGHT_FORMATS)
    )


def _build_server(
    app: ASGIApp,
    http: type[asyncio.Protocol],
    websocket: type[asyncio.Protocol],
    limits: ConnectionLimits,
    counts: ConnectionCounts | None,
) -> _Server:
    config = limits.config
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=http,
            ws=websocket,
            ws_max_size=config.max_body_bytes,
            ws_per_message_deflate=False,  # compression windows would cost memory for every idle connection
            ws_ping_interval=WEBSOCKET_PING_S,
            ws_ping_timeout=WEBSOCKET_PING_S,
            proxy_headers=False,  # the client's address is not used
            lifespan="off",
            access_log=False,
            log_config=None,  # uvicorn's lines take our format
            log_level="warning",
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        ),
        limits,
        counts,
    )
