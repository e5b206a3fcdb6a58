"""Reads the settings of autoscaling, and has the prefill and the decode pool of a model sized together.

`control/role_pools` decides; `scaling` starts, drains and stops the replicas of each pool. A replica changes its role
where it is: gateways send it other requests from then on, and its process, weights and cache stay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster.replica import ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler
from penstock.control.autoscaler import AutoscalerConfig
from penstock.control.role_pools import ROLES, Convert, PoolRole, RolePools
from penstock.core.config import ScalingConfig
from penstock.core.errors import ConfigError, NotFound

logger = logging.getLogger(__name__)


def autoscaling(config: ScalingConfig, num_replicas: int) -> AutoscalerConfig | None:
    """Return the autoscaler's settings; None when the number of replicas stays as it is."""
    if config.min_replicas is None and config.max_replicas is None:
        return None
    floor = num_replicas if config.min_replicas is None else config.min_replicas
    ceiling = max(floor, num_replicas) if config.max_replicas is None else config.max_replicas
    if config.min_replicas is not None and floor > ceiling:
        raise ConfigError(
            f"--min-replicas {floor} is more than --max-replicas {ceiling}.", hint="Raise the ceiling."
        )
    return AutoscalerConfig(
        min_replicas=min(floor, ceiling),
        max_replicas=ceiling,
        drain_target_s=config.queue_target_s,
        ttft_target_s=config.ttft_target_ms / 1e3,
        kv_target=config.kv_usage_target,
        up_cooldown_s=config.scale_up_pause_s,
        down_cooldown_s=config.scale_down_pause_s,
        idle_to_zero_s=config.scale_to_zero_after_s,
    )


def pool_scaling(config: ScalingConfig, planned: Sequence[ReplicaSpec]) -> list[AutoscalerConfig | None]:
    """Return the settings of the pools of the planned replicas: one for each model and role, in their order. Where a
    model has a prefill and a decode pool, the floor is for each of them, and the ceiling for both together."""
    first = {(spec.model, spec.role): spec for spec in reversed(planned)}
    totals = Counter(spec.model for spec in planned)
    pools = dict.fromkeys((spec.model, spec.role) for spec in planned)
    return [_of_role(autoscaling(config, totals[key[0]]), config, first[key]) for key in pools]


def _of_role(
    scaling: AutoscalerConfig | None, config: ScalingConfig, spec: ReplicaSpec
) -> AutoscalerConfig | None:
    if scaling is None or spec.role == "both":
        return scaling
    itl_target_ms = spec.engine.scheduler.itl_target_ms
    return replace(
        scaling,
        min_replicas=max(1, config.min_replicas or 1),
        itl_target_s=itl_target_ms / 1e3 if itl_target_ms and spec.role == "decode" else None,
    )


class RolePair:
    """The two pools of one model."""

    def __init__(self, manager: ReplicaManager, pools: dict[PoolRole, PoolScaler]) -> None:
        self._manager = manager
        self._pools = pools
        for pool in pools.values():
            pool.is_paired = True

    def look(self, now: float, wall_s: float) -> None:
        """Look at the signals of both pools, decide, and begin to act. While a release or an experiment compares
        revisions, both pools stay as they are."""
        pools = self._pools
        configs = {role: config for role in ROLES if (config := pools[role].config) is not None}
        is_busy = any(pool.is_fixed or pool.is_releasing for pool in pools.values())
        if is_busy or len(configs) < len(ROLES):
            return
        signals = {role: pools[role].signals(now) for role in ROLES}
        ceiling = max(config.max_replicas for config in configs.values())
        actions, states = RolePools(configs, ceiling).decide(
            signals, {role: pools[role].state for role in ROLES}, now
        )
        for role in ROLES:
            pools[role].state = states[role]
            for action in actions[role]:
                if isinstance(action, Convert):
                    self._convert(action, role)
                    pools[role].note(
                        f"convert {len(action.replica_ids)}: {action.reason}", signals[role], wall_s
                    )
                else:
                    pools[role].act(action, signals[role], now, wall_s)

    def _convert(self, action: Convert, role: PoolRole) -> None:
        for replica_id in action.replica_ids:
            try:
                self._manager.convert(replica_id, role)
            except NotFound:
                logger.warning("replica %s has gone before it could become one for %s", replica_id, role)


def role_pairs(manager: ReplicaManager, pools: Sequence[PoolScaler]) -> list[RolePair]:
    """Pair the pools of each model that has both roles."""
    by_model: dict[str, dict[PoolRole, PoolScaler]] = {}
    for pool in pools:
        role = pool.spec.role
        if role != "both" and pool.config is not None:
            by_model.setdefault(pool.spec.model, {})[role] = pool
    return [RolePair(manager, paired) for paired in by_model.values() if len(paired) == len(ROLES)]
