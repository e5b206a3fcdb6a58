"""Reads the settings of autoscaling, and has the prefill and the decode pool of a model sized together.

`control/autoscaler` decides; `scaling` starts, drains and stops the replicas of each pool. A replica changes its role
where it is: gateways send it other requests from then on, and its process, weights and cache stay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from penstock.cluster.replica import Member, ReplicaManager, ReplicaSpec
from penstock.cluster.scaling import PoolScaler
from penstock.control.autoscaler import ROLES, AutoscalerConfig, Convert, PoolRole, RolePools, Signals
from penstock.core.config import ScalingConfig
from penstock.core.errors import ConfigError, Conflict, InvalidRequest, NotFound
from penstock.router import ReplicaState

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
    return [scaling_of_role(autoscaling(config, totals[key[0]]), config, first[key]) for key in pools]


def scaling_of_role(
    scaling: AutoscalerConfig | None, config: ScalingConfig, spec: ReplicaSpec
) -> AutoscalerConfig | None:
    """Return the settings of one pool of a model whose replicas are scaled by `scaling` together. A prefill and a
    decode pool need one replica each, whatever the ceiling is."""
    if scaling is None or spec.role == "both":
        return scaling
    itl_target_ms = spec.engine.scheduler.itl_target_ms
    ceiling = max(len(ROLES), scaling.max_replicas)
    return replace(
        scaling,
        min_replicas=max(1, min(config.min_replicas or 1, ceiling // len(ROLES))),
        max_replicas=ceiling,
        itl_target_s=itl_target_ms / 1e3 if itl_target_ms and spec.role == "decode" else None,
    )


class RolePair:
    """The two pools of one model."""

    def __init__(self, manager: ReplicaManager, pools: dict[PoolRole, PoolScaler]) -> None:
        self._manager = manager
        self._pools = pools
        for pool in pools.values():
            pool.is_paired = True

    @property
    def model(self) -> str:
        return self._pools["decode"].spec.model

    @property
    def _is_compared(self) -> bool:
        """Return whether a release or an experiment compares revisions: then both pools stay as they are."""
        return any(pool.is_fixed or pool.is_releasing for pool in self._pools.values())

    @property
    def _is_of_one_revision(self) -> bool:
        """Return whether a replica of one pool is one of the other pool after a change of its role."""
        return len({pool.spec.revision for pool in self._pools.values()}) == 1

    def look(self, now: float, wall_s: float) -> None:
        """Look at the signals of both pools, decide, and begin to act."""
        pools = self._pools
        configs = {role: config for role in ROLES if (config := pools[role].config) is not None}
        if self._is_compared or len(configs) < len(ROLES):
            return
        signals = {role: self._signals(role, now) for role in ROLES}
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

    def obey(self, replica_id: str, role: str, now: float, wall_s: float) -> None:
        """Let a replica change its role, as an operator ordered. Raises Conflict for a replica that has to keep its
        role, and NotFound for an unknown one."""
        wanted = next((each for each in ROLES if each == role), None)
        if wanted is None:
            raise InvalidRequest(
                f"A replica cannot become {role!r}.", param="role", hint="It is prefill or decode."
            )
        member = self._member(replica_id)
        if (problem := self._why_kept(member, wanted)) is not None:
            raise Conflict(problem)
        self._manager.convert(replica_id, wanted)
        pool = self._pools[wanted]
        pool.note(f"convert {replica_id}: an operator's order", pool.signals(now), wall_s)
        for each in self._pools.values():  # the autoscaler waits before it changes either pool again
            each.state = replace(each.state, last_change_s=now, roomy_since_s=None)

    def _why_kept(self, member: Member, role: PoolRole) -> str | None:
        """Return a sentence that says why a replica keeps its role; None: it may change it."""
        if member.role == role:
            return f"The replica {member.id!r} works in the role {role} already."
        if member.replica.state is not ReplicaState.READY:
            return f"The replica {member.id!r} is {member.replica.state}, and only ready replicas change their roles."
        if self._is_compared:
            return f"A release or an experiment of {self.model!r} compares revisions, and no role changes meanwhile."
        if not self._is_of_one_revision:
            return f"The prefill and decode replicas of {self.model!r} have different settings."
        others = self._pools["decode" if role == "prefill" else "prefill"].serving(member.replica.revision)
        if not any(each.id != member.id and each.replica.state is ReplicaState.READY for each in others):
            return f"The replica {member.id!r} is the last one for {member.role}."
        return self._manager.why_role_stays(member.id)

    def _member(self, replica_id: str) -> Member:
        for pool in self._pools.values():
            for member in pool.members():
                if member.id == replica_id:
                    return member
        raise NotFound(f"There is no replica {replica_id!r} for prefill or decode.")

    def _signals(self, role: PoolRole, now: float) -> Signals:
        """Return the signals of a pool, with those replicas that can change their roles."""
        signals = self._pools[role].signals(now)
        replicas = tuple(
            replace(
                each, can_convert=self._is_of_one_revision and self._manager.why_role_stays(each.id) is None
            )
            for each in signals.replicas
        )
        return replace(signals, replicas=replicas)

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
        if role != "both":
            by_model.setdefault(pool.spec.model, {})[role] = pool
    return [RolePair(manager, paired) for paired in by_model.values() if len(paired) == len(ROLES)]
