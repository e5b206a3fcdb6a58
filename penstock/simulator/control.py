"""Brings heartbeats, KV events, faults and scaling to a simulated fleet.

Carries out in virtual time what `control` decides, as the cluster room does for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

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
from penstock.core.messages import EngineStats, KVEvent
from penstock.dispatch import Dispatcher
from penstock.router import ReplicaState
from penstock.simulator.driver import Driver, Rank
from penstock.simulator.fleet import Member
from penstock.simulator.report import Tally
from penstock.simulator.workload import Fault, Kill, LoseKVEvents, RestartGateway, SlowDown, StepClock

_PHASES = {
    ReplicaState.STARTING: Phase.STARTING,
    ReplicaState.READY: Phase.READY,
    ReplicaState.DRAINING: Phase.DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTimes:
    heartbeat_s: float = 0.1
    message_delay_s: float = 0.02  # of heartbeats and KV events
    control_s: float = 5.0  # between two looks at the signals
    start_s: float = 30.0  # from deciding on a replica to its first request


class FleetControl:
    def __init__(
        self, driver: Driver, tally: Tally, times: ControlTimes, autoscaler: Autoscaler | None, rng: Random
    ) -> None:
        self._driver = driver
        self._fleet = driver.fleet
        self._tally = tally
        self._times = times
        self._autoscaler = autoscaler
        self._scaling = AutoscalerState()
        self._rng = rng
        self._lost_share = 0.0  # of batches of KV events
        self._arrived_tokens = 0.0  # by the last look
        self.sizes: list[tuple[float, int]] = []  # when the number of serving replicas changed, and to what
        self.on_look: Callable[[float], None] | None = None  # called whenever signals are looked at

    def begin(self, faults: Iterable[Fault]) -> None:
        events = self._driver.events
        events.at(self._times.heartbeat_s, Rank.REPORT, self._beat)
        events.at(self._times.control_s, Rank.CONTROL, self._look)
        for fault in faults:
            events.at(fault.at_s, Rank.FAULT, partial(self._strike, fault))

    def _beat(self, now: float) -> None:
        """Send every gateway the load of every replica and the changes of its cache."""
        for member in self._fleet.members.values():
            if not member.is_alive or member.state is ReplicaState.STARTING:
                continue
            self._driver.settle(member, now)
            stats = member.stats()
            kv_events = tuple(member.replica.cache.take_events())
            for gateway in range(len(self._driver.dispatchers)):
                is_lost = bool(kv_events) and self._rng.random() < self._lost_share
                report = partial(self._report, gateway, member.id, stats, () if is_lost else kv_events)
                self._driver.events.at(now + self._times.message_delay_s, Rank.REPORT, report)
        if not self._driver.is_done:
            self._driver.events.at(now + self._times.heartbeat_s, Rank.REPORT, self._beat)

    def _report(
        self, gateway: int, replica_id: str, stats: EngineStats, events: tuple[KVEvent, ...], now: float
    ) -> None:
        dispatcher = self._driver.dispatchers[gateway]
        self._driver.carry_out(gateway, dispatcher.heartbeat(replica_id, stats, now), now)
        self._driver.carry_out(gateway, dispatcher.kv_events(replica_id, events, now), now)

    def _strike(self, fault: Fault, now: float) -> None:
        events = self._driver.events
        if isinstance(fault, LoseKVEvents):
            self._lost_share = fault.share
            events.at(fault.until_s, Rank.FAULT, self._end_of_loss)
            return
        if isinstance(fault, RestartGateway):
            config = self._driver.dispatchers[fault.gateway].config
            dispatcher = Dispatcher(config, Random(self._rng.random()), now)
            self._driver.restart_gateway(fault.gateway, dispatcher, now)
            return
        member = self._fleet.all_members[fault.replica]
        if isinstance(fault, SlowDown):
            self._driver.touch(member, now)
            member.replica.slowdown = fault.factor
            if fault.until_s is not None:
                full_speed = SlowDown(fault.until_s, fault.replica, 1.0)
                events.at(fault.until_s, Rank.FAULT, partial(self._strike, full_speed))
        elif isinstance(fault, StepClock):
            self._driver.touch(member, now)
            member.replica.step_clock(fault.seconds)
        elif isinstance(fault, Kill) and member.is_alive and member.id in self._fleet.members:
            self._driver.tell_all(member, now)
            member.is_alive = False
            events.at(now + fault.noticed_after_s, Rank.FAULT, partial(self._notice, fault, member))

    def _end_of_loss(self, now: float) -> None:
        self._lost_share = 0.0

    def _notice(self, fault: Kill, member: Member, now: float) -> None:
        """Replace a dead replica by a new one, as a supervisor does, unless the fault says otherwise."""
        del self._fleet.members[member.id]
        if self._driver.transfers is not None:
            self._driver.transfers.lost(member, now)
        if fault.restarts_after_s is not None:
            successor = self._fleet.start(ReplicaState.STARTING, member.role, member.revision)
            ready_s = max(now, fault.at_s + fault.restarts_after_s)
            self._driver.events.at(ready_s, Rank.CONTROL, partial(self._driver.ready, successor))
        self._driver.update(now)

    def _look(self, now: float) -> None:
        if self.on_look is not None:
            self.on_look(now)
        if self._autoscaler is not None:
            actions, self._scaling = self._autoscaler.decide(self._signals(now), self._scaling, now)
            for action in actions:
                self._act(action, now)
            if actions:
                self._driver.update(now)
        num_serving = sum(member.state is ReplicaState.READY for member in self._fleet.members.values())
        if not self.sizes or self.sizes[-1][1] != num_serving:
            self.sizes.append((now, num_serving))
        if not self._driver.is_done:
            self._driver.events.at(now + self._times.control_s, Rank.CONTROL, self._look)

    def _signals(self, now: float) -> Signals:
        driver = self._driver
        members = self._fleet.members.values()
        for member in members:
            driver.settle(member, now)
        arrived = driver.arrived_tokens - self._arrived_tokens
        self._arrived_tokens = driver.arrived_tokens
        queued = sum(member.replica.scheduler.stats().num_waiting_tokens for member in members)
        router = driver.dispatchers[0].router
        loads = [load for member in members if (load := router.load(member.id)) is not None]
        rooms = [dispatcher.waiting for dispatcher in driver.dispatchers]
        return Signals(
            replicas=tuple(
                ReplicaSignal(
                    member.id,
                    _PHASES[member.state],
                    member.replica.num_requests,
                    member.replica.cache.usage,
                )
                for member in members
            ),
            queued_prefill_tokens=queued + sum(room.num_tokens() for room in rooms),
            arriving_prefill_tokens_per_s=arrived / self._times.control_s,
            drain_tokens_per_s=len(loads) / sum([load.token_s for load in loads], 0.0) if loads else None,
            ttft_p95_s=self._tally.recent_ttft_p95_s(now),
            held_requests=sum(room.num_requests() for room in rooms),
        )

    def _act(self, action: Action, now: float) -> None:
        if isinstance(action, Start):
            for _ in range(action.count):
                ready = partial(self._driver.ready, self._fleet.start(ReplicaState.STARTING))
                self._driver.events.at(now + self._times.start_s, Rank.CONTROL, ready)
        elif isinstance(action, Drain | Resume):
            state = ReplicaState.DRAINING if isinstance(action, Drain) else ReplicaState.READY
            for replica_id in action.replica_ids:
                self._fleet.members[replica_id].state = state
        elif isinstance(action, Stop):
            for replica_id in action.replica_ids:
                self._driver.tell_all(self._fleet.members[replica_id], now)
                self._fleet.members.pop(replica_id).is_alive = False
