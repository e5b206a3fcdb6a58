"""Runs a fleet through virtual time: arrivals are routed, replicas plan and compute, lost requests go elsewhere.

The router and the retry policy are the ones that serve. Knows no workload and no report; faults and scaling are told
to it by `fleet_control`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from random import Random

import msgspec

from penstock.control.holding import HoldingConfig, check_room, give_up_s
from penstock.control.retries import Failure, RetryPolicy
from penstock.core.clock import VirtualClock
from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.router import ReplicaState, Router, RoutingRequest
from penstock.simulator.events import EventHeap, Rank
from penstock.simulator.fleet import MODEL, Fleet, Journey, Member
from penstock.simulator.tally import Tally
from penstock.simulator.workload import Arrival


class FleetDriver:
    def __init__(
        self, fleet: Fleet, routers: list[Router], retries: RetryPolicy, holding: HoldingConfig, rng: Random
    ) -> None:
        self.clock = VirtualClock()
        self.events = EventHeap(self.clock)
        self.fleet = fleet
        self.routers = routers
        self.tally = Tally()
        self.held: dict[str, Journey] = {}
        self.num_unfinished = 0
        self.arriving_tokens = 0.0  # uncached, by the router's reckoning, since the start
        self.is_closed = False  # the last request has arrived
        self.progress: Callable[[int, float], None] | None = None  # told requests ended and virtual time
        self._holding = holding
        self._retries = retries
        self._budget = retries.first_budget(0.0)
        self._rng = rng
        self._num_arrived = 0

    @property
    def is_done(self) -> bool:
        return self.is_closed and not self.num_unfinished

    @property
    def held_tokens(self) -> int:
        return sum(len(journey.arrival.request.prompt_token_ids) for journey in self.held.values())

    def run(self, arrivals: Iterable[Arrival]) -> None:
        self._expect_next(iter(arrivals))
        self.events.run()

    def ready(self, member: Member, now: float) -> None:
        """A replica takes requests from now on; whoever was held for one goes there."""
        self.fleet.set_state(member.id, ReplicaState.READY)
        held, self.held = self.held, {}
        for journey in held.values():
            self._route(journey, now)

    def lose(self, member: Member, now: float) -> None:
        """A replica is gone: its requests are served elsewhere, as far as the retry policy allows."""
        member.is_alive = False
        self.fleet.remove(member.id)
        journeys = list(member.journeys.values())
        member.journeys.clear()
        for journey in journeys:
            self.routers[journey.gateway].ended(journey.arrival.request.id, now)
            self._failed(journey, member.id, EngineUnavailable("The replica is gone."), now)

    def _expect_next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is None:
            self.is_closed = True
        else:
            self.events.at(arrival.time_s, Rank.ARRIVE, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], now: float) -> None:
        self.num_unfinished += 1
        self._num_arrived += 1
        self._budget = self._retries.attempted(self._budget, now)
        self._route(Journey(arrival, self._num_arrived % len(self.routers)), now)
        self._expect_next(arrivals)

    def _route(self, journey: Journey, now: float) -> None:
        arrival = _remaining(journey) if journey.num_emitted else journey.arrival
        request = arrival.request
        router = self.routers[journey.gateway]
        try:
            decision = router.choose(
                RoutingRequest(
                    id=request.id,
                    model=MODEL,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    block_hashes=arrival.block_hashes,
                    expected_output_tokens=request.sampling.max_tokens,
                    affinity_key=arrival.session,
                    excluded=journey.failed_on,
                ),
                self.fleet.replicas,
                now,
                self._rng,
            )
        except PenstockError as error:
            self._hold(journey, error, now)
            return
        journey.attempts += 1
        self.tally.reasons[decision.reason] += 1
        member = self.fleet.members[decision.replica_id]
        try:
            member.replica.add(arrival, now)
        except PenstockError as error:
            router.ended(request.id, now)
            self._failed(journey, member.id, error, now)
            return
        self.arriving_tokens += len(request.prompt_token_ids) - decision.matched_tokens
        member.journeys[request.id] = journey
        member.num_taken += 1
        if member.is_alive:
            self._plan_soon(member, now)

    def _hold(self, journey: Journey, error: PenstockError, now: float) -> None:
        """Nobody can take it: wait for a replica that starts, if there is room to wait."""
        try:
            check_room(
                self._holding, len(self.held), self.held_tokens, len(journey.arrival.request.prompt_token_ids)
            )
        except Overloaded:
            self._end(journey, error.code, now)
            return
        self.tally.num_held += 1
        self.held[journey.arrival.request.id] = journey
        until_s = give_up_s(self._holding, now, journey.arrival.request.deadline_s)
        self.events.at(until_s, Rank.DEPART, partial(self._held_too_long, journey, error))

    def _held_too_long(self, journey: Journey, error: PenstockError, now: float) -> None:
        if self.held.get(journey.arrival.request.id) is journey:
            del self.held[journey.arrival.request.id]
            self._end(journey, error.code, now)

    def _failed(self, journey: Journey, replica_id: str, error: PenstockError, now: float) -> None:
        failure = Failure(
            attempts=journey.attempts,
            num_emitted_tokens=journey.num_emitted,
            is_retryable=isinstance(error, EngineUnavailable | Overloaded),
            deadline_s=journey.arrival.request.deadline_s,
        )
        decision, self._budget = self._retries.decide(failure, self._budget, now)
        if not decision.is_retry:
            self._end(journey, error.code, now)
            return
        self.tally.num_retries += 1
        journey.failed_on |= {replica_id}
        self.events.at(now + decision.pause_s, Rank.ARRIVE, partial(self._route, journey))

    def _plan_soon(self, member: Member, now: float) -> None:
        if not member.is_planning:
            member.is_planning = True
            self.events.at(now, Rank.PLAN, partial(self._plan, member))

    def _plan(self, member: Member, now: float) -> None:
        member.is_planning = False
        if not member.is_alive:
            return
        replica = member.replica
        for done_s in replica.submit(now):
            self.events.at(done_s, Rank.COMMIT, partial(self._commit, member))
        self._tell(member, replica.take_events(), now)
        if replica.is_idle and replica.scheduler.has_work:
            wakeup_s = replica.scheduler.next_wakeup(now)
            if wakeup_s is None or wakeup_s <= now:
                raise RuntimeError(
                    f"{member.id} has requests, plans nothing and waits for nothing, at {now:.3f} s"
                )
            self.events.at(wakeup_s, Rank.PLAN, partial(self._plan_soon, member))

    def _commit(self, member: Member, now: float) -> None:
        if not member.is_alive:
            return
        self._tell(member, member.replica.commit(now), now)
        self._plan_soon(member, now)

    def _tell(self, member: Member, events: list[TokenEvent], now: float) -> None:
        for event in events:
            journey = member.journeys[event.request_id]
            if event.num_cached_tokens is not None:
                self.tally.prompt_tokens += len(journey.arrival.request.prompt_token_ids)
                self.tally.cached_tokens += event.num_cached_tokens
            if event.token_ids:
                self._count_tokens(journey, len(event.token_ids), now)
            if event.finish_reason is not None:
                del member.journeys[event.request_id]
                self.routers[journey.gateway].ended(event.request_id, now)
                self._end(journey, event.finish_reason.value, now)

    def _count_tokens(self, journey: Journey, count: int, now: float) -> None:
        if journey.first_token_s is None:
            journey.first_token_s = now
            self.tally.first_token(now, now - journey.arrival.time_s)
        if not journey.num_emitted or journey.attempts > 1:
            self.routers[journey.gateway].first_token(journey.arrival.request.id, now)
        journey.num_emitted += count

    def _end(self, journey: Journey, how: str, now: float) -> None:
        self.num_unfinished -= 1
        tally = self.tally
        tally.end(how, now)
        tally.output_tokens += journey.num_emitted
        tally.e2e_s.append(now - journey.arrival.time_s)
        if journey.first_token_s is not None and journey.num_emitted > 1:
            tally.tpot_s.append((now - journey.first_token_s) / (journey.num_emitted - 1))
        if self.progress is not None:
            self.progress(tally.num_ended, now)


def _remaining(journey: Journey) -> Arrival:
    """The prompt and all that was emitted, to go on from there."""
    arrival, num_emitted = journey.arrival, journey.num_emitted
    emitted = tuple(arrival.output_token(index) for index in range(num_emitted))
    sampling = arrival.request.sampling
    request = msgspec.structs.replace(
        arrival.request,
        prompt_token_ids=arrival.request.prompt_token_ids + emitted,
        sampling=msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - num_emitted),
    )
    return replace(arrival, request=request, num_answered=num_emitted)
