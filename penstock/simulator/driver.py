"""Drives `dispatch`, and the scheduler in every replica, in virtual time, ordered by a heap of events.

Requests arrive at gateways, each gateway has a dispatcher, replicas plan, steps take as long as the cost model says,
and events go back to the dispatcher of the request. Knows no workload and no report. `control` calls the driver for
faults, and for replicas that start and stop.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import msgspec

from penstock.core.clock import VirtualClock
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.dispatch import (
    Action,
    Arrived,
    Attempt,
    AttemptEnded,
    Cancel,
    Deliver,
    Dispatcher,
    Fail,
    ResyncKVEvents,
    Send,
    Waits,
    WakeAt,
)
from penstock.router import ReplicaState
from penstock.scheduler.counted_plan import Told
from penstock.simulator.fleet import Member, SimulatedFleet
from penstock.simulator.report import Outcome
from penstock.simulator.transfers import KVLink, Transfers
from penstock.simulator.workload import Arrival

MIRROR_PREFIX = "mirror-"  # of the id of a copy that goes to the candidate of a release
GATEWAY_RESTARTED = "gateway_restarted"  # the rejection of a request whose gateway was replaced
_EventAction: TypeAlias = Callable[[float], None]
_Event: TypeAlias = tuple[float, int, int, int, _EventAction]  # the time, rank, turn and number of an action


class Admission(Protocol):
    """The limits of the gateways."""

    def admit(self, request: Request, now: float) -> str | None:
        """Admit a request and return None, or return the code of the error that refuses the request."""
        ...

    def ended(self, outcome: Outcome, now: float) -> None:
        """Note the end of a request. Called for every request, also for refused requests."""
        ...


class Release(Protocol):
    """A release under way."""

    def mirrors(self, request: Request) -> bool:
        """Return whether a copy of a new request goes to the candidate."""
        ...

    def check(self, member: Member) -> None:
        """Raise for an attempt that the candidate fails."""
        ...

    def ended(self, attempt: Attempt) -> None:
        """Note the end of an attempt. Called for every attempt."""
        ...


class Rank(enum.IntEnum):
    """The order of events at the same instant. Planning is last: a plan then includes everything that happened up to
    now, as in the engine, which empties the inbox before each plan."""

    COMMIT = 0
    FAULT = 1
    DEPART = 2
    REPORT = 3
    ARRIVE = 4
    CONTROL = 5
    PLAN = 6


class EventHeap:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._heap: list[_Event] = []
        # Events at the present instant, also a heap: mostly one, the next plan, which thousands of later events need
        # not be compared with.
        self._soon: list[_Event] = []
        self._next_sequence = 0

    def at(self, time_s: float, rank: Rank, action: _EventAction, turn: int = 0) -> None:
        """Call `action(time_s)` when that time has come: of equal time and rank by ascending `turn`, and then in the
        order of these calls."""
        heap = self._soon if time_s == self._clock.now() else self._heap
        heapq.heappush(heap, (time_s, rank, turn, self._next_sequence, action))
        self._next_sequence += 1

    @property
    def is_last_now(self) -> bool:
        """Return whether nothing else happens at the present instant."""
        return not self._soon and not (self._heap and self._heap[0][0] <= self._clock.now())

    def run(self, after: Callable[[], None] | None = None) -> None:
        """Run until no event is left. `after` is called after each."""
        later, soon, pop, advance_to = self._heap, self._soon, heapq.heappop, self._clock.advance_to
        while soon or later:
            if soon and not (later and later[0] < soon[0]):
                time_s, _, _, _, action = pop(soon)
            else:
                time_s, _, _, _, action = pop(later)
                advance_to(time_s)
            action(time_s)
            if after is not None:
                after()


class Driver:
    def __init__(
        self,
        fleet: SimulatedFleet,
        dispatchers: Sequence[Dispatcher],
        on_end: Callable[[Outcome, float], None],
        *,
        starts_on_demand: bool = False,
        message_delay_s: float = 0.0,
        start_s: float = 0.0,
        kv_link: KVLink | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.events = EventHeap(self.clock)
        self.fleet = fleet
        self.dispatchers = list(dispatchers)  # one for each gateway
        self.arrived_tokens = 0.0  # uncached, as dispatchers estimate it, since the start
        self.num_waits = 0  # how often a request began to wait for a replica
        self.num_resyncs = 0  # how often KV events were asked for again
        self._on_end = on_end
        self._starts_on_demand = starts_on_demand
        self._message_delay_s = message_delay_s
        self._start_s = start_s  # of a replica
        self._admission = admission
        self.release: Release | None = None
        self.transfers = None if kv_link is None else Transfers(self, kv_link)
        self._outcomes: dict[str, Outcome] = {}  # of requests that have not ended
        self._pending: deque[tuple[int, Action]] = deque()  # actions that are not carried out yet, by gateway
        self._is_acting = False
        self._num_arrived = 0
        self._has_more = True  # requests are still to arrive

    @property
    def is_done(self) -> bool:
        return not self._has_more and not self._outcomes

    def run(self, arrivals: Iterable[Arrival], after_event: Callable[[], None] | None = None) -> None:
        """Run until every request has ended."""
        self.update(0.0)
        self._expect_next(iter(arrivals))
        self.events.run(after_event)

    def restart_gateway(self, gateway: int, dispatcher: Dispatcher, now: float) -> None:
        """Replace a gateway by a gateway without any knowledge. Clients of the old gateway lose their connections,
        and replicas abort the requests of the old gateway."""
        for outcome in [each for each in self._outcomes.values() if each.gateway == gateway]:
            request_id = outcome.arrival.request.id
            if self.transfers is not None:
                self.transfers.forget(request_id)
            member = self.fleet.members.get(outcome.replica_id or "")
            if member is not None and member.is_alive:
                self.tell_all(member, now, request_id)
                self.touch(member, now)
                member.replica.abort(request_id, now)
                self._plan_soon(member, now)
            outcome.rejection = GATEWAY_RESTARTED
            self._end(outcome, now)
        dispatcher.choose_revision = self.dispatchers[gateway].choose_revision
        self.dispatchers[gateway] = dispatcher
        status = self.fleet.status(starts_on_demand=self._starts_on_demand)
        self.carry_out(gateway, dispatcher.update(status, now), now)

    def start_replica(self, now: float, revision: str = "") -> None:
        """Start a replica, which is ready after a while."""
        member = self.fleet.start(ReplicaState.STARTING, "both", revision)
        self.events.at(now + self._start_s, Rank.CONTROL, partial(self.ready, member))
        self.update(now)

    def ready(self, member: Member, now: float) -> None:
        """Let a replica serve that has started."""
        if member.id in self.fleet.members and member.state is ReplicaState.STARTING:
            member.state = ReplicaState.READY
            self.update(now)

    def update(self, now: float) -> None:
        """Tell every dispatcher that replicas came, went or changed."""
        status = self.fleet.status(starts_on_demand=self._starts_on_demand)
        for gateway, dispatcher in enumerate(self.dispatchers):
            self.carry_out(gateway, dispatcher.update(status, now), now)

    def carry_out(self, gateway: int, actions: Sequence[Action], now: float) -> None:
        """Carry out actions. An action may lead to others, which wait for their turn."""
        self._pending.extend((gateway, action) for action in actions)
        if self._is_acting:
            return
        self._is_acting = True
        while self._pending:
            self._act(*self._pending.popleft(), now)
        self._is_acting = False

    def _act(self, gateway: int, action: Action, now: float) -> None:
        match action:
            case Deliver(events):
                for event in events:
                    self._deliver(event, now)
            case Send():
                self._send(gateway, action, now)
            case Cancel(replica_id, request_id):
                member = self.fleet.members[replica_id]
                if self.transfers is not None:
                    self.transfers.forget(request_id)
                if member.is_alive:
                    self.touch(member, now)
                    member.replica.abort(request_id, now)
                    self._plan_soon(member, now)
            case Fail(request_id, error):
                outcome = self._outcomes[request_id]
                outcome.rejection = error.code
                self._end(outcome, now)
            case WakeAt(at_s):
                self.events.at(at_s, Rank.DEPART, partial(self._tick, gateway))
            case Arrived(request, uncached_tokens):
                if not request.id.startswith(MIRROR_PREFIX):
                    self.arrived_tokens += uncached_tokens
                    if self.release is not None and self.release.mirrors(request):
                        self._mirror(self._outcomes[request.id].arrival, gateway, now)
            case AttemptEnded(attempt):
                if self.release is not None:
                    self.release.ended(attempt)
                if attempt.error is not None:
                    self._outcomes[attempt.request.id].num_failures += 1
            case Waits():
                self.num_waits += 1
            case ResyncKVEvents(replica_id):
                self._resync(replica_id, now)
            case _:
                pass  # replicas send their KV events from the start, and the report needs no more

    def _expect_next(self, arrivals: Iterator[Arrival]) -> None:
        """Draw the next arrival. Arrivals are drawn one at a time: a workload need not fit in memory."""
        arrival = next(arrivals, None)
        if arrival is None:
            self._has_more = False
        else:
            self.events.at(arrival.time_s, Rank.ARRIVE, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], now: float) -> None:
        self._num_arrived += 1
        gateway = self._num_arrived % len(self.dispatchers)
        request = arrival.request
        outcome = self._outcomes[request.id] = Outcome(arrival, gateway)
        if self._admission is not None:
            outcome.rejection = self._admission.admit(request, now)
            if outcome.rejection is not None:
                self._end(outcome, now)
                self._expect_next(arrivals)
                return
        if arrival.departs_s is not None:
            self.events.at(arrival.departs_s, Rank.DEPART, partial(self._depart, request.id))
        actions = self.dispatchers[gateway].add(
            request,
            now,
            timeout_s=None if request.deadline_s is None else request.deadline_s - now,
            block_hashes=arrival.block_hashes,
        )
        self.carry_out(gateway, actions, now)
        self._expect_next(arrivals)

    def _mirror(self, arrival: Arrival, gateway: int, now: float) -> None:
        """Send a copy of a request, whose answer is dropped."""
        request = msgspec.structs.replace(
            arrival.request, id=MIRROR_PREFIX + arrival.request.id, deadline_s=None
        )
        copy = arrival._replace(request=request, departs_s=None)
        self._outcomes[request.id] = Outcome(copy, gateway, is_mirrored=True)
        actions = self.dispatchers[gateway].add(request, now, block_hashes=arrival.block_hashes)
        self.carry_out(gateway, actions, now)

    def _depart(self, request_id: str, now: float) -> None:
        outcome = self._outcomes.get(request_id)
        if outcome is not None:
            if outcome.replica_id is not None and (member := self.fleet.members.get(outcome.replica_id)):
                self.tell_all(member, now, request_id)
            self.carry_out(outcome.gateway, self.dispatchers[outcome.gateway].abort(request_id, now), now)
            outcome.finish_reason = FinishReason.ABORT
            self._end(outcome, now)

    def _tick(self, gateway: int, now: float) -> None:
        self.carry_out(gateway, self.dispatchers[gateway].tick(now), now)

    def _send(self, gateway: int, action: Send, now: float) -> None:
        member = self.fleet.members[action.replica_id]
        outcome = self._outcomes[action.request.id]
        outcome.replica_id = member.id
        if not member.is_alive:
            return  # no gateway has noticed that the replica died: no answer comes
        if action.kv_source is not None and self.transfers is not None:
            source = self.fleet.members.get(action.kv_source.endpoint)
            if self.transfers.begin(action, source, member, now, partial(self._hand_over, outcome, action)):
                return
        self._hand_over(outcome, action, now)

    def _hand_over(self, outcome: Outcome, action: Send, now: float) -> None:
        """Give a request to the chosen replica. No further KV will be moved there."""
        member = self.fleet.members.get(action.replica_id)
        if member is None or not member.is_alive:
            return
        try:
            if self.release is not None:
                self.release.check(member)
            self.give(member, outcome.arrival, action.request, now)
        except PenstockError as error:
            actions = self.dispatchers[outcome.gateway].failed(member.id, action.request.id, error, now)
            self.carry_out(outcome.gateway, actions, now)

    def give(self, member: Member, arrival: Arrival, request: Request, now: float) -> None:
        """Add a request to a replica. Raises the errors of the scheduler."""
        self.touch(member, now)
        plans = member.replica.add(arrival, request, now)
        member.num_taken += 1
        if plans:
            self._plan_soon(member, now)

    def later(self, time_s: float, action: _EventAction) -> None:
        self.events.at(time_s, Rank.ARRIVE, action)

    def _resync(self, replica_id: str, now: float) -> None:
        member = self.fleet.members.get(replica_id)
        if member is not None and member.is_alive:
            self.num_resyncs += 1
            self.events.at(now + self._message_delay_s, Rank.REPORT, partial(self._restart_events, member))

    def _restart_events(self, member: Member, now: float) -> None:
        self.settle(member, now)
        member.replica.cache.restart_events()

    def settle(self, member: Member, now: float) -> None:
        """Bring a replica up to date. Call this method before reading from the replica."""
        if member.is_alive and member.replica.settle(now):
            self._plan_soon(member, now)

    def touch(self, member: Member, now: float) -> None:
        """Bring a replica up to date, and end the prediction of steps. Call this method before a change of the
        replica."""
        self.settle(member, now)
        member.replica.stop_coasting()
        if member.is_alive:
            self._expect_commit(member)

    def tell_all(self, member: Member, now: float, request_id: str | None = None) -> None:
        """Deliver the tokens that a replica has committed and not told yet: of one request, or of all."""
        if member.is_alive:
            self.settle(member, now)
            self._tell(member, member.replica.tell(request_id), now)

    def _plan_soon(self, member: Member, now: float) -> None:
        if not member.is_planning:
            member.is_planning = True
            if member.plan is None:
                member.plan = partial(self._plan, member)
            self.events.at(now, Rank.PLAN, member.plan, member.number)

    def _plan(self, member: Member, now: float) -> None:
        member.is_planning = False
        if not member.is_alive:
            return
        replica = member.replica
        replica.submit(now)
        self._tell(member, replica.take_events(), now)
        self._expect_commit(member, replica.coast())
        if replica.is_idle and replica.scheduler.has_work:
            wakeup_s = replica.next_wakeup(now)
            if wakeup_s is None or wakeup_s <= now:
                raise RuntimeError(
                    f"{member.id} has requests, plans nothing and waits for nothing, at {now:.3f} s"
                )
            self.events.at(wakeup_s, Rank.PLAN, partial(self._plan_soon, member), member.number)

    def _expect_commit(self, member: Member, due_s: float | None = None) -> None:
        """Come back when the oldest step is done, or at `due_s`."""
        if due_s is None:
            due_s = member.replica.next_commit_s
        if due_s != member.due_s:
            member.due_s = due_s
            if due_s is not None:
                if member.commit is None:
                    member.commit = partial(self._commit, member)
                self.events.at(due_s, Rank.COMMIT, member.commit, member.number)

    def _commit(self, member: Member, now: float) -> None:
        if member.due_s != now or not member.is_alive:
            return  # another commit was scheduled meanwhile
        member.due_s = None
        member.replica.settle(now)
        self._tell(member, member.replica.commit(now), now)
        if self.events.is_last_now and not member.is_planning:
            self._plan(member, now)
        else:
            self._plan_soon(member, now)

    def _tell(self, member: Member, told: list[Told], now: float) -> None:
        for each in told:
            if self.transfers is not None and self.transfers.is_prefill(each.event, now):
                continue
            outcome = self._outcomes[each.event.request_id]
            outcome.earlier_s = each.times_s
            self.carry_out(
                outcome.gateway, self.dispatchers[outcome.gateway].news(member.id, (each.event,), now), now
            )
            outcome.earlier_s = ()

    def _deliver(self, event: TokenEvent, now: float) -> None:
        outcome = self._outcomes[event.request_id]
        outcome.note(event, now)
        if event.finish_reason is not None:
            outcome.finish_reason = event.finish_reason
            self._end(outcome, now)

    def _end(self, outcome: Outcome, now: float) -> None:
        outcome.end_s = now
        del self._outcomes[outcome.arrival.request.id]
        if outcome.is_mirrored:
            return
        if self._admission is not None:
            self._admission.ended(outcome, now)
        self._on_end(outcome, now)
