"""Carries out the autoscaler's decisions for one pool of replicas: gathers its signals, starts, drains and stops.

A pool is the replicas of one model and role, which are interchangeable. `control/autoscaler` decides how many there
should be; the supervisor starts and stops them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.cluster.control_messages import RecentRate, RecentTimes, Report, Sample
from penstock.cluster.leadership import PoolState
from penstock.cluster.replica import Member, ReplicaManager, ReplicaSpec
from penstock.control.autoscaler import (
    Action,
    Autoscaler,
    AutoscalerConfig,
    AutoscalerState,
    Drain,
    Phase,
    ReplicaSignal,
    Resume,
    Signals,
    Start,
    Stop,
    signals_of,
)
from penstock.core.cluster_view import DecisionView, PoolView, ReplicaOrder
from penstock.core.errors import Conflict, InvalidRequest, ModelNotFound, NotFound, PenstockError
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)

MAX_TTFT_WINDOW_S = 20.0
MAX_ARRIVAL_WINDOW_S = 10.0
MIN_WINDOW_S = 1.0
FIRST_RETRY_S = 1.0  # after a replica could not be started, doubling
LAST_RETRY_S = 60.0
MAX_DECISIONS = 50  # of each pool, that operators are shown
_PHASES = {
    ReplicaState.STARTING: Phase.STARTING,
    ReplicaState.WARMING: Phase.STARTING,
    ReplicaState.READY: Phase.READY,
    ReplicaState.DRAINING: Phase.DRAINING,
    ReplicaState.UNHEALTHY: Phase.STARTING,  # it is being replaced
}


def _shifted(state: AutoscalerState, by_s: float) -> AutoscalerState:
    """Return the same state with its times on another clock. Milliseconds are exact enough, and stay the same."""
    times = {
        name: round(value + by_s, 3)
        for name in ("last_up_s", "last_change_s", "roomy_since_s", "idle_since_s")
        if (value := getattr(state, name)) is not None
    }
    return replace(state, **times)


class PoolFigures:
    """Adds up the reports of all gateways about one pool."""

    def __init__(self, config: AutoscalerConfig) -> None:
        # Times from before the last change must not cause another change.
        window_s = max(MIN_WINDOW_S, min(MAX_TTFT_WINDOW_S, 0.75 * config.up_cooldown_s))
        self.ttfts_s = RecentTimes(window_s)
        self.itls_s = RecentTimes(window_s)
        self.arrived_tokens = RecentRate(
            max(MIN_WINDOW_S, min(MAX_ARRIVAL_WINDOW_S, 0.5 * config.down_cooldown_s))
        )
        self._held: dict[int, tuple[int, int]] = {}  # requests and prompt tokens, by gateway
        self._token_s: dict[str, float] = {}  # by replica

    @property
    def held_requests(self) -> int:
        return sum(requests for requests, _ in self._held.values())

    @property
    def held_tokens(self) -> int:
        return sum(tokens for _, tokens in self._held.values())

    def add(self, gateway: int, model: str, revisions: Collection[str], report: Report, now: float) -> None:
        """Add a report. Times of these revisions count."""
        of_model = report.models.get(model)
        if of_model is not None:
            self.arrived_tokens.add(of_model.arrived_tokens, now)
            self._held[gateway] = of_model.held_requests, of_model.held_tokens
        for sample in report.samples:
            if sample.model == model and sample.revision in revisions:
                self._add_sample(sample, now)
        self._token_s.update(report.token_s)

    def forget(self, gateway: int) -> None:
        """Forget a gateway that has gone, and its waiting requests."""
        self._held.pop(gateway, None)

    def drain_tokens_per_s(self, ready: list[str]) -> float | None:
        """Return the prompt tokens per second of one replica: the mean of the ready replicas, or of all known ones
        when none is ready."""
        known = [self._token_s[replica_id] for replica_id in ready if replica_id in self._token_s]
        known = known or list(self._token_s.values())
        self._token_s = {
            name: self._token_s[name] for name in ready if name in self._token_s
        } or self._token_s
        return len(known) / sum(known) if known and sum(known) > 0.0 else None

    def _add_sample(self, sample: Sample, now: float) -> None:
        if sample.ttft_s is not None:
            self.ttfts_s.add(sample.ttft_s, now)
        if sample.itl_s is not None:
            self.itls_s.add(sample.itl_s, now)


class PoolScaler:
    """Scales one pool. `spec` describes new replicas. Without a config the number of replicas stays as it is."""

    def __init__(
        self,
        manager: ReplicaManager,
        spec: ReplicaSpec,
        config: AutoscalerConfig | None,
        drain_timeout_s: float,
    ) -> None:
        self._manager = manager
        self.spec = spec
        self.figures = PoolFigures(config or AutoscalerConfig())
        self.is_releasing = False  # while another revision is compared with this one, none of this one leaves
        self.is_fixed = False  # while an experiment has chosen the number of replicas
        self.is_paired = False  # where `role_scaling` sizes this pool together with another
        self._config = config
        self._drain_timeout_s = drain_timeout_s
        self.state = AutoscalerState()
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # to start a replica, in a row
        self._retry_at_s = 0.0
        self._num_ups = 0
        self._num_downs = 0
        self._last_decision = ""
        self._last_decision_at: float | None = None
        self.decisions: deque[DecisionView] = deque(maxlen=MAX_DECISIONS)

    @property
    def key(self) -> str:
        return f"{self.spec.model}/{self.spec.role}"

    @property
    def config(self) -> AutoscalerConfig | None:
        return self._config

    def configure(self, config: AutoscalerConfig | None) -> None:
        """Scale within other bounds from now on."""
        self._config = config

    @property
    def decided(self) -> tuple[AutoscalerState, int, int]:
        """Return the fields that change with decisions."""
        return self.state, self._num_ups, self._num_downs

    def kept(self, now: float, wall_s: float) -> PoolState:
        """Return the state that the next leader of a shared fleet continues with."""
        return PoolState(
            state=_shifted(self.state, wall_s - now),
            written_at=round(wall_s, 3),
            num_scale_ups=self._num_ups,
            num_scale_downs=self._num_downs,
            last_decision=self._last_decision,
            last_decision_at=self._last_decision_at,
        )

    def restore(self, kept: PoolState, now: float, wall_s: float) -> None:
        """Continue where an earlier leader was, whose clock may differ. A time that is later than now counts as now.
        The time for which fewer replicas have been enough starts again, because by another clock a moment could seem
        long enough to drain replicas."""
        latest_s = wall_s if kept.written_at is None else kept.written_at
        times = (kept.state.last_up_s, kept.state.last_change_s, latest_s)
        ahead_s = max(time_s - wall_s for time_s in times if time_s is not None)
        state = _shifted(kept.state, now - wall_s - max(0.0, ahead_s))
        self.state = replace(state, roomy_since_s=None, idle_since_s=None)
        self._num_ups, self._num_downs = kept.num_scale_ups, kept.num_scale_downs
        self._last_decision, self._last_decision_at = kept.last_decision, kept.last_decision_at

    def members(self) -> list[Member]:
        """Return all replicas of this pool, of every revision."""
        return [
            member
            for member in self._manager.members()
            if (member.spec.model, member.spec.role) == (self.spec.model, self.spec.role)
            and member.replica.state is not ReplicaState.GONE
        ]

    def serving(self, revision: str) -> list[Member]:
        """Return the replicas of a revision that serve or are starting."""
        return [
            member
            for member in self.members()
            if member.replica.revision == revision and member.replica.state is not ReplicaState.DRAINING
        ]

    def look(self, now: float, wall_s: float) -> None:
        """Look at the signals, decide, and begin to act."""
        if self._config is None or self.is_fixed or self.is_paired:
            return
        signals = self.signals(now)
        config = self._config
        if self.is_releasing:
            num_serving = sum(replica.phase is not Phase.DRAINING for replica in signals.replicas)
            floor = min(config.max_replicas, max(config.min_replicas, num_serving))
            config = replace(config, min_replicas=floor)
        actions, self.state = Autoscaler(config).decide(signals, self.state, now)
        for action in actions:
            self.act(action, signals, now, wall_s)

    def signals(self, now: float) -> Signals:
        members = [member for member in self.members() if member.replica.revision == self.spec.revision]
        replicas = [self._signal(member) for member in members]
        ready = [replica.id for replica in replicas if replica.phase is Phase.READY]
        queued = sum(self._manager.stats(member.id).num_waiting_tokens for member in members)
        signals = Signals(
            replicas=tuple(replicas),
            queued_prefill_tokens=queued + self.figures.held_tokens,
            arriving_prefill_tokens_per_s=self.figures.arrived_tokens.per_s(now),
            drain_tokens_per_s=self.figures.drain_tokens_per_s(ready),
            ttft_p95_s=self.figures.ttfts_s.percentile(95, now),
            itl_p95_s=self.figures.itls_s.percentile(95, now),
            held_requests=self.figures.held_requests,
        )
        return signals if self.spec.role == "both" else signals_of(self.spec.role, signals)

    def view(self, now: float) -> PoolView:
        signals = self.signals(now)
        phases = [replica.phase for replica in signals.replicas]
        ready = [replica for replica in signals.replicas if replica.phase is Phase.READY]
        config = self._config
        targets = config or AutoscalerConfig()
        return PoolView(
            model=self.spec.model,
            role=self.spec.role,
            revision=self.spec.revision,
            num_ready=len(ready),
            num_starting=phases.count(Phase.STARTING),
            num_draining=phases.count(Phase.DRAINING),
            min_replicas=config.min_replicas if config else len(phases),
            max_replicas=config.max_replicas if config else len(phases),
            queued_prefill_tokens=signals.queued_prefill_tokens,
            arriving_prefill_tokens_per_s=signals.arriving_prefill_tokens_per_s,
            drain_tokens_per_s=signals.drain_tokens_per_s,
            ttft_p95_s=signals.ttft_p95_s,
            kv_usage=sum(replica.kv_utilisation for replica in ready) / len(ready) if ready else 0.0,
            drain_target_s=targets.drain_target_s,
            ttft_target_s=targets.ttft_target_s,
            itl_p95_s=signals.itl_p95_s,
            itl_target_s=targets.itl_target_s,
            kv_target=targets.kv_target,
            held_requests=signals.held_requests,
            num_scale_ups=self._num_ups,
            num_scale_downs=self._num_downs,
            last_decision=self._last_decision,
            last_decision_at=self._last_decision_at,
        )

    def obey(self, order: ReplicaOrder, now: float, wall_s: float) -> None:
        """Begin to carry out an operator's order. Raises Conflict for a replica that is not in a state for it."""
        signals = self.signals(now)
        if order.action == "start":
            self.note("start 1: an operator's order", signals, wall_s)
            self._begin(self._launch())
            return
        replica_id = order.replica_id or ""
        state = next((each.replica.state for each in self.members() if each.id == replica_id), None)
        is_draining = state is ReplicaState.DRAINING
        if is_draining is (order.action == "drain") or (
            order.action == "drain" and state is not ReplicaState.READY
        ):
            raise Conflict(f"The replica {replica_id!r} is {state}, so it cannot {order.action}.")
        self.note(f"{order.action} {replica_id}: an operator's order", signals, wall_s)
        if order.action == "drain":
            self._drain(replica_id)
        else:
            self._resume(replica_id)

    async def remove(self, replica_ids: list[str]) -> None:
        """Drain and stop these replicas, all at the same time."""
        await asyncio.gather(*map(self._leave, replica_ids))

    async def close(self) -> None:
        tasks = [*self._tasks, *self._drains.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _signal(self, member: Member) -> ReplicaSignal:
        stats = self._manager.stats(member.id)
        usage = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        phase = _PHASES[member.replica.state]
        return ReplicaSignal(member.id, phase, stats.num_running + stats.num_waiting, usage)

    def act(self, action: Action, signals: Signals, now: float, wall_s: float) -> None:
        match action:
            case Start(count=count, reason=reason):
                if now < self._retry_at_s:
                    return
                self.note(f"start {count}: {reason}", signals, wall_s)
                self._num_ups += 1
                for _ in range(count):
                    self._begin(self._launch())
            case Resume(replica_ids=replica_ids, reason=reason):
                self.note(f"resume {len(replica_ids)}: {reason}", signals, wall_s)
                self._num_ups += 1
                for replica_id in replica_ids:
                    self._resume(replica_id)
            case Drain(replica_ids=replica_ids, reason=reason):
                self.note(f"drain {len(replica_ids)}: {reason}", signals, wall_s)
                self._num_downs += 1
                for replica_id in replica_ids:
                    self._drain(replica_id)
            case Stop(replica_ids=replica_ids):
                for replica_id in replica_ids:
                    if replica_id not in self._drains:  # else its drain is about to return, and stops it
                        self._begin(self._leave(replica_id))

    def note(self, decision: str, signals: Signals, wall_s: float) -> None:
        self._last_decision = decision
        self._last_decision_at = wall_s
        ready = [replica for replica in signals.replicas if replica.phase is Phase.READY]
        self.decisions.append(
            DecisionView(
                at=wall_s,
                model=self.spec.model,
                role=self.spec.role,
                decision=decision,
                num_replicas=len(signals.replicas),
                queued_prefill_tokens=signals.queued_prefill_tokens,
                ttft_p95_s=signals.ttft_p95_s,
                kv_usage=sum(replica.kv_utilisation for replica in ready) / len(ready) if ready else 0.0,
                held_requests=signals.held_requests,
            )
        )
        ttft = "unknown" if signals.ttft_p95_s is None else f"{signals.ttft_p95_s * 1e3:.0f} ms"
        logger.info(
            "autoscaler, %s: %s (replicas %d, queued prefill tokens %.0f, TTFT p95 %s, held requests %d)",
            self.spec.model,
            decision,
            len(signals.replicas),
            signals.queued_prefill_tokens,
            ttft,
            signals.held_requests,
        )

    async def _launch(self) -> None:
        try:
            await self._manager.launch(self.spec)
        except PenstockError as error:
            self._failures += 1
            pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 16))
            self._retry_at_s = asyncio.get_running_loop().time() + pause_s
            logger.error("a replica of %s could not be started: %s", self.spec.model, error.message)
        else:
            self._failures = 0

    def _drain(self, replica_id: str) -> None:
        task = asyncio.create_task(self._leave(replica_id))
        self._drains[replica_id] = task
        task.add_done_callback(lambda _: self._drains.pop(replica_id, None))

    async def _leave(self, replica_id: str) -> None:
        with contextlib.suppress(NotFound):  # it died meanwhile
            await self._manager.drain(replica_id, self._drain_timeout_s)
            await self._manager.stop(replica_id)

    def _resume(self, replica_id: str) -> None:
        if self._manager.resume(replica_id) and (task := self._drains.pop(replica_id, None)) is not None:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_one_revision(pools: Sequence[PoolScaler]) -> None:
    """Raise Conflict if the pools of a model have different settings: nothing can be compared with several revisions
    at once."""
    if len({pool.spec.revision for pool in pools}) > 1:
        raise Conflict(
            f"The prefill and decode replicas of {pools[0].spec.model!r} have different settings, and only one "
            "revision can be compared with another.",
            hint="Start all hosts with the same settings.",
        )


def served_model(pools: Iterable[PoolScaler], name: str | None) -> str:
    """Return the name of the model that an order is about; None stands for the only model."""
    models = list(dict.fromkeys(pool.spec.model for pool in pools))
    if name is None and len(models) == 1:
        return models[0]
    if name is None:
        raise InvalidRequest("Say which model: several are served here.", param="model")
    if name not in models:
        raise ModelNotFound(f"The model {name!r} is not served here.", param="model")
    return name
