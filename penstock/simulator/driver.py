"""Runs many replicas through virtual time: the simulator's counterpart of `engine.loop`.

Requests arrive, a `choose` callable sends each to a replica, replicas plan, steps take as long as the cost model
says, and every answer is collected. Knows neither how requests are made nor what the outcomes are good for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from penstock.core.clock import VirtualClock
from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.simulator.events import EventHeap, Rank
from penstock.simulator.outcome import Outcome
from penstock.simulator.replica import ReplicaLoad, SimulatedReplica
from penstock.simulator.workload import Arrival

Choose: TypeAlias = Callable[[Request, Sequence[ReplicaLoad], float], int]


def round_robin() -> Choose:
    """Each replica in turn, whatever its load."""
    turns = 0

    def choose(request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
        nonlocal turns
        turns += 1
        return (turns - 1) % len(replicas)

    return choose


def least_loaded(request: Request, replicas: Sequence[ReplicaLoad], now: float) -> int:
    """The one with the fewest unfinished requests, then with the fewest prompt tokens in them, then the first."""
    return min(
        range(len(replicas)),
        key=lambda index: (replicas[index].num_requests, replicas[index].num_prompt_tokens, index),
    )


class Driver:
    def __init__(self, replicas: Sequence[SimulatedReplica], choose: Choose = least_loaded) -> None:
        self.clock = VirtualClock()
        self.replicas = replicas
        self._choose = choose
        self._events = EventHeap(self.clock)
        self._outcomes: dict[str, Outcome] = {}
        self._planning = [False] * len(replicas)  # whether a plan is already due at this instant

    def run(self, arrivals: Iterable[Arrival]) -> list[Outcome]:
        """Until every request has ended. Outcomes are in order of arrival."""
        self._expect_next(iter(arrivals))
        self._events.run()
        return list(self._outcomes.values())

    def _expect_next(self, arrivals: Iterator[Arrival]) -> None:
        """Arrivals are drawn one at a time: a workload need not fit in memory, and may never end by itself."""
        arrival = next(arrivals, None)
        if arrival is not None:
            self._events.at(arrival.time_s, Rank.ARRIVE, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], now: float) -> None:
        self._expect_next(arrivals)
        index = self._choose(arrival.request, [replica.load for replica in self.replicas], now)
        outcome = self._outcomes[arrival.request.id] = Outcome(arrival, index)
        try:
            self.replicas[index].add(arrival, now)
        except PenstockError as error:
            outcome.rejection = error.code
            outcome.end_s = now
            return
        if arrival.departs_s is not None:
            self._events.at(arrival.departs_s, Rank.DEPART, partial(self._depart, outcome))
        self._plan_soon(index, now)

    def _depart(self, outcome: Outcome, now: float) -> None:
        if outcome.end_s is not None:
            return
        self.replicas[outcome.replica].abort(outcome.arrival.request.id, now)
        outcome.finish_reason = FinishReason.ABORT
        outcome.end_s = now
        self._plan_soon(outcome.replica, now)

    def _plan_soon(self, index: int, now: float) -> None:
        if not self._planning[index]:
            self._planning[index] = True
            self._events.at(now, Rank.PLAN, partial(self._plan, index))

    def _plan(self, index: int, now: float) -> None:
        self._planning[index] = False
        replica = self.replicas[index]
        for done_s in replica.submit(now):
            self._events.at(done_s, Rank.COMMIT, partial(self._commit, index))
        self._tell(replica.take_events(), now)
        if replica.is_idle and replica.scheduler.has_work:
            self._wait(index, now)

    def _wait(self, index: int, now: float) -> None:
        """Nothing can be computed, and requests wait: only the passing of time can end that."""
        wakeup_s = self.replicas[index].scheduler.next_wakeup(now)
        if wakeup_s is None or wakeup_s <= now:
            raise RuntimeError(
                f"replica {index} has requests, plans nothing and waits for nothing, at {now:.3f} s"
            )
        self._events.at(wakeup_s, Rank.PLAN, partial(self._plan_soon, index))

    def _commit(self, index: int, now: float) -> None:
        self._tell(self.replicas[index].commit(now), now)
        self._plan_soon(index, now)

    def _tell(self, events: list[TokenEvent], now: float) -> None:
        for event in events:
            outcome = self._outcomes[event.request_id]
            outcome.token_ids += event.token_ids
            outcome.token_times_s += [now] * len(event.token_ids)
            if event.num_cached_tokens is not None:
                outcome.num_cached_tokens = event.num_cached_tokens
            if event.queue_s is not None:
                outcome.queue_s = event.queue_s
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                outcome.end_s = now
