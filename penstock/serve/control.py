"""Builds the control plane of a server, and the link between a gateway and the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from penstock.cluster.control_link import ControlLink
from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.scaling import autoscaling
from penstock.cluster.supervisor import Supervisor
from penstock.core.config import ServeConfig
from penstock.core.errors import InvalidRequest, UsageError
from penstock.gateway.releases import DatabaseReleases
from penstock.serve.environment import model_hub, open_database


@dataclass(frozen=True, slots=True)
class Control:
    """`specs` are the replicas to start, one entry each, in the order of the planned replicas."""

    plane: ControlPlane
    specs: Sequence[ReplicaSpec]
    socket: Path  # where gateways connect to the running control plane


@contextlib.asynccontextmanager
async def open_control(
    config: ServeConfig, supervisor: Supervisor, planned: Sequence[ReplicaSpec]
) -> AsyncIterator[Control]:
    """Build the control plane, and apply earlier releases to the planned replicas before one is started."""
    counts = Counter((spec.model, spec.role) for spec in planned)
    first = {(spec.model, spec.role): spec for spec in reversed(planned)}
    pools = [(first[key], autoscaling(config.scaling, count)) for key, count in counts.items()]
    database = open_database(config.store)
    # The folder is private, because anybody who can connect to the socket can start releases.
    folder = Path(tempfile.mkdtemp(prefix="penstock-control-"))
    try:
        plane = ControlPlane(
            supervisor,
            pools,
            DatabaseReleases(database),
            _resolve_weights,
            drain_timeout_s=config.server.drain_timeout,
        )
        serving = dict(zip(counts, await plane.prepare(), strict=True))
        specs = [replace(serving[spec.model, spec.role], region=spec.region) for spec in planned]
        yield Control(plane, specs, folder / "control.sock")
    finally:
        database.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def open_link(socket: Path, fleet: Fleet) -> AsyncIterator[ControlLink]:
    """Connect a gateway's fleet to the control plane."""
    link = ControlLink(socket, fleet)
    fleet.observers.append(link.traffic)
    fleet.choose_revisions(link.traffic.choose_revision)
    async with link.running():
        yield link


async def _resolve_weights(name: str) -> str:
    """Return the path of a model's weights, after fetching them if necessary."""
    try:
        return str(await asyncio.to_thread(model_hub().ensure, name))
    except UsageError as error:
        raise InvalidRequest(error.message, param="weights", hint=error.hint) from error
