"""Sizes the prefill pool and the decode pool of one model together. Pure, like `autoscaler`, which looks at one pool.

Each pool has signals of its own: queued prompt tokens and the time to first token for prefill, the time between
tokens and KV utilisation for decode. The pools share one ceiling. A pool that needs more first takes a replica that
the other pool can spare, because no model has to be loaded, and then starts a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from penstock.control.autoscaler import (
    Action,
    Autoscaler,
    AutoscalerConfig,
    AutoscalerState,
    Phase,
    Signals,
    Start,
    least_loaded,
)

PoolRole: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[PoolRole, PoolRole] = ("prefill", "decode")


class Convert(msgspec.Struct, frozen=True, tag="convert"):
    """Let these replicas of the other pool work for this pool from now on."""

    replica_ids: tuple[str, ...]
    reason: str


PairActions: TypeAlias = dict[PoolRole, tuple[Action | Convert, ...]]
PairStates: TypeAlias = dict[PoolRole, AutoscalerState]


def signals_of(role: PoolRole, signals: Signals) -> Signals:
    """Return the signals that a pool of this role is sized by, without those of the other role."""
    if role == "decode":
        return msgspec.structs.replace(
            signals, queued_prefill_tokens=0.0, drain_tokens_per_s=None, ttft_p95_s=None
        )
    replicas = tuple(msgspec.structs.replace(each, kv_utilisation=0.0) for each in signals.replicas)
    return msgspec.structs.replace(signals, replicas=replicas, itl_p95_s=None)


class RolePools:
    """`configs` hold the floor of each pool. `max_replicas` is for both together."""

    def __init__(self, configs: Mapping[PoolRole, AutoscalerConfig], max_replicas: int) -> None:
        # Without both, no request could be served.
        self._configs = {
            role: msgspec.structs.replace(
                configs[role], min_replicas=max(1, configs[role].min_replicas), max_replicas=max_replicas
            )
            for role in ROLES
        }
        self._max_replicas = max_replicas
        if sum(config.min_replicas for config in self._configs.values()) > max_replicas:
            raise ValueError(f"{max_replicas} replicas are fewer than the floors of both pools")

    def decide(
        self, signals: Mapping[PoolRole, Signals], states: Mapping[PoolRole, AutoscalerState], now: float
    ) -> tuple[PairActions, PairStates]:
        """Return the actions and the new state of each pool."""
        seen = {role: signals_of(role, signals[role]) for role in ROLES}
        num_left = self._max_replicas - sum(_num_serving(each) for each in seen.values())
        actions: PairActions = {"prefill": (), "decode": ()}
        after = dict(states)
        given: set[str] = set()  # replicas that change their pool now
        needier, other = sorted(ROLES, key=lambda role: -_pressure(seen[role], self._configs[role]))
        for role, partner in ((needier, other), (other, needier)):
            present = _without(seen[role], given)
            spare = self._spare(partner, seen[partner], after[partner], now) if not given else ()
            if role == needier:
                num_more = max(0, num_left) + len(spare)
            else:  # where there are too many replicas, this pool has to leave some
                num_more = num_left + len(spare)
            scaler = self._scaler(role, present, num_more)
            chosen, after[role] = scaler.decide(present, after[role], now)
            actions[role], taken = _converted(chosen, spare)
            if taken:
                given |= set(taken)
                after[partner] = msgspec.structs.replace(
                    after[partner], last_change_s=now, roomy_since_s=None
                )
            num_left -= sum(action.count for action in actions[role] if isinstance(action, Start))
        return actions, after

    def _spare(self, role: PoolRole, signals: Signals, state: AutoscalerState, now: float) -> tuple[str, ...]:
        """Return the replicas that a pool can spare now, those with the least to do first."""
        count = Autoscaler(self._configs[role]).num_spare(signals, state, now)
        ready = tuple(each for each in signals.replicas if each.phase is Phase.READY and each.can_convert)
        return least_loaded(msgspec.structs.replace(signals, replicas=ready), count)

    def _scaler(self, role: PoolRole, signals: Signals, num_more: int) -> Autoscaler:
        """Return the autoscaler of a pool that may grow by this many replicas."""
        config = self._configs[role]
        ceiling = max(config.min_replicas, _num_serving(signals) + num_more)
        return Autoscaler(msgspec.structs.replace(config, max_replicas=ceiling))


def _converted(
    chosen: tuple[Action, ...], spare: tuple[str, ...]
) -> tuple[tuple[Action | Convert, ...], tuple[str, ...]]:
    """Replace starts by conversions, as far as the other pool can spare replicas. Returns those replicas too."""
    actions: list[Action | Convert] = []
    taken: tuple[str, ...] = ()
    for action in chosen:
        if isinstance(action, Start) and spare:
            taken = spare[: action.count]
            actions.append(Convert(taken, action.reason))
            if action.count > len(taken):
                actions.append(Start(action.count - len(taken), action.reason))
        else:
            actions.append(action)
    return tuple(actions), taken


def _pressure(signals: Signals, config: AutoscalerConfig) -> float:
    """Return the largest signal as a share of its target: the pool that needs more goes first."""
    ready = [each for each in signals.replicas if each.phase is Phase.READY]
    pace = (signals.drain_tokens_per_s or 0.0) * len(ready)
    return max(
        signals.queued_prefill_tokens / pace / config.drain_target_s if pace else 0.0,
        (signals.ttft_p95_s or 0.0) / config.ttft_target_s,
        (signals.itl_p95_s or 0.0) / config.itl_target_s if config.itl_target_s else 0.0,
        sum(each.kv_utilisation for each in ready) / len(ready) / config.kv_target if ready else 0.0,
    )


def _without(signals: Signals, ids: set[str]) -> Signals:
    if not ids:
        return signals
    left = tuple(each for each in signals.replicas if each.id not in ids)
    return msgspec.structs.replace(signals, replicas=left)


def _num_serving(signals: Signals) -> int:
    return sum(each.phase is not Phase.DRAINING for each in signals.replicas)
