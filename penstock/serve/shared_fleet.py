"""Runs the roles of a shared fleet: machines with engines, and gateways that send them requests. The two find each
other through a registry.

Builds the parts, connects them, and takes them down in order. `server` does the same for everything in one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import uvloop
from msgspec.structs import replace

from penstock.api.http.browsers import check_web_settings
from penstock.cluster.control_link import FleetLink
from penstock.cluster.fleet import Fleet, SharedFleet
from penstock.cluster.fleet_leader import FleetLeader, LeaderSettings
from penstock.cluster.host_record import JoinTokens, Offer
from penstock.cluster.joining import check_neighbours
from penstock.cluster.leadership import DocumentReader, Leadership
from penstock.cluster.local import LocalLauncher, NetworkAddress
from penstock.cluster.ordered_host import OrderedHost
from penstock.cluster.registry import (
    RENEW_S,
    RETRY_S,
    Follower,
    Publisher,
    Registry,
    RegistryError,
    unusable,
)
from penstock.cluster.replica import Launcher, ReplicaSpec
from penstock.cluster.supervisor import Supervisor
from penstock.core.config import ClusterConfig, ServeConfig
from penstock.core.errors import ConfigError, UsageError
from penstock.core.machine import install_command
from penstock.core.messages import EngineReady, LoadProgress
from penstock.dispatch import DispatchConfig
from penstock.gateway.store.database import Database
from penstock.serve.database_registry import stores_of_leader
from penstock.serve.environment import (
    bytecode_dir,
    kubernetes_api,
    model_hub,
    open_database,
    own_pod,
    visible_gpus,
)
from penstock.serve.process import configure_server_logging, prepare_process, until
from penstock.serve.server import announce_leave, bind, stop_event

logger = logging.getLogger(__name__)

_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
DEFAULT_FLEET = "penstock"  # in the names of its objects in Kubernetes
NOTICE_AFTER_S = 10.0  # without an engine, before a gateway logs that it waits


def registry_kind(cluster: ClusterConfig) -> Literal["redis", "database", "kubernetes"]:
    """Return the kind of registry that the URL names. Raises UsageError without a URL, and ConfigError for another
    kind."""
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
    if kind == "kubernetes":
        return "kubernetes"
    raise ConfigError(
        f"A registry cannot be reached by '{kind}'.",
        hint="It is redis://…, rediss://…, postgresql://… or kubernetes://….",
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
    if kind == "kubernetes":
        return _kubernetes_registry(url)
    from penstock.gateway.store.database import Database
    from penstock.serve.database_registry import DatabaseRegistry

    return DatabaseRegistry(Database(url))


def _kubernetes_registry(url: str) -> Registry:
    """Return the registry of `kubernetes://NAMESPACE/FLEET`. The default namespace is the service account's."""
    from penstock.cluster.external.kubernetes_api import KubernetesError
    from penstock.cluster.kubernetes_leases import Leases
    from penstock.cluster.kubernetes_registry import KubernetesRegistry, Pod

    namespace, _, fleet = url.partition("://")[2].partition("/")
    for name in filter(None, (namespace, fleet)):
        if not _KUBERNETES_NAME.fullmatch(name):
            raise ConfigError(
                f"The registry's URL cannot be read: {name!r} is no name in Kubernetes.",
                hint="It is kubernetes://NAMESPACE/FLEET, of small letters, digits and '-'; both may be left out.",
            )
    api = kubernetes_api()
    if api is None:
        raise ConfigError(
            "The registry is the Kubernetes API, but this process runs in no cluster.",
            hint="KUBERNETES_SERVICE_HOST is not set. Kubernetes sets it in every pod.",
        )
    try:
        home = api.namespace()
    except KubernetesError as error:
        if not namespace:
            raise ConfigError(
                f"The registry cannot be used: {error}.",
                hint="A pod needs automountServiceAccountToken: true. PENSTOCK_SERVICE_ACCOUNT names another folder.",
            ) from error
        home = None
    pod = own_pod()
    # A record cannot be removed together with a pod of another namespace.
    owner = Pod(*pod) if pod is not None and namespace in ("", home) else None
    return KubernetesRegistry(Leases(api, namespace or home or "", fleet or DEFAULT_FLEET), owner)


def check_role(config: ServeConfig, role: Literal["engine", "gateway", "control"]) -> None:
    """Refuse settings that a role of a shared fleet cannot follow, before a model is fetched. Raises ConfigError."""
    join_tokens(config.cluster)
    registry_kind(config.cluster)
    cluster, scaling = config.cluster, config.scaling
    if cluster.cluster == "ray":
        raise ConfigError("A shared fleet has its own machines.", hint="--cluster ray is for penstock serve.")
    if scaling.min_replicas is not None and role != "control":
        raise ConfigError(
            "One host or gateway does not decide how many replicas a fleet has.",
            hint="--min-replicas is for penstock control and penstock serve.",
        )
    if scaling.min_replicas == 0:
        raise ConfigError("A shared fleet keeps at least one replica of each model.")
    if scaling.max_replicas is not None and role == "gateway":
        raise ConfigError(
            "A gateway starts no engines.", hint="Give --max-replicas to penstock engine or penstock control."
        )
    if role == "control":
        return
    if role == "engine" and scaling.max_replicas is not None and scaling.max_replicas < cluster.replicas:
        raise ConfigError(
            "--max-replicas is less than --replicas.", hint="It is the most that the leader may start."
        )
    runs_engines = role == "engine"
    if not runs_engines and (cluster.replicas > 1 or cluster.prefill_replicas or cluster.decode_replicas):
        raise ConfigError(
            "A gateway starts no engines.", hint="Give the number of replicas to penstock engine."
        )
    if not runs_engines and config.server.num_api_workers > 1:
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
    configure_server_logging(config.telemetry, process="host")
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
    publisher, reader = Publisher(registry, tokens, host), DocumentReader(tokens)
    ordered = OrderedHost(supervisor, publisher, reader, specs, offers_of(config, specs), _localised)
    follower = Follower(registry, tokens, on_documents=ordered.take)
    host_parts = Host(supervisor, publisher, ordered, follower, registry)
    uvloop.run(_run_engines(config, tokens, host_parts, on_ready))


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of a machine with engines."""

    supervisor: Supervisor
    publisher: Publisher
    ordered: OrderedHost
    follower: Follower
    registry: Registry


def offers_of(config: ServeConfig, specs: Sequence[ReplicaSpec]) -> list[Offer]:
    """Return the replicas that this host runs, and may run if the leader wants more."""
    counts = Counter((spec.model, spec.role) for spec in specs)
    first = {(spec.model, spec.role): spec for spec in reversed(specs)}
    most = config.scaling.max_replicas or 0
    return [
        Offer(spec=first[key], replicas=count, max_replicas=max(count, most)) for key, count in counts.items()
    ]


async def _localised(spec: ReplicaSpec) -> ReplicaSpec:
    """Return a spec with the path of its weights on this machine, after fetching them if necessary."""
    path = await asyncio.to_thread(model_hub().ensure, spec.engine.model.model)
    return replace(spec, model_path=str(path))


async def _may_join(config: ServeConfig, tokens: JoinTokens, stop: asyncio.Event) -> bool:
    """Look at the machines of the fleet before anything is written. Returns False when this process is told to end
    meanwhile. Raises ConfigError if they would not understand each other."""

    async def look() -> bool:
        registry = open_registry(config.cluster)  # of its own: some keep watching all that was ever read
        try:
            await check_neighbours(registry, tokens)
        finally:
            await registry.close()
        return True

    return await until(look(), stop) is not None


async def _run_engines(
    config: ServeConfig,
    tokens: JoinTokens,
    host: Host,
    on_ready: Callable[[EngineReady, str], None] | None,
) -> None:
    stop = stop_event()
    supervisor, publisher = host.supervisor, host.publisher
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(host.registry.close)
        if not await _may_join(config, tokens, stop):
            return
        await stack.enter_async_context(host.follower.running())
        await stack.enter_async_context(publisher.running())
        stack.push_async_callback(supervisor.close)
        await stack.enter_async_context(host.ordered.taking_orders())
        launched = await until(host.ordered.start_own(), stop)
        if launched is None:
            return
        ready = supervisor.ready(launched[0])
        if on_ready is not None and ready is not None:
            on_ready(ready, publisher.host)
        await stop.wait()
        logger.info("draining: running answers get %.0f s to finish", config.server.drain_timeout)
        stop.clear()  # a second signal cuts answers short, and their gateways send them elsewhere
        host.ordered.leave()
        await until(_drain(supervisor, config.server.drain_timeout), stop)


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
        if not await _may_join(config, tokens, stop):
            return
        name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        link = FleetLink(fleet, tokens, name)
        follower = Follower(registry, tokens, fleet.update, on_documents=link.take, answers=fleet.answers)
        await stack.enter_async_context(follower.running())
        await stack.enter_async_context(link.running())
        await asyncio.to_thread(importlib.import_module, "penstock.serve.gateway")  # takes a second
        from penstock.serve.gateway import open_gateway

        ready = await until(_first_engine(fleet), stop)
        if ready is None:
            return
        async with open_gateway(config, fleet, listener, is_open=is_open, control=link) as running:
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


def run_control(config: ServeConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Campaign for the lead of the fleet, and lead when it is won, until SIGTERM or SIGINT. `on_ready` is called with
    the name of this process."""
    configure_server_logging(config.telemetry, process="control")
    tokens = join_tokens(config.cluster)
    registry = open_registry(config.cluster)
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    leadership = Leadership(registry, name, tokens=tokens, hosts_return_s=RENEW_S + RETRY_S)
    database = open_database(config.store)
    settings = LeaderSettings(
        name, config.cluster.control_host, config.scaling, drain_timeout_s=config.server.drain_timeout
    )

    leader = FleetLeader(settings, registry, tokens, leadership, partial(stores_of_leader, database))
    uvloop.run(
        _run(config, tokens, leader, leadership, registry, database, lambda: on_ready and on_ready(name))
    )


async def _run(
    config: ServeConfig,
    tokens: JoinTokens,
    leader: FleetLeader,
    leadership: Leadership,
    registry: Registry,
    database: Database,
    on_ready: Callable[[], object],
) -> None:
    stop = stop_event()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(database.close)
        stack.push_async_callback(registry.close)
        if not await _may_join(config, tokens, stop):
            return
        try:  # everything that leading needs, so that a wrong address or missing rights are reported at once
            await registry.records()
            await registry.documents()
            await leadership.try_once()
        except RegistryError as error:
            raise unusable(error) from error
        await stack.enter_async_context(leadership.running())
        on_ready()
        await until(leader.keep_leading(), stop)
