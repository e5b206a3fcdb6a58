"""Plans which replicas a server starts, builds the control plane of a server, and links a gateway with it.

An explicit setting applies to each replica. A default is divided, so that several replicas together take as much
memory and as many threads as one replica alone would take. Releases are stored in the database, so that they survive
a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from penstock.cluster.control_link import ControlLink, SocketChannel
from penstock.cluster.control_plane import ControlPlane
from penstock.cluster.fleet import Fleet
from penstock.cluster.leadership import Leadership
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.role_scaling import pool_scaling
from penstock.cluster.staged_records import revision_of
from penstock.cluster.supervisor import Supervisor
from penstock.core.config import ExtraModelConfig, ServeConfig
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError, InvalidRequest, UsageError
from penstock.core.machine import default_cpu_kv_bytes, usable_cores
from penstock.dispatch import Role
from penstock.serve.database_registry import (
    SERVER_LEASE,
    DatabaseExperiments,
    DatabaseRegistry,
    OwnedReleases,
)
from penstock.serve.environment import model_hub, open_database, visible_gpus

logger = logging.getLogger(__name__)


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
    pools = list(zip(map(first.__getitem__, counts), pool_scaling(config.scaling, planned), strict=True))
    database = open_database(config.store)
    # The folder is private, because anybody who can connect to the socket can start releases.
    folder = Path(tempfile.mkdtemp(prefix="penstock-control-"))
    name = f"{socket.gethostname()}-{secrets.token_hex(6)}"
    ownership = Leadership(DatabaseRegistry(database, SERVER_LEASE), name)
    try:
        plane = ControlPlane(
            supervisor,
            pools,
            OwnedReleases(database, ownership),
            _resolve_weights,
            drain_timeout_s=config.server.drain_timeout,
            experiments=DatabaseExperiments(database),
            ownership=ownership,
        )
        serving = dict(zip(counts, await plane.prepare(), strict=True))
        specs = [replace(serving[spec.model, spec.role], region=spec.region) for spec in planned]
        yield Control(plane, specs, folder / "control.sock")
    finally:
        database.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def open_link(path: Path, fleet: Fleet) -> AsyncIterator[ControlLink]:
    """Connect a gateway's fleet to the control plane."""
    link = ControlLink(lambda: SocketChannel.connect(path), fleet)
    fleet.observers += [link.traffic, link.experiment_traffic]
    fleet.choose_revisions(link.choose_revision)
    async with link.running():
        yield link


async def _resolve_weights(name: str) -> str:
    """Return the path of a model's weights, after fetching them if necessary."""
    try:
        return str(await asyncio.to_thread(model_hub().ensure, name))
    except UsageError as error:
        raise InvalidRequest(error.message, param="weights", hint=error.hint) from error


def planned_replicas(
    config: ServeConfig, model_path: Path, more_paths: Sequence[Path] = (), *, is_shared: bool = False
) -> list[ReplicaSpec]:
    """Return the replicas to start: of the first model, then of the further models, whose weights are in
    `more_paths`. `is_shared`: these are one host's replicas of a shared fleet, and other hosts have more."""
    launcher = config.cluster.cluster
    roles = _roles(config, is_shared=is_shared)
    first = ExtraModelConfig(engine=config.engine, replicas=len(roles), region=config.cluster.region)
    models = [first, *config.models]
    # The autoscaler may start up to `scaled` replicas of each model. Replicas on Ray do not share one machine.
    scaled = config.scaling.max_replicas or 0
    most = 1 if launcher == "ray" else sum(max(model.replicas, scaled) for model in models)
    specs: list[ReplicaSpec] = []
    for model, path in zip(models, [model_path, *more_paths], strict=True):
        spec = ReplicaSpec(
            model=model.engine.model.served_model_name or model.engine.model.model,
            engine=shared_engine(model.engine, most, visible_gpus()),
            model_path=str(path),
            # The revision is that of the user's settings, not of the share computed for this machine.
            revision=revision_of(model.engine, str(path)),
            region=model.region or config.cluster.region,
            launcher=launcher,
        )
        specs += [spec] * model.replicas
    return [_with_role(spec, role) for spec, role in zip(specs, roles, strict=False)] + specs[len(roles) :]


def _roles(config: ServeConfig, *, is_shared: bool) -> list[Role]:
    """Return the roles of the first model's replicas, one entry each."""
    cluster = config.cluster
    if not cluster.prefill_replicas and not cluster.decode_replicas:
        return ["both"] * cluster.replicas
    if not is_shared and not (cluster.prefill_replicas and cluster.decode_replicas):
        raise ConfigError("--prefill-replicas and --decode-replicas need each other.")
    if cluster.replicas > 1:
        raise ConfigError(
            "Replicas that only prefill or decode take the place of --replicas.", hint="Leave --replicas out."
        )
    num_first, scaling = cluster.prefill_replicas + cluster.decode_replicas, config.scaling
    if scaling.max_replicas is not None and scaling.max_replicas < num_first:
        raise ConfigError(
            f"--max-replicas {scaling.max_replicas} is for prefill and decode replicas together, and there are "
            f"{num_first} of them at first.",
            hint="Raise the ceiling.",
        )
    if scaling.min_replicas is not None and 2 * scaling.min_replicas > (scaling.max_replicas or num_first):
        raise ConfigError(
            f"--min-replicas {scaling.min_replicas} is for each of the prefill and decode pools, and they may have "
            f"{scaling.max_replicas or num_first} replicas together.",
            hint="Lower the floor, or raise --max-replicas.",
        )
    prefill: list[Role] = ["prefill"] * cluster.prefill_replicas
    decode: list[Role] = ["decode"] * cluster.decode_replicas
    return prefill + decode


def _with_role(spec: ReplicaSpec, role: Role) -> ReplicaSpec:
    if role == "both":
        return spec
    return replace(spec, role=role, engine=replace(spec.engine, kv_transfer=True))


def shared_engine(engine: EngineConfig, count: int, gpus: tuple[str, ...]) -> EngineConfig:
    """Return the settings of each of `count` engines that share this machine."""
    if count == 1:
        return engine
    cache = engine.cache
    uses_gpus = bool(gpus) and engine.model.device != "cpu"
    if uses_gpus:
        per_gpu = -(-count * engine.parallel.num_ranks // len(gpus))
        cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / per_gpu)
    elif cache.kv_cache_memory is None and cache.num_kv_blocks is None:
        cache = replace(cache, kv_cache_memory=f"{default_cpu_kv_bytes(count) >> 20}MiB")
    num_threads = engine.num_threads or max(1, usable_cores() // count)
    return replace(engine, cache=cache, num_threads=num_threads)
