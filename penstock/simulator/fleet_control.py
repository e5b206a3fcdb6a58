"""What happens to a fleet besides requests: heartbeats, faults, scaling, and leaving out slow replicas.

Carries out in virtual time what `control` decides, as the cluster room does for real.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from penstock.control.autoscaler import (
    Action,
    Autoscaler,
    AutoscalerState,
    Drain,
    Phase,
    ReplicaSignal,
    Resume,
    Signals,
    Start,
    Stop,
)
from penstock.control.outliers import OutlierDetector, OutlierState
from penstock.router import ReplicaState
from penstock.simulator.events import Rank
from penstock.simulator.faults import Fault, Kill, LoseNews, SlowDown
from penstock.simulator.fleet import Member
from penstock.simulator.fleet_driver import FleetDriver
from penstock.simulator.news import News

_MIN_STEPS = 5  # for the mean length of a step to mean anything
_PHASES = {
    ReplicaState.STARTING: Phase.STARTING,
    ReplicaState.READY: Phase.READY,
    ReplicaState.UNHEALTHY: Phase.READY,  # left out for a while, but there
    ReplicaState.DRAINING: Phase.DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTimes:
    heartbeat_s: float = 0.1
    control_s: float = 5.0  # between two looks at the signals
    start_s: float = 30.0  # from deciding on a replica to its first request


class FleetControl:
    def __init__(
        self,
        driver: FleetDriver,
        news: News,
        times: ControlTimes,
        autoscaler: Autoscaler | None,
        outliers: OutlierDetector | None,
    ) -> None:
        self._driver = driver
        self._fleet = driver.fleet
        self._news = news
        self._times = times
        self._autoscaler = autoscaler
        self._scaling = AutoscalerState()
        self._outliers = outliers
        self._outlier_state = OutlierState()
        self._arrived_tokens = 0.0  # by the last look
        self.sizes: list[tuple[float, int]] = []  # when the number of serving replicas changed, and to what
        self.num_ejections = 0

    def begin(self, faults: Iterable[Fault]) -> None:
        events = self._driver.events
        events.at(self._times.heartbeat_s, Rank.NEWS, self._beat)
        events.at(self._times.control_s, Rank.CONTROL, self._look)
        for fault in faults:
            events.at(fault.at_s, Rank.FAULT, partial(self._strike, fault))

    def _beat(self, now: float) -> None:
        self._news.send(now)
        if not self._driver.is_done:
            self._driver.events.at(now + self._times.heartbeat_s, Rank.NEWS, self._beat)

    def _strike(self, fault: Fault, now: float) -> None:
        events = self._driver.events
        if isinstance(fault, LoseNews):
            self._news.lost_share = fault.share
            events.at(fault.until_s, Rank.FAULT, self._news_arrives_again)
            return
        member = self._fleet.all_members[fault.replica]
        if isinstance(fault, SlowDown):
            member.replica.slowdown = fault.factor
            if fault.until_s is not None:
                full_speed = SlowDown(fault.until_s, fault.replica, 1.0)
                events.at(fault.until_s, Rank.FAULT, partial(self._strike, full_speed))
        elif isinstance(fault, Kill) and member.id in self._fleet.members:
            member.is_alive = False
            events.at(now + fault.noticed_after_s, Rank.FAULT, partial(self._driver.lose, member))
            if fault.restarts_after_s is not None:
                events.at(now + fault.restarts_after_s, Rank.CONTROL, self._replace)

    def _news_arrives_again(self, now: float) -> None:
        self._news.lost_share = 0.0

    def _replace(self, now: float) -> None:
        self._driver.ready(self._fleet.start(ReplicaState.STARTING), now)

    def _look(self, now: float) -> None:
        if self._outliers is not None:
            self._leave_out_slow(self._outliers, now)
        if self._autoscaler is not None:
            signals = self._signals(now)
            actions, self._scaling = self._autoscaler.decide(signals, self._scaling, now)
            for action in actions:
                self._act(action, now)
        num_serving = sum(_PHASES[state] is Phase.READY for state in self._fleet.states().values())
        if not self.sizes or self.sizes[-1][1] != num_serving:
            self.sizes.append((now, num_serving))
        if not self._driver.is_done:
            self._driver.events.at(now + self._times.control_s, Rank.CONTROL, self._look)

    def _leave_out_slow(self, detector: OutlierDetector, now: float) -> None:
        figures = {member.id: member.recent_step_s(_MIN_STEPS) for member in self._fleet.members.values()}
        before = self._outlier_state.ejected()
        self._outlier_state = detector.observe(figures, self._outlier_state, now)
        ejected = self._outlier_state.ejected()
        states = self._fleet.states()
        for replica_id in ejected - before:
            self.num_ejections += 1
            if states.get(replica_id) is ReplicaState.READY:
                self._fleet.set_state(replica_id, ReplicaState.UNHEALTHY)
        for replica_id in before - ejected:
            if states.get(replica_id) is ReplicaState.UNHEALTHY:
                self._fleet.set_state(replica_id, ReplicaState.READY)

    def _signals(self, now: float) -> Signals:
        driver = self._driver
        states = self._fleet.states()
        members = self._fleet.members.values()
        arrived = driver.arriving_tokens - self._arrived_tokens
        self._arrived_tokens = driver.arriving_tokens
        queued = sum(member.replica.scheduler.stats().num_waiting_tokens for member in members)
        ledgers = [
            ledger for member in members if (ledger := driver.routers[0].ledger(member.id)) is not None
        ]
        return Signals(
            replicas=tuple(
                ReplicaSignal(
                    member.id, _PHASES[states[member.id]], len(member.journeys), member.replica.cache.usage
                )
                for member in members
            ),
            queued_prefill_tokens=queued + driver.held_tokens,
            arriving_prefill_tokens_per_s=arrived / self._times.control_s,
            drain_tokens_per_s=len(ledgers) / sum(ledger.token_s for ledger in ledgers) if ledgers else None,
            ttft_p95_s=driver.tally.recent_ttft_p95_s(now),
            held_requests=len(driver.held),
        )

    def _act(self, action: Action, now: float) -> None:
        if isinstance(action, Start):
            for _ in range(action.count):
                member = self._fleet.start(ReplicaState.STARTING)
                ready = partial(self._ready, member)
                self._driver.events.at(now + self._times.start_s, Rank.CONTROL, ready)
        elif isinstance(action, Drain):
            for replica_id in action.replica_ids:
                self._fleet.set_state(replica_id, ReplicaState.DRAINING)
        elif isinstance(action, Resume):
            for replica_id in action.replica_ids:
                self._fleet.set_state(replica_id, ReplicaState.READY)
        elif isinstance(action, Stop):
            for replica_id in action.replica_ids:
                self._driver.lose(self._fleet.members[replica_id], now)

    def _ready(self, member: Member, now: float) -> None:
        if self._fleet.states().get(member.id) is ReplicaState.STARTING:
            self._driver.ready(member, now)
