"""Presents all replicas as one engine to a gateway process: the live driver of `dispatch`.

Passes requests, answers, heartbeats and time to the dispatcher, and carries out its actions over the connections.
Everything runs on one event loop, without locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, BinaryIO, Protocol

from msgspec.structs import replace

from penstock.cluster.connections import Connections
from penstock.cluster.host_record import HostRecord
from penstock.cluster.replica import Connector, Member, OnError, OnEvent
from penstock.cluster.replica_process import FreezeDetector
from penstock.cluster.transport import KeyPair
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineReady, EngineStats, KVEvent
from penstock.core.objective import RoutingWeights
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.dispatch import (
    Action,
    Arrived,
    Attempt,
    AttemptEnded,
    Cancel,
    Deliver,
    DispatchConfig,
    Dispatcher,
    Eject,
    Fail,
    FirstToken,
    ResyncKVEvents,
    Send,
    SubscribeKVEvents,
    Waits,
    WakeAt,
)
from penstock.dispatch.log import RecordingDispatcher
from penstock.dispatch.replicas import ReplicaRecord
from penstock.dispatch.requests import WaitingRoom
from penstock.router import ReplicaState, Router

logger = logging.getLogger(__name__)


RECONNECT_S = 1.0


class Reachability:
    """Finds the replicas of a shared fleet that one gateway cannot reach, though their hosts report them as ready. A
    supervisor watches the processes of its own machine, and not the network to that machine. A replica whose
    connection was cut, or that sends no heartbeat for too long, counts as unhealthy for a moment. Its requests
    continue elsewhere, and then the gateway connects to the replica again.

    `on_change` is called when `seen_from_here` would give another result.
    """

    def __init__(self, timeout_s: float, on_change: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._silences: dict[str, FreezeDetector] = {}  # of connected replicas
        self._unreachable: dict[str, asyncio.TimerHandle] = {}
        self._checking: asyncio.TimerHandle | None = None

    def seen_from_here(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """Return the members, and those that cannot be reached now as unhealthy."""
        if not self._unreachable:
            return tuple(members)
        return tuple(
            replace(member, replica=replace(member.replica, state=ReplicaState.UNHEALTHY))
            if member.id in self._unreachable
            else member
            for member in members
        )

    def connected(self, member: Member) -> None:
        """Expect heartbeats of a replica from now on."""
        if member.id not in self._silences:
            max_step_tokens = member.spec.engine.scheduler.max_num_batched_tokens
            self._silences[member.id] = FreezeDetector(self._timeout_s, max_step_tokens)
            self._check_later()

    def heard(self, replica_id: str, stats: EngineStats) -> None:
        if (silence := self._silences.get(replica_id)) is not None:
            silence.heard(stats)

    def lost(self, replica_id: str, how: str) -> None:
        """Leave a replica alone for a moment."""
        self._silences.pop(replica_id, None)
        if replica_id in self._unreachable:
            return
        logger.warning("replica %s %s; its requests go on elsewhere", replica_id, how)
        loop = asyncio.get_running_loop()
        self._unreachable[replica_id] = loop.call_later(RECONNECT_S, self._try_again, replica_id)
        self._on_change()

    def close(self) -> None:
        for timer in self._unreachable.values():
            timer.cancel()
        if self._checking is not None:
            self._checking.cancel()

    def forget_all_but(self, present: Sequence[Member]) -> None:
        """Forget replicas that have gone."""
        ids = {member.id for member in present}
        self._silences = {name: silence for name, silence in self._silences.items() if name in ids}

    def _try_again(self, replica_id: str) -> None:
        del self._unreachable[replica_id]
        self._on_change()

    def _check_later(self) -> None:
        if self._checking is None:
            self._checking = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._check)

    def _check(self) -> None:
        self._checking = None
        for replica_id, silence in tuple(self._silences.items()):
            if silence.is_too_long(HEARTBEAT_INTERVAL_S, is_working=False):
                self.lost(replica_id, f"was silent for {silence.patience_s:.1f} s")
        if self._silences:
            self._check_later()


class FleetObserver(Protocol):
    """Gets reports about requests, for releases and autoscaling; see the actions of the same names in `dispatch`. Its
    methods run on the fleet's event loop and must not block or raise."""

    def arrived(self, request: Request, uncached_tokens: int) -> None: ...

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None: ...

    def ended(self, attempt: Attempt) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedFleet:
    """The objects that a gateway needs besides endpoints if its replicas run on other machines."""

    client_keys: KeyPair
    heartbeat_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Caller:
    on_event: OnEvent
    on_error: OnError


class Fleet:
    """Implements `replica.EngineClient`. `update` sets the replicas."""

    def __init__(
        self,
        config: DispatchConfig | None = None,
        *,
        clock: Clock | None = None,
        seed: int | None = None,
        connect: Connector | None = None,
        starts_on_demand: bool = False,
        record_to: Path | None = None,
        shared: SharedFleet | None = None,
    ) -> None:
        """`starts_on_demand`: requests may wait for replicas that are not starting yet, because waiting requests
        start them. `record_to` is a file for the dispatch log. `shared` is for replicas on other machines."""
        self._clock = clock or SystemClock()
        seed = SystemRandom().getrandbits(53) if seed is None else seed
        config, rng, now = config or DispatchConfig(), Random(seed), self._clock.now()
        self._log_file = None if record_to is None else _open_log(record_to)
        if self._log_file is None:
            self.dispatcher = Dispatcher(config, rng, now)
        else:
            self.dispatcher = RecordingDispatcher(config, seed, rng, now, self._log_file.write)
        self.connections = Connections(self, connect, None if shared is None else shared.client_keys)
        self._told: tuple[Member, ...] = ()  # the members as their hosts describe them
        self._reach = None if shared is None else Reachability(shared.heartbeat_timeout_s, self._refresh)
        self.observers: list[FleetObserver] = []
        self.on_sent: Callable[[Send], None] | None = None  # called with every request that goes to a replica
        self.on_wait: Callable[[], None] = lambda: None  # called when a request begins to wait for a replica
        self._starts_on_demand = starts_on_demand
        self._callers: dict[str, _Caller] = {}  # by request id
        self._pending: deque[Action] = deque()  # actions that are not carried out yet, in order
        self._is_acting = False
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type[Action], Callable[[Any], None]] = {
            Send: self._send,
            Cancel: self._cancel,
            Deliver: self._deliver,
            Fail: self._fail,
            WakeAt: self._wake_at,
            SubscribeKVEvents: self._subscribe,
            ResyncKVEvents: self._resync,
            Waits: self._waits,
            Eject: self._eject,
            Arrived: self._arrived,
            FirstToken: self._first_token,
            AttemptEnded: self._attempt_ended,
        }

    @property
    def ready(self) -> EngineReady | None:
        """Return the fleet's first model, also while requests wait until a replica is started for them."""
        ready = self.connections.first_ready
        if ready is None and self._starts_on_demand:
            return next(iter(self.models.values()), None)
        return ready

    @property
    def models(self) -> Mapping[str, EngineReady]:
        """Return every model that was ever served. Requests wait while replicas of their model start again."""
        return self.connections.models

    @property
    def stats(self) -> EngineStats:
        return self.connections.stats

    def stats_of(self, model: str) -> EngineStats:
        return self.connections.stats_of(model)

    def num_engines_of(self, model: str) -> int:
        return sum(member.spec.model == model for member in self.members)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.connections.members

    @property
    def replicas(self) -> Mapping[str, ReplicaRecord]:
        """Return the replicas that are not lost, by id."""
        return self.dispatcher.table.records

    @property
    def router(self) -> Router:
        return self.dispatcher.router

    @property
    def waiting(self) -> WaitingRoom:
        return self.dispatcher.waiting

    @property
    def reasons(self) -> Counter[str]:
        return self.dispatcher.reasons

    @property
    def verdicts(self) -> Counter[str]:
        return self.dispatcher.verdicts

    @property
    def routed_tokens(self) -> int:
        return self.dispatcher.routed_tokens

    @property
    def matched_tokens(self) -> int:
        return self.dispatcher.matched_tokens

    async def wait_ready(self) -> EngineReady:
        """Wait until a replica serves, or requests may wait for one."""
        return self.ready or await self.connections.wait_ready()

    def know(self, models: Mapping[str, EngineReady]) -> None:
        """Add models that were served before this process began, and whose replicas may all have left since."""
        self.connections.models.update(models)

    def choose_revisions(self, choose: Callable[[Request], str | None]) -> None:
        """Let `choose` select the revision that serves an attempt; None stands for any revision."""
        self.dispatcher.choose_revision = choose

    def route_by(self, weights: Mapping[str, RoutingWeights]) -> None:
        """Route requests for these revisions by weights of their own."""
        self._carry_out(self.dispatcher.route_by(weights, self._clock.now()))

    def update(self, members: Sequence[Member]) -> None:
        """Take over replicas that came, went, or changed state."""
        self._told = tuple(members)
        if self._reach is not None:
            self._reach.forget_all_but(self._told)
        self._refresh()

    def answers(self, host: HostRecord) -> bool:
        """Return whether an engine of a host is connected to this gateway, and not silent."""
        connections = map(self.connections.by_id.get, (member.id for member in host.members))
        return any(
            connection is not None and connection.client.ready is not None for connection in connections
        )

    def _refresh(self) -> None:
        told = self._told
        self.connections.update(told if self._reach is None else self._reach.seen_from_here(told))
        self.on_ready()

    def on_lost(self, replica_id: str) -> None:
        if self._reach is not None:
            self._reach.lost(replica_id, "cut the connection")

    def on_ready(self) -> None:
        """Update the dispatcher, after a connection came up or replicas changed."""
        if self._reach is not None:
            for connection in self.connections.by_id.values():
                if connection.client.ready is not None:
                    self._reach.connected(connection.member)
        status = self.connections.status(starts_on_demand=self._starts_on_demand)
        self._carry_out(self.dispatcher.update(status, self._clock.now()))

    def on_stats(self, replica_id: str, stats: EngineStats) -> None:
        self.connections.note_stats()
        if self._reach is not None:
            self._reach.heard(replica_id, stats)
        self._carry_out(self.dispatcher.heartbeat(replica_id, stats, self._clock.now()))

    def on_events(self, replica_id: str, events: Sequence[TokenEvent]) -> None:
        self._carry_out(self.dispatcher.news(replica_id, events, self._clock.now()))

    def on_kv_events(self, replica_id: str, events: tuple[KVEvent, ...]) -> None:
        self._carry_out(self.dispatcher.kv_events(replica_id, events, self._clock.now()))

    def add(self, request: Request, *, timeout_s: float | None, on_event: OnEvent, on_error: OnError) -> None:
        self._callers[request.id] = _Caller(on_event, on_error)
        self._carry_out(self.dispatcher.add(request, self._clock.now(), timeout_s=timeout_s))

    def abort(self, request_id: str) -> None:
        if self._callers.pop(request_id, None) is not None:
            self._carry_out(self.dispatcher.abort(request_id, self._clock.now()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reach is not None:
            self._reach.close()
        self.connections.close()
        if self._log_file is not None:
            self._log_file.close()

    def _on_failure(self, replica_id: str, request_id: str, error: PenstockError) -> None:
        self._carry_out(self.dispatcher.failed(replica_id, request_id, error, self._clock.now()))

    def _on_time(self, due_s: float) -> None:
        self._timer = None
        # The event loop may be a fraction of a tick early.
        self._carry_out(self.dispatcher.tick(max(due_s, self._clock.now())))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out actions in order. An action may call back into the fleet; the actions that follow from that wait
        for their turn, so that every request gets its actions in the order of the dispatcher's decisions."""
        if not actions:
            return
        self._pending.extend(actions)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._pending:
                action = self._pending.popleft()
                self._handlers[type(action)](action)
        finally:
            self._is_acting = False

    def _deliver(self, action: Deliver) -> None:
        callers = self._callers
        for event in action.events:
            caller = callers.get(event.request_id)
            if caller is None:
                continue  # the client left while this action waited for its turn
            if event.finish_reason is not None:
                del callers[event.request_id]
            caller.on_event(event)

    def _send(self, action: Send) -> None:
        replica_id, request = action.replica_id, action.request
        connection = self.connections.by_id.get(replica_id)
        if connection is None:
            return  # lost while this action waited for its turn: the dispatcher has sent the request elsewhere
        if self.on_sent is not None:
            self.on_sent(action)
        connection.client.add(
            request,
            timeout_s=action.timeout_s,
            on_error=partial(self._on_failure, replica_id, request.id),
            kv_source=action.kv_source,
        )

    def _cancel(self, action: Cancel) -> None:
        if (connection := self.connections.by_id.get(action.replica_id)) is not None:
            connection.client.abort(action.request_id)

    def _fail(self, action: Fail) -> None:
        if (caller := self._callers.pop(action.request_id, None)) is not None:
            caller.on_error(action.error)

    def _wake_at(self, action: WakeAt) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, action.at_s - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time, action.at_s)

    def _subscribe(self, action: SubscribeKVEvents) -> None:
        if (connection := self.connections.by_id.get(action.replica_id)) is not None:
            connection.client.subscribe_kv_events()

    def _resync(self, action: ResyncKVEvents) -> None:
        if (connection := self.connections.by_id.get(action.replica_id)) is not None:
            connection.client.restart_kv_events()

    def _waits(self, action: Waits) -> None:
        self.on_wait()

    def _eject(self, action: Eject) -> None:
        what = "is slow and gets no requests" if action.is_slow else "is back"
        logger.warning("replica %s %s", action.replica_id, what)

    def _arrived(self, action: Arrived) -> None:
        for observer in self.observers:
            observer.arrived(action.request, action.uncached_tokens)

    def _first_token(self, action: FirstToken) -> None:
        for observer in self.observers:
            observer.first_token(action.request, action.replica_id, action.revision, action.ttft_s)

    def _attempt_ended(self, action: AttemptEnded) -> None:
        for observer in self.observers:
            observer.ended(action.attempt)


def _open_log(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"Cannot write the dispatch log {path}: {error.strerror}.") from error
