"""Runs the control plane of a shared fleet: `penstock control`. Any number of such processes may run; one leads, and
the others stand by."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from functools import partial

import uvloop

from penstock.cluster.fleet_leader import FleetLeader
from penstock.cluster.fleet_term import LeaderSettings
from penstock.cluster.leadership import Leadership
from penstock.cluster.registry import Registry, RegistryError, unusable
from penstock.core.config import ServeConfig
from penstock.gateway.store.database import Database
from penstock.serve.environment import open_database
from penstock.serve.process import until
from penstock.serve.server import stop_event
from penstock.serve.shared_fleet import join_tokens, open_registry
from penstock.serve.staged_store import stores_of_leader
from penstock.serve.telemetry import configure_server_logging


def run_control(config: ServeConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Campaign for the lead of the fleet, and lead when it is won, until SIGTERM or SIGINT. `on_ready` is called with
    the name of this process."""
    configure_server_logging(config.telemetry, process="control")
    tokens = join_tokens(config.cluster)
    registry = open_registry(config.cluster)
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    leadership = Leadership(registry, name)
    database = open_database(config.store)
    settings = LeaderSettings(
        name, config.cluster.control_host, config.scaling, drain_timeout_s=config.server.drain_timeout
    )

    leader = FleetLeader(settings, registry, tokens, leadership, partial(stores_of_leader, database))
    uvloop.run(_run(leader, leadership, registry, database, lambda: on_ready and on_ready(name)))


async def _run(
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
        try:  # everything that leading needs, so that a wrong address or missing rights are reported at once
            await registry.records()
            await registry.documents()
            await leadership.try_once()
        except RegistryError as error:
            raise unusable(error) from error
        await stack.enter_async_context(leadership.running())
        on_ready()
        await until(leader.keep_leading(), stop)
