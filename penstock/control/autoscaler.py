"""Decides how many replicas there should be: `decide(signals, state, now)`. Pure: knows no process, clock or cloud.

Each signal alone scales up, because each means that users wait or will wait soon. The signals are queued prefill
tokens over the drain rate, the time to first token against its target, KV utilisation and, in a pool with a target,
the time between tokens. The utilisation of an accelerator says nothing: it is high at half load too.

The fleet scales down when the present load would fit into fewer replicas, with room to spare. The thresholds for that
are a share of the thresholds for scaling up, and a number of replicas that was too few for a load is not tried again
at that load. So a constant load leads to a constant number of replicas.

`RolePools` sizes the prefill pool and the decode pool of one model together. Each pool has signals of its own: queued
prompt tokens and the time to first token for prefill, the time between tokens and KV utilisation for decode. The
pools share one ceiling. A pool that needs more first takes a replica that the other pool can spare, because no model
has to be loaded, and then starts a new one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Literal, TypeAlias

import msgspec

from penstock.core.figures import NotNegative, Positive, Share

_TTFT_GROWTH = 1.25  # a percentile does not say how many replicas are missing
_SAME_LOAD = 0.9  # a load of at least this share of another counts as the same


class AutoscalerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_replicas: int = 1  # 0: scale to zero when idle
    max_replicas: int = 8
    drain_target_s: Positive = 2.0  # queued prefill tokens should take no longer
    ttft_target_s: Positive = 1.0  # for the 95th percentile
    kv_target: Share = 0.85  # share of KV blocks in use
    itl_target_s: Positive | None = None  # for the 95th percentile; None: not a signal
    fit_share: float = 0.7  # of each target, that a smaller fleet must be predicted to stay under
    max_growth: float = 4.0  # times, in one decision
    up_cooldown_s: NotNegative = 30.0  # longer than the window that ttft_p95_s is taken over
    down_cooldown_s: NotNegative = 120.0  # after any change; as long a smaller fleet must have been enough
    idle_to_zero_s: NotNegative = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(f"from {self.min_replicas} to {self.max_replicas} replicas is no range")
        if not 0.0 < self.fit_share < 1.0 or not self.max_growth > 1.0:
            raise ValueError("fit_share is between 0 and 1, and max_growth above 1")


class Phase(enum.StrEnum):
    STARTING = "starting"  # or warming up
    READY = "ready"
    DRAINING = "draining"


class ReplicaSignal(msgspec.Struct, frozen=True):
    id: str
    phase: Phase
    num_requests: int = 0
    kv_utilisation: float = 0.0
    can_convert: bool = True  # to the other role of a model with prefill and decode pools


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """The present signals of one pool. Rates are means over some seconds."""

    replicas: tuple[ReplicaSignal, ...]
    queued_prefill_tokens: float = 0.0  # held requests included
    arriving_prefill_tokens_per_s: float = 0.0  # uncached
    # Prefill of one replica that has enough to do; None: not known yet.
    drain_tokens_per_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None  # between tokens of an answer
    held_requests: int = 0  # that wait for a first replica


class AutoscalerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state between two decisions. Survives a restart as JSON."""

    last_up_s: float | None = None
    last_change_s: float | None = None
    roomy_since_s: float | None = None  # since when one replica fewer would have been enough
    idle_since_s: float | None = None
    too_few: int = 0  # replicas, that were not enough ...
    too_few_load: float = 0.0  # ... for this many arriving tokens/s


class Start(msgspec.Struct, frozen=True, tag="start"):
    count: int
    reason: str


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Take these replicas out of draining, which is quicker than starting others."""

    replica_ids: tuple[str, ...]
    reason: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Send these replicas no new requests, and let them finish the ones they have."""

    replica_ids: tuple[str, ...]
    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End these replicas, which have drained."""

    replica_ids: tuple[str, ...]


Action: TypeAlias = Start | Resume | Drain | Stop


class Autoscaler:
    def __init__(self, config: AutoscalerConfig) -> None:
        self.config = config

    def decide(
        self, signals: Signals, state: AutoscalerState, now: float
    ) -> tuple[tuple[Action, ...], AutoscalerState]:
        drained = tuple(
            replica.id
            for replica in signals.replicas
            if replica.phase is Phase.DRAINING and not replica.num_requests
        )
        num_serving = _num_serving(signals)
        state = self._observe(signals, state, num_serving, now)
        wanted, reason = self._wanted(signals, state, num_serving, now)
        if wanted > num_serving:
            actions = _grow(signals, wanted - num_serving, reason)
            # A drained replica that is wanted back is not ended.
            resumed = {i for action in actions if isinstance(action, Resume) for i in action.replica_ids}
            drained = tuple(replica_id for replica_id in drained if replica_id not in resumed)
            state = msgspec.structs.replace(
                state,
                last_up_s=now,
                last_change_s=now,
                roomy_since_s=None,
                too_few=num_serving,
                too_few_load=signals.arriving_prefill_tokens_per_s,
            )
        elif wanted < num_serving:
            actions = [Drain(least_loaded(signals, num_serving - wanted), reason)]
            state = msgspec.structs.replace(state, last_change_s=now, roomy_since_s=None)
        else:
            actions = []
        if drained:
            actions.append(Stop(drained))
        return tuple(actions), state

    def num_spare(self, signals: Signals, state: AutoscalerState, now: float) -> int:
        """Return how many ready replicas another pool may have now: fewer have been enough for `up_cooldown_s`, and
        nothing has changed meanwhile."""
        config, num_serving = self.config, _num_serving(signals)
        pause_s = config.up_cooldown_s
        if not _was_so_for(state.roomy_since_s, pause_s, now) or not _has_passed(
            state.last_change_s, pause_s, now
        ):
            return 0
        num_ready = sum(replica.phase is Phase.READY for replica in signals.replicas)
        most = min(num_serving - max(1, config.min_replicas), num_ready - 1)
        return next(
            (count for count in range(most, 0, -1) if self._fits(signals, state, num_serving - count)), 0
        )

    def _observe(
        self, signals: Signals, state: AutoscalerState, num_serving: int, now: float
    ) -> AutoscalerState:
        """Note since when one replica fewer would have been enough."""
        is_roomy = num_serving > 1 and self._fits(signals, state, num_serving - 1)
        is_idle = not (
            signals.queued_prefill_tokens
            or signals.held_requests
            or signals.arriving_prefill_tokens_per_s
            or any(replica.num_requests for replica in signals.replicas)
        )
        return msgspec.structs.replace(
            state,
            roomy_since_s=_since(state.roomy_since_s, is_roomy, now),
            idle_since_s=_since(state.idle_since_s, is_idle, now),
        )

    def _wanted(
        self, signals: Signals, state: AutoscalerState, num_serving: int, now: float
    ) -> tuple[int, str]:
        config = self.config
        if num_serving < config.min_replicas:
            return config.min_replicas, "below the floor"
        if num_serving > config.max_replicas:
            return config.max_replicas, "above the ceiling"
        if not num_serving:
            return self._first_replicas(signals)
        needed, reason = max(self._needs(signals, num_serving), default=(num_serving, ""))
        if needed > num_serving:
            if not _has_passed(state.last_up_s, config.up_cooldown_s, now):
                return num_serving, ""
            most = max(num_serving + 1, int(num_serving * config.max_growth))
            return min(needed, most, config.max_replicas), reason
        if not _has_passed(state.last_change_s, config.down_cooldown_s, now):
            return num_serving, ""
        if not config.min_replicas and _was_so_for(state.idle_since_s, config.idle_to_zero_s, now):
            return 0, "idle"
        if num_serving > max(1, config.min_replicas) and _was_so_for(
            state.roomy_since_s, config.down_cooldown_s, now
        ):
            return num_serving - 1, "fewer are enough"
        return num_serving, ""

    def _first_replicas(self, signals: Signals) -> tuple[int, str]:
        if not signals.held_requests:
            return 0, ""
        by_queue = [count for count, _ in self._queue_needs(signals)]
        return min(max([1, *by_queue]), self.config.max_replicas), "requests are held"

    def _needs(self, signals: Signals, num_serving: int) -> Iterator[tuple[int, str]]:
        """Return the number of replicas that each signal asks for, without signals that ask for no more."""
        config = self.config
        yield from self._queue_needs(signals)
        ready = [replica for replica in signals.replicas if replica.phase is Phase.READY]
        # The percentile is of the past: replicas that are still starting may already be enough.
        is_settled = len(ready) == num_serving
        if is_settled and signals.ttft_p95_s is not None and signals.ttft_p95_s > config.ttft_target_s:
            yield max(num_serving + 1, ceil(num_serving * _TTFT_GROWTH)), "time to first token"
        itl_target_s = config.itl_target_s
        if is_settled and itl_target_s and (signals.itl_p95_s or 0.0) > itl_target_s:
            yield max(num_serving + 1, ceil(num_serving * _TTFT_GROWTH)), "time between tokens"
        if ready:
            in_use = sum(replica.kv_utilisation for replica in ready)
            if in_use / len(ready) > config.kv_target:
                yield ceil(in_use / config.kv_target), "KV utilisation"

    def _queue_needs(self, signals: Signals) -> Iterator[tuple[int, str]]:
        if signals.drain_tokens_per_s:
            seconds_of_one = signals.queued_prefill_tokens / signals.drain_tokens_per_s
            yield ceil(seconds_of_one / self.config.drain_target_s), "queued prefill tokens"

    def _fits(self, signals: Signals, state: AutoscalerState, count: int) -> bool:
        """Return whether this many replicas are predicted to stay well within every target."""
        config = self.config
        share = config.fit_share
        load = signals.arriving_prefill_tokens_per_s
        if load and count <= state.too_few and load >= _SAME_LOAD * state.too_few_load:
            return False
        ready = [replica for replica in signals.replicas if replica.phase is Phase.READY]
        if sum(replica.kv_utilisation for replica in ready) > share * config.kv_target * count:
            return False
        now_serving = max(1, len(ready))
        for found_s, target_s in (
            (signals.ttft_p95_s, config.ttft_target_s),
            (signals.itl_p95_s, config.itl_target_s),
        ):
            if found_s and target_s and found_s * now_serving > share * target_s * count:
                return False
        if not signals.drain_tokens_per_s:
            return not signals.queued_prefill_tokens
        capacity = count * signals.drain_tokens_per_s
        return (
            load <= share * capacity
            and signals.queued_prefill_tokens <= share * config.drain_target_s * capacity
        )


def _num_serving(signals: Signals) -> int:
    return sum(replica.phase is not Phase.DRAINING for replica in signals.replicas)


def _grow(signals: Signals, count: int, reason: str) -> list[Action]:
    draining = [replica.id for replica in signals.replicas if replica.phase is Phase.DRAINING]
    resumed = tuple(draining[:count])
    actions: list[Action] = []
    if resumed:
        actions.append(Resume(resumed, reason))
    if count > len(resumed):
        actions.append(Start(count - len(resumed), reason))
    return actions


def least_loaded(signals: Signals, count: int) -> tuple[str, ...]:
    """Return the replicas with the fewest unfinished requests, the newest of equals. Starting replicas have none."""
    serving = [
        (replica.phase is Phase.READY, replica.num_requests, -position, replica.id)
        for position, replica in enumerate(signals.replicas)
        if replica.phase is not Phase.DRAINING
    ]
    return tuple(replica_id for *_, replica_id in sorted(serving)[:count])


def _since(before: float | None, is_so: bool, now: float) -> float | None:
    if not is_so:
        return None
    return now if before is None else before


def _was_so_for(since_s: float | None, duration_s: float, now: float) -> bool:
    return since_s is not None and now - since_s >= duration_s


def _has_passed(last_s: float | None, cooldown_s: float, now: float) -> bool:
    return last_s is None or now - last_s >= cooldown_s


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
