"""Holds the replicas of a simulation, and the state of each as a supervisor would report it. A replica is the real
scheduler and block cache, with a cost model in the executor's place.

A replica knows no other replica and no event heap: its caller passes the time, and learns when each step will be
done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from penstock.core.messages import EngineStats
from penstock.core.plan import NO_DRAFTS, Chunk, Draft, SampledToken, StepPlan, StepResult, TokenEvent
from penstock.core.request import Request
from penstock.dispatch import FleetStatus, ReplicaStatus
from penstock.kvcache import KVCache
from penstock.router import Replica, ReplicaState
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.cost import StepCost, StepWork
from penstock.simulator.workload import Arrival

_WRONG_TOKEN_ID = -1  # no answer has it


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    result: StepResult


class SimulatedReplica:
    """A simulated replica. `depth` is the number of steps that may be planned and not committed: 2 plans one step
    ahead, as an engine with an asynchronous executor does. Steps run one after the other. Its drafter guesses each
    token rightly with the chance `acceptance`; None drafts nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        cost: StepCost,
        *,
        depth: int = 1,
        acceptance: float | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.cache = cache
        self._cost = cost
        self._depth = depth
        self._acceptance = acceptance
        self._rng = Random(0)
        self._arrivals: dict[str, Arrival] = {}
        self._num_output_tokens: dict[str, int] = {}
        self._in_flight: deque[_Step] = deque()
        self._executor_free_s = 0.0
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.busy_s = 0.0
        self.slowdown = 1.0  # times the cost model's; a fault may raise it
        self.last_step: tuple[int, float] = (0, 0.0)  # tokens and seconds of the step committed last

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._arrivals)

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is being computed. The next plan decides whether anything can be."""
        return not self._in_flight

    def add(self, arrival: Arrival, request: Request, now: float) -> None:
        """`request` is the arrival's, with the tokens that its client already has. Raises what the scheduler raises;
        a refused request leaves no trace."""
        self.scheduler.add(request, now)
        self._arrivals[arrival.request.id] = arrival
        self._num_output_tokens[arrival.request.id] = len(request.output_token_ids)

    def abort(self, request_id: str, now: float) -> None:
        self.scheduler.abort(request_id, now)
        self._forget(request_id)

    def submit(self, now: float) -> list[float]:
        """Plan as far ahead as `depth` allows. Returns when each new step will be done, in order."""
        done_s = []
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.plan(now, NO_DRAFTS if self._acceptance is None else self._drafts())
            if plan is None:
                break
            result = self._execute(plan)
            self._in_flight.append(_Step(plan, result))
            self._executor_free_s = max(now, self._executor_free_s) + result.elapsed_s
            done_s.append(self._executor_free_s)
        return done_s

    def commit(self, now: float) -> list[TokenEvent]:
        """Commit the oldest step, which is done."""
        step = self._in_flight.popleft()
        self.num_steps += 1
        self.num_tokens_computed += step.plan.num_tokens
        self.busy_s += step.result.elapsed_s
        self.last_step = step.plan.num_tokens, step.result.elapsed_s
        return self._told(self.scheduler.commit(step.plan, step.result, now))

    def take_events(self) -> list[TokenEvent]:
        """Return the events of requests that ended without a step."""
        return self._told(self.scheduler.take_events())

    def _execute(self, plan: StepPlan) -> StepResult:
        sampled = []
        for chunk in plan.chunks:
            if chunk.samples:
                sampled.append(self._sample(chunk))
        return StepResult(plan.step_id, tuple(sampled), self.slowdown * self._cost.step_s(StepWork.of(plan)))

    def _sample(self, chunk: Chunk) -> SampledToken:
        arrival = self._arrivals[chunk.request_id]
        num_known = chunk.num_tokens - len(chunk.drafts)
        index = chunk.start + num_known - len(arrival.request.prompt_token_ids)
        num_accepted = 0
        for draft in chunk.drafts:
            if arrival.output_token(index + num_accepted) != draft:
                break
            num_accepted += 1
        token_id = arrival.output_token(index + num_accepted)
        return SampledToken(chunk.request_id, token_id, accepted=chunk.drafts[:num_accepted])

    def _drafts(self) -> dict[str, Draft]:
        drafts = {}
        for request_id, most in self.scheduler.wants_drafts().items():
            arrival = self._arrivals[request_id]
            begin = self._num_output_tokens[request_id]
            tokens = (
                arrival.output_token(index)
                if self._rng.random() < (self._acceptance or 0.0)
                else _WRONG_TOKEN_ID
                for index in range(begin, begin + most)
            )
            drafts[request_id] = Draft(tuple(tokens), "simulated")
        return drafts

    def _told(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if event.finish_reason is not None:
                self._forget(event.request_id)
            else:
                self._num_output_tokens[event.request_id] += len(event.token_ids)
        return events

    def _forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        self._num_output_tokens.pop(request_id, None)


MODEL = "model"


@dataclass(slots=True, eq=False)
class Member:
    """A replica, its state, and the driver's own facts about it."""

    id: str
    replica: SimulatedReplica
    state: ReplicaState
    is_alive: bool = True
    is_planning: bool = False  # a plan is already due at this instant
    num_taken: int = 0  # requests, ever

    def stats(self) -> EngineStats:
        step_tokens, step_s = self.replica.last_step
        return replace(
            self.replica.scheduler.stats(),
            num_steps=self.replica.num_steps,
            tokens_computed=self.replica.num_tokens_computed,
            step_tokens=step_tokens,
            step_s=step_s,
        )


class SimulatedFleet:
    def __init__(
        self, build: Callable[[], SimulatedReplica], *, block_size: int, max_step_tokens: int
    ) -> None:
        self._build = build
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self.members: dict[str, Member] = {}
        self.all_members: list[Member] = []  # also those that are gone, in order of starting

    def start(self, state: ReplicaState) -> Member:
        member = Member(f"replica-{len(self.all_members)}", self._build(), state)
        self.members[member.id] = member
        self.all_members.append(member)
        return member

    def status(self, *, starts_on_demand: bool) -> FleetStatus:
        return FleetStatus(
            replicas=tuple(self._status_of(member) for member in self.members.values()),
            models={MODEL: self._block_size},
            starts_on_demand=starts_on_demand,
        )

    def _status_of(self, member: Member) -> ReplicaStatus:
        return ReplicaStatus(
            replica=Replica(
                id=member.id,
                models=frozenset({MODEL}),
                state=member.state,
                block_size=self._block_size,
                num_kv_blocks=member.replica.cache.num_memory_blocks,
                max_step_tokens=self._max_step_tokens,
            ),
            model=MODEL,
        )
