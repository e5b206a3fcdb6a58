"""Plans which replicas `penstock serve` starts, and how they share one machine. Starts nothing itself.

An explicit setting holds for each replica. A default is divided, so that several replicas together take as much
memory and as many threads as one replica alone would take.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from penstock.cluster.release_record import revision_of
from penstock.cluster.replica import ReplicaSpec
from penstock.core.config import ExtraModelConfig, ServeConfig
from penstock.core.engine_config import CacheConfig, EngineConfig
from penstock.core.errors import ConfigError
from penstock.dispatch import Role
from penstock.serve.environment import visible_gpus

# The share of the machine's memory for the KV caches of all CPU replicas, and the most that one replica takes.
CPU_KV_SHARE = 0.5
MAX_CPU_KV_BYTES = 512 << 20


def planned_replicas(
    config: ServeConfig, model_path: Path, more_paths: Sequence[Path] = ()
) -> list[ReplicaSpec]:
    """Return the replicas to start: of the first model, then of the further models, whose weights are in
    `more_paths`."""
    launcher = config.cluster.cluster
    roles = _roles(config)
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


def _roles(config: ServeConfig) -> list[Role]:
    """Return the roles of the first model's replicas, one entry each."""
    cluster = config.cluster
    if not cluster.prefill_replicas and not cluster.decode_replicas:
        return ["both"] * cluster.replicas
    if not cluster.prefill_replicas or not cluster.decode_replicas:
        raise ConfigError("--prefill-replicas and --decode-replicas need each other.")
    if cluster.replicas > 1 or config.scaling.max_replicas is not None:
        raise ConfigError(
            "Replicas that only prefill or decode take the place of --replicas, and their number stays.",
            hint="Leave --replicas and --max-replicas out.",
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
        cache = _cpu_cache(cache, count)
    num_threads = engine.num_threads or max(1, len(os.sched_getaffinity(0)) // count)
    return replace(engine, cache=cache, num_threads=num_threads)


def _cpu_cache(cache: CacheConfig, count: int) -> CacheConfig:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    each = min(MAX_CPU_KV_BYTES, int(machine_bytes * CPU_KV_SHARE) // count)
    return replace(cache, kv_cache_memory=f"{each >> 20}MiB")
