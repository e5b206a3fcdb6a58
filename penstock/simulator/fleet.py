"""Holds the replicas of a simulation, and the state of each as a supervisor would report it. A replica is the real
scheduler and block cache, with a cost model in the executor's place.

A replica knows no other replica and no event heap: its caller passes the time, and learns when each step will be
done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import TypeAlias

from msgspec.structs import replace

from penstock.core.messages import EngineStats
from penstock.core.plan import NO_DRAFTS, Chunk, Draft, SampledToken, StepPlan, StepResult
from penstock.core.request import Request
from penstock.dispatch import FleetStatus, ReplicaStatus
from penstock.dispatch.replicas import Role
from penstock.kvcache import KVCache
from penstock.router import Replica, ReplicaState
from penstock.scheduler.counted import CountedScheduler
from penstock.scheduler.counted_plan import CountedPlan, Told
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.cost import StepCost, StepWork
from penstock.simulator.workload import Arrival

_WRONG_TOKEN_ID = -1  # in no answer
_COASTING_STEPS = 64  # planned in one go


@dataclass(frozen=True, slots=True)
class _Step:
    plan: StepPlan
    result: StepResult
    done_s: float

    @property
    def num_tokens(self) -> int:
        return self.plan.num_tokens

    @property
    def elapsed_s(self) -> float:
        return self.result.elapsed_s


class _CountedStep:
    __slots__ = ("done_s", "elapsed_s", "num_tokens", "plan", "sampled")

    def __init__(
        self, plan: CountedPlan, num_tokens: int, elapsed_s: float, done_s: float, sampled: list[SampledToken]
    ) -> None:
        self.plan = plan
        self.num_tokens = num_tokens
        self.elapsed_s = elapsed_s
        self.done_s = done_s
        self.sampled = sampled


_Ahead: TypeAlias = tuple[int, float, float]  # the tokens, the seconds and the end of a step


class Answers:
    """Knows the answers of the requests of one replica, for `CountedScheduler`."""

    def __init__(self) -> None:
        self.arrivals: dict[str, Arrival] = {}

    def length(self, request_id: str) -> int:
        return self.arrivals[request_id].num_output_tokens

    def tokens(self, request_id: str, start: int, stop: int) -> Sequence[int]:
        return self.arrivals[request_id].output_tokens(start, stop)


class SimulatedReplica:
    """A simulated replica. `depth` is the number of steps that may be planned and not committed: 2 plans one step
    ahead, as an engine with an asynchronous executor does. Steps run one after the other. Its drafter guesses each
    token correctly with the chance `acceptance`; None drafts nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        cost: StepCost,
        *,
        depth: int = 1,
        acceptance: float | None = None,
        answers: Answers | None = None,
    ) -> None:
        """`answers` is the object that a counting scheduler reads."""
        self.scheduler = scheduler
        self.cache = cache
        self._counted = scheduler if isinstance(scheduler, CountedScheduler) else None
        self._cost = cost
        self._depth = depth
        self._acceptance = acceptance
        self._rng = Random(0)
        self._arrivals: dict[str, Arrival] = {} if answers is None else answers.arrivals
        self._num_output_tokens: dict[str, int] = {}
        self._in_flight: deque[_Step | _CountedStep] = deque()
        self._ahead: deque[_Ahead] = deque()  # steps that will be planned
        self._executor_free_s = 0.0
        self._clock_s = 0.0  # how far the clock of this replica is ahead
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.busy_s = 0.0
        self.slowdown = 1.0  # a factor of step times, which a fault may raise
        self.last_step: tuple[int, float] = (0, 0.0)  # tokens and seconds of the step committed last

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._arrivals)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is being computed. The next plan decides whether anything can be."""
        return not self._in_flight

    def add(self, arrival: Arrival, request: Request, now: float) -> bool:
        """Add the request of an arrival. `request` also has the tokens that the client already received. Returns
        whether to plan now: all steps are planned else, and the next commit comes first. Raises the errors of the
        scheduler, and then changes nothing."""
        if request.deadline_s is not None and self._clock_s:
            request = replace(request, deadline_s=request.deadline_s + self._clock_s)
        self.scheduler.add(request, now + self._clock_s)
        sequence = self.scheduler.sequence_of(request.id)
        num_hashed = (len(request.prompt_token_ids) - 1) // self.cache.block_size
        if sequence is not None and len(arrival.block_hashes) == num_hashed:
            sequence.hashes = list(arrival.block_hashes)  # saves the scheduler's computation
        self._arrivals[arrival.request.id] = arrival
        self._num_output_tokens[arrival.request.id] = len(request.output_token_ids)
        return sequence is None or len(self._in_flight) < self._depth

    def abort(self, request_id: str, now: float) -> None:
        self.scheduler.abort(request_id, now + self._clock_s)
        self._forget(request_id)

    def submit(self, now: float) -> None:
        """Plan as far ahead as `depth` allows."""
        while len(self._in_flight) < self._depth:
            plan: StepPlan | CountedPlan | None
            if self._counted is not None:
                plan = self._counted.plan_step(now)
            else:
                drafts = NO_DRAFTS if self._acceptance is None else self._drafts()
                plan = self.scheduler.plan(now + self._clock_s, drafts)
            if plan is None:
                break
            step = self._execute(plan, now)
            self._in_flight.append(step)
            self._executor_free_s = step.done_s

    @property
    def next_commit_s(self) -> float | None:
        """Return when the oldest step is done; None if nothing is computed."""
        return self._in_flight[0].done_s if self._in_flight else None

    def commit(self, now: float) -> list[Told]:
        """Commit the oldest step, which is done."""
        step = self._in_flight.popleft()
        self._count(step.num_tokens, step.elapsed_s)
        if isinstance(step, _CountedStep):
            assert self._counted is not None
            told = self._counted.commit_step(step.plan, step.elapsed_s, step.sampled, now)
        else:
            events = self.scheduler.commit(step.plan, step.result, now + self._clock_s)
            told = [Told(event) for event in events]
        return self._told(told)

    def coast(self) -> float | None:
        """Predict the steps in which requests decode and nothing else happens. Returns the time of the first commit
        after these steps; None if there are no such steps. Call `settle` before reading from this replica, and
        `stop_coasting` before changing the replica."""
        scheduler = self._counted
        if scheduler is None or len(self._in_flight) < self._depth or not scheduler.may_coast:
            return None
        steps = scheduler.coasting_steps(_COASTING_STEPS)
        if not steps:
            return None
        ends_s = [step.done_s for step in self._in_flight]
        free_s, slowdown, step_s = self._executor_free_s, self.slowdown, self._cost.step_s
        work = StepWork.decodes(0, 0)
        for place, (count, num_entries) in enumerate(steps):
            work.tokens = work.sequences = work.samples = count
            work.context_tokens = work.pairs = num_entries
            elapsed_s = slowdown * step_s(work)
            begin_s = ends_s[place]
            free_s = (begin_s if begin_s > free_s else free_s) + elapsed_s
            ends_s.append(free_s)
            self._ahead.append((count, elapsed_s, free_s))
        return ends_s[len(steps)]

    def settle(self, now: float) -> bool:
        """Carry out the steps that `coast` predicted, up to now. Returns whether the last commit is due exactly now.
        The prediction then ends, and the caller makes the next plan."""
        ahead, in_flight = self._ahead, self._in_flight
        if not ahead or in_flight[0].done_s > now:
            return False
        steps = [(step.num_tokens, step.elapsed_s, step.done_s) for step in in_flight]
        num_commits, is_due = 0, False
        for _, _, done_s in islice(chain(steps, ahead), len(ahead)):
            if done_s > now:
                break
            num_commits += 1
            if done_s == now:
                is_due = True
                break
        num_plans = num_commits - is_due
        steps += islice(ahead, num_plans)
        self._coast(steps, num_commits, num_plans)
        if is_due:
            ahead.clear()
        return is_due

    def _coast(self, steps: list[_Ahead], num_commits: int, num_plans: int) -> None:
        """Commit the first of `steps`. The last `num_plans` of them were not planned yet."""
        assert self._counted is not None
        committed = steps[:num_commits]
        busy_s = self.busy_s
        for num_tokens, elapsed_s, _ in committed:
            self.num_tokens_computed += num_tokens
            busy_s += elapsed_s
        self.busy_s = busy_s
        self.num_steps += num_commits
        self.last_step = committed[-1][:2]
        plans = self._counted.coast([(elapsed_s, done_s) for _, elapsed_s, done_s in committed], num_plans)
        in_flight = self._in_flight
        for _ in range(min(num_commits, len(in_flight))):
            in_flight.popleft()
        for _ in range(num_plans):
            self._ahead.popleft()
        for plan, (num_tokens, elapsed_s, done_s) in zip(
            plans, steps[len(steps) - len(plans) :], strict=True
        ):
            in_flight.append(_CountedStep(plan, num_tokens, elapsed_s, done_s, []))
        self._executor_free_s = steps[-1][2]

    def step_clock(self, seconds: float) -> None:
        """Let the clock of this replica jump ahead."""
        if self._counted is not None:
            raise ValueError("a replica that counts decodes has the simulation's clock")
        self._clock_s += seconds

    def next_wakeup(self, now: float) -> float | None:
        """Return when to plan again even if nothing happens before."""
        wakeup_s = self.scheduler.next_wakeup(now + self._clock_s)
        return None if wakeup_s is None else wakeup_s - self._clock_s

    def stop_coasting(self) -> None:
        self._ahead.clear()

    def _count(self, num_tokens: int, elapsed_s: float) -> None:
        self.num_steps += 1
        self.num_tokens_computed += num_tokens
        self.busy_s += elapsed_s
        self.last_step = num_tokens, elapsed_s

    def take_events(self) -> list[Told]:
        """Return the events of requests that ended without a step, and tokens that were not delivered yet."""
        owed = [] if self._counted is None else self._counted.take_told()
        return self._told(owed + [Told(event) for event in self.scheduler.take_events()])

    def tell(self, request_id: str | None = None) -> list[Told]:
        """Return the tokens that were committed and not told yet: of one request, or of all."""
        return [] if self._counted is None else self._told(self._counted.tell(request_id))

    def _execute(self, plan: StepPlan | CountedPlan, now: float) -> _Step | _CountedStep:
        sampled = [self._sample(chunk) for chunk in plan.chunks if chunk.samples]
        elapsed_s = self.slowdown * self._cost.step_s(StepWork.of(plan))
        done_s = max(now, self._executor_free_s) + elapsed_s
        if isinstance(plan, CountedPlan):
            return _CountedStep(plan, plan.num_tokens, elapsed_s, done_s, sampled)
        return _Step(plan, StepResult(plan.step_id, tuple(sampled), elapsed_s), done_s)

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

    def _told(self, told: list[Told]) -> list[Told]:
        for each in told:
            event = each.event
            if event.finish_reason is not None:
                self._forget(event.request_id)
            else:
                self._num_output_tokens[event.request_id] += len(event.token_ids)
        return told

    def _forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        self._num_output_tokens.pop(request_id, None)


MODEL = "model"


@dataclass(slots=True, eq=False)
class Member:
    """A replica, the state of the replica, and the records of the driver about the replica."""

    id: str
    replica: SimulatedReplica
    state: ReplicaState
    is_alive: bool = True
    number: int = 0  # in the order of starting
    is_planning: bool = False  # a plan is already due at this instant
    due_s: float | None = None  # when the driver looks at this replica next
    # The driver's actions for this replica, made once: a request means several events.
    plan: Callable[[float], None] | None = None
    commit: Callable[[float], None] | None = None
    num_taken: int = 0  # requests, ever
    role: Role = "both"
    revision: str = ""

    def stats(self) -> EngineStats:
        step_tokens, step_s = self.replica.last_step
        return replace(
            self.replica.scheduler.stats(),
            num_steps=self.replica.num_steps,
            tokens_computed=self.replica.num_tokens_computed,
            step_tokens=step_tokens,
            step_s=step_s,
            busy_s=self.replica.busy_s,
        )


class SimulatedFleet:
    def __init__(
        self,
        build: Callable[[], SimulatedReplica],
        *,
        revisions: Mapping[str, Callable[[], SimulatedReplica]] | None = None,
        block_size: int,
        max_step_tokens: int,
        kv_bytes_per_token: int | None = None,
    ) -> None:
        """`build` makes a replica. `revisions` maps a revision to another function. `kv_bytes_per_token` is None if
        replicas do not read KV from each other."""
        self._build = build
        self._revisions = revisions or {}
        self._kv_bytes_per_token = kv_bytes_per_token
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self.members: dict[str, Member] = {}
        self.all_members: list[Member] = []  # also those that are gone, in order of starting

    def start(self, state: ReplicaState, role: Role = "both", revision: str = "") -> Member:
        number = len(self.all_members)
        replica = self._revisions.get(revision, self._build)()
        member = Member(f"replica-{number}", replica, state, number=number, role=role, revision=revision)
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
                revision=member.revision,
                models=frozenset({MODEL}),
                state=member.state,
                block_size=self._block_size,
                num_kv_blocks=member.replica.cache.num_memory_blocks,
                max_step_tokens=self._max_step_tokens,
            ),
            model=MODEL,
            role=member.role,
            kv_endpoint=member.id if self._kv_bytes_per_token is not None else "",
            kv_bytes_per_token=self._kv_bytes_per_token or 0,
        )
