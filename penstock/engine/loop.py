"""The engine's heart: plan, execute, commit. Knows no tensor, no socket and no model.

With `depth` 2 the plan of step N+1 is made and submitted before step N's result is collected, so that an
asynchronous executor never waits for the host. With depth 1 (a CPU, which is busy with the step itself) the three
verbs simply follow each other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import StepPlan, StepResult, TokenEvent
from penstock.core.request import Request
from penstock.engine.record import PlanRecorder
from penstock.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.grammar import CompiledGrammar
    from penstock.engine.grammar_desk import GrammarDesk

NO_GRAMMARS = "This engine cannot constrain answers: it has no tokenizer that grammars could be matched with."
_COMPILE_PAUSE_S = 0.002


class Executor(Protocol):
    """Runs plans in the order they are submitted. The scheduler alone decides which tokens a request has: the
    loop passes them on with `append`, after each commit."""

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """A request may appear in plans from now on. `grammar` is that of its sampling settings."""
        ...

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """These tokens now follow those the request already has."""
        ...

    def remove(self, request_id: str) -> None:
        """The request has ended. It may still be part of a submitted plan."""
        ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan."""
        ...


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        depth: int = 1,
        recorder: PlanRecorder | None = None,
        grammars: GrammarDesk | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._depth = depth
        self._recorder = recorder
        self._grammars = grammars
        self._rejections: list[RequestRejected] = []
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0
        self._tokens_computed = 0
        self._step_tokens = 0
        self._step_s = 0.0
        self._plan_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work or bool(self._grammars)

    @property
    def step_s(self) -> float:
        """What the executor needed for the latest step."""
        return self._step_s

    def add(self, request: Request, timeout_s: float | None = None) -> None:
        """Raises what `Scheduler.add` raises; a refused request leaves no trace. One with a grammar is added once
        that is compiled; what is wrong with it shows in `take_rejections`."""
        now = self._clock.now()
        if timeout_s is not None:
            request = msgspec.structs.replace(request, deadline_s=now + timeout_s)
        if request.sampling.grammar is None:
            self._add(request, None, now)
        elif self._grammars is None:
            raise InvalidRequest(NO_GRAMMARS)
        else:
            self._grammars.enter(request, now)

    def take_rejections(self) -> list[RequestRejected]:
        """Requests that `add` accepted, but whose grammar turned out to be no good. Ask after `step`."""
        rejections, self._rejections = self._rejections, []
        return rejections

    def abort(self, request_id: str) -> None:
        now = self._clock.now()
        if self._grammars is not None:
            self._grammars.leave(request_id)
        if self._recorder is not None:
            self._recorder.abort(request_id, now)
        self.scheduler.abort(request_id, now)
        self._executor.remove(request_id)

    def step(self) -> list[TokenEvent]:
        """Advance by at most one committed step; returns the news for clients."""
        if self._grammars:
            self._add_compiled(self._grammars)
        planning_s = self._fill()
        events = self.scheduler.take_events()
        if self._in_flight:
            plan = self._in_flight.popleft()
            result = self._executor.collect()
            committing = self._clock.now()
            events += self._commit(plan, result, committing)
            self._plan_s = planning_s + self._clock.now() - committing
        for event in events:
            if event.finish_reason is not None:
                self._executor.remove(event.request_id)
            elif event.token_ids:
                self._executor.append(event.request_id, event.token_ids)
        return events

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self.scheduler.stats(),
            num_steps=self._num_steps,
            tokens_computed=self._tokens_computed,
            step_tokens=self._step_tokens,
            step_s=self._step_s,
            plan_s=self._plan_s,
        )

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _add(self, request: Request, grammar: CompiledGrammar | None, now: float) -> None:
        self.scheduler.add(request, now)
        if self._recorder is not None:
            self._recorder.add(request, now)
        self._executor.add(request, grammar)

    def _add_compiled(self, grammars: GrammarDesk) -> None:
        if not self._in_flight and not self.scheduler.has_work:
            grammars.pause(_COMPILE_PAUSE_S)
        now = self._clock.now()
        for request, outcome in grammars.served(now):
            try:
                if isinstance(outcome, PenstockError):
                    raise outcome
                self._add(request, outcome, now)
            except PenstockError as error:
                self._rejections.append(
                    RequestRejected(request.id, error.code, error.message, error.retry_after_s)
                )

    def _fill(self) -> float:
        """Submit plans until `depth` are in flight; returns the seconds spent planning."""
        planning_s = 0.0
        while len(self._in_flight) < self._depth:
            now = self._clock.now()
            plan = self.scheduler.plan(now)
            planning_s += self._clock.now() - now
            if self._recorder is not None:
                self._recorder.plan(plan, now)
            if plan is None:
                break
            self._executor.submit(plan)
            self._in_flight.append(plan)
        return planning_s

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        events = self.scheduler.commit(plan, result, now)
        if self._recorder is not None:
            self._recorder.commit(result, now)
        self._num_steps += 1
        self._step_tokens = plan.num_tokens
        self._tokens_computed += plan.num_tokens
        self._step_s = result.elapsed_s
        return events
