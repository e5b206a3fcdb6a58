"""Runs the roles of a shared fleet: machines with engines, and gateways that send them requests. The two find each
other through a registry.

Builds the parts, connects them, and takes them down in order. `server` does the same for everything in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import uvloop

from penstock.api.http.browsers import check_web_settings
from penstock.cluster.control_plane import ReplicaTimes, replica_view
from penstock.cluster.fleet import Fleet, SharedFleet
from penstock.cluster.local import LocalLauncher, NetworkAddress
from penstock.cluster.registry import Follower, JoinTokens, Publisher, Registry
from penstock.cluster.replica import Launcher, ReplicaSpec
from penstock.cluster.supervisor import Supervisor
from penstock.core.cluster_view import ClusterView, PoolView, ReleaseOrder, ReleaseView, RoutingView
from penstock.core.config import ClusterConfig, ServeConfig
from penstock.core.errors import ConfigError, InvalidRequest, UsageError
from penstock.core.installation import install_command
from penstock.core.messages import EngineReady, EngineStats, LoadProgress
from penstock.dispatch import DispatchConfig
from penstock.serve.environment import bytecode_dir, visible_gpus
from penstock.serve.process import prepare_process, until
from penstock.serve.server import announce_leave, bind, stop_event
from penstock.serve.telemetry import configure_server_logging

logger = logging.getLogger(__name__)

NOTICE_AFTER_S = 10.0  # without an engine, before a gateway says what it waits for


def registry_kind(cluster: ClusterConfig) -> Literal["redis", "database"]:
    """Return what the registry's URL names. Raises UsageError without a URL, and ConfigError for another kind."""
    url = cluster.registry
    if url is None:
        raise UsageError(
            "A shared fleet needs a registry.",
            hint="Name one with --registry or PENSTOCK_REGISTRY, such as redis://HOST:6379/0.",
        )
    kind = url.partition("://")[0].partition("+")[0]
    if kind in ("redis", "rediss", "unix"):
        return "redis"
    if kind in ("postgresql", "sqlite"):
        return "database"
    raise ConfigError(
        f"A registry cannot be reached by '{kind}'.", hint="It is redis://…, rediss://… or postgresql://…."
    )


def open_registry(cluster: ClusterConfig) -> Registry:
    """Return the registry that the settings name. Nothing is read or written yet."""
    kind = registry_kind(cluster)
    url = cluster.registry or ""
    if kind == "redis":
        try:
            from penstock.cluster.redis_registry import RedisRegistry
        except ImportError as error:
            raise ConfigError(
                "A registry in Redis needs the redis package.", hint=f"Run: {install_command('redis')}"
            ) from error
        try:
            return RedisRegistry(url)
        except ValueError as error:
            raise ConfigError("The registry's URL cannot be read.", hint=str(error)) from error
    from penstock.gateway.store.database import Database
    from penstock.serve.database_registry import DatabaseRegistry

    return DatabaseRegistry(Database(url))


def check_role(config: ServeConfig, *, runs_engines: bool) -> None:
    """Refuse settings that a role of a shared fleet cannot follow, before a model is fetched. Raises ConfigError."""
    join_tokens(config.cluster)
    registry_kind(config.cluster)
    cluster, scaling = config.cluster, config.scaling
    if cluster.cluster == "ray":
        raise ConfigError("A shared fleet has its own machines.", hint="--cluster ray is for penstock serve.")
    if scaling.min_replicas is not None or scaling.max_replicas is not None:
        raise ConfigError(
            "The number of engines of a host stays.",
            hint="--min-replicas and --max-replicas are for penstock serve.",
        )
    if not runs_engines and (cluster.replicas > 1 or cluster.prefill_replicas or cluster.decode_replicas):
        raise ConfigError(
            "A gateway starts no engines.", hint="Give the number of replicas to penstock engine."
        )
    if not runs_engines and config.server.api_workers > 1:
        raise ConfigError(
            "penstock gateway is one process.", hint="Start several, on several ports or machines."
        )


def join_tokens(cluster: ClusterConfig) -> JoinTokens:
    if cluster.join_token is None:
        raise UsageError(
            "A shared fleet needs a join token, which all of its machines have.",
            hint="Make one with: openssl rand -hex 32, and set PENSTOCK_JOIN_TOKEN on every machine.",
        )
    return JoinTokens.parse(cluster.join_token)


def run_engines(
    config: ServeConfig,
    specs: Sequence[ReplicaSpec],
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[EngineReady, str], None] | None = None,
    log_level: str = "INFO",
) -> None:
    """Run engines until SIGTERM or SIGINT, and keep the registry informed of them. `on_ready` is called with the
    first model and the name of this host."""
    tokens = join_tokens(config.cluster)
    registry = open_registry(config.cluster)
    host = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    network = NetworkAddress(config.cluster.engine_host, tokens.accepted_clients(), tokens.client_keys())
    launcher: Launcher = LocalLauncher(
        gpus=visible_gpus(),
        log_level=log_level,
        log_format=config.telemetry.log_format,
        bytecode=bytecode_dir(),
        network=network,
    )
    supervisor = Supervisor(
        {"local": launcher},
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        on_progress=on_progress,
        name=host,
        client_keys=tokens.client_keys(),
    )
    uvloop.run(_run_engines(config, specs, supervisor, Publisher(registry, tokens, host), registry, on_ready))


async def _run_engines(
    config: ServeConfig,
    specs: Sequence[ReplicaSpec],
    supervisor: Supervisor,
    publisher: Publisher,
    registry: Registry,
    on_ready: Callable[[EngineReady, str], None] | None,
) -> None:
    stop = stop_event()
    supervisor.on_change.append(publisher.tell)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        await stack.enter_async_context(publisher.running())
        stack.push_async_callback(supervisor.close)
        launched = await until(_launch(supervisor, specs), stop)
        if launched is None:
            return
        ready = supervisor.ready(launched[0])
        if on_ready is not None and ready is not None:
            on_ready(ready, publisher.host)
        await stop.wait()
        logger.info("draining: running answers get %.0f s to finish", config.server.drain_timeout)
        stop.clear()  # a second signal cuts answers short, and their gateways send them elsewhere
        await until(_drain(supervisor, config.server.drain_timeout), stop)


async def _launch(supervisor: Supervisor, specs: Sequence[ReplicaSpec]) -> list[str]:
    return await asyncio.gather(*map(supervisor.launch, specs))


async def _drain(supervisor: Supervisor, timeout_s: float) -> None:
    await asyncio.gather(*[supervisor.drain(member.id, timeout_s) for member in supervisor.members()])


def run_gateway(
    config: ServeConfig, *, is_open: bool, on_ready: Callable[[EngineReady, str], None] | None = None
) -> None:
    """Serve the shared fleet until SIGTERM or SIGINT. `on_ready` is called with the first model and the URL."""
    tokens = join_tokens(config.cluster)
    registry = open_registry(config.cluster)
    check_web_settings(config.server)
    listener = bind(config.server)
    configure_server_logging(config.telemetry)
    config = prepare_process(config)
    with contextlib.closing(listener):
        uvloop.run(_run_gateway(config, tokens, registry, listener, is_open, on_ready))


async def _run_gateway(
    config: ServeConfig,
    tokens: JoinTokens,
    registry: Registry,
    listener: socket.socket,
    is_open: bool,
    on_ready: Callable[[EngineReady, str], None] | None,
) -> None:
    stop = stop_event()
    log_file = config.cluster.record_dispatch
    fleet = Fleet(
        DispatchConfig(routing_policy=config.cluster.routing_policy),
        record_to=None if log_file is None else Path(log_file),
        shared=SharedFleet(tokens.client_keys(), config.cluster.heartbeat_timeout_s),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        stack.callback(fleet.close)
        await stack.enter_async_context(Follower(registry, tokens, fleet.update).running())
        await asyncio.to_thread(importlib.import_module, "penstock.serve.gateway")  # takes a second
        from penstock.serve.gateway import open_gateway

        ready = await until(_first_engine(fleet), stop)
        if ready is None:
            return
        async with open_gateway(
            config, fleet, listener, is_open=is_open, control=SharedControl(fleet)
        ) as running:
            if on_ready is not None:
                host, port = listener.getsockname()[:2]
                scheme = "http" if config.server.ssl_certfile is None else "https"
                on_ready(ready, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
            await stop.wait()
            announce_leave(config.server)
            stop.clear()  # a second signal cuts answers short
            await until(running.leave(config.server), stop)
            await running.close()


async def _first_engine(fleet: Fleet) -> EngineReady:
    waiting = asyncio.ensure_future(fleet.wait_ready())
    try:
        while not (await asyncio.wait((waiting,), timeout=NOTICE_AFTER_S))[0]:
            logger.warning("no engine of the fleet is ready yet: this gateway waits for `penstock engine`")
        return await waiting
    finally:
        waiting.cancel()


class SharedControl:
    """Implements `FleetControl` for a gateway whose engines are started on other machines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def pools(self) -> tuple[PoolView, ...]:
        return ()

    async def cluster(self) -> ClusterView:
        fleet = self._fleet
        now = asyncio.get_running_loop().time()
        routing = RoutingView(
            num_gateways=1,
            reasons=dict(fleet.reasons),
            num_prompt_tokens=fleet.routed_tokens,
            num_matched_tokens=fleet.matched_tokens,
        )
        connections = fleet.connections.by_id
        replicas = [
            replica_view(
                member,
                connections[member.id].client.stats if member.id in connections else EngineStats(),
                ReplicaTimes(),
                now,
            )
            for member in fleet.members
        ]
        return ClusterView(replicas=tuple(replicas), pools=(), releases=(), routing=routing, at=time.time())

    async def start_release(self, order: ReleaseOrder) -> ReleaseView:
        raise _no_releases()

    async def promote_release(self, model: str | None) -> ReleaseView:
        raise _no_releases()

    async def roll_back_release(self, model: str | None) -> ReleaseView:
        raise _no_releases()


def _no_releases() -> InvalidRequest:
    return InvalidRequest(
        "Releases need the engines of one server, and this gateway belongs to a shared fleet.",
        hint="Start engines with the new weights beside the old ones, then end the old ones with SIGTERM.",
    )
