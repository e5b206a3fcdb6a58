"""The engine's heart: plan, execute, commit. Knows no tensor, no socket and no model.

With `depth` 2 the plan of step N+1 is made and submitted before step N's result is collected, so that an
asynchronous executor never waits for the host. With depth 1 (a CPU, which is busy with the step itself) the three
verbs simply follow each other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import Chunk, StepPlan, StepResult, TokenEvent
from penstock.core.request import Request
from penstock.engine.faults import NOT_A_NUMBER, OUT_OF_MEMORY
from penstock.engine.record import PlanRecorder
from penstock.engine.transfer.borrowing import FetchCounters
from penstock.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.adapter_desk import AdapterDesk
    from penstock.engine.grammar import CompiledGrammar
    from penstock.engine.grammar_desk import GrammarDesk
    from penstock.engine.transfer.desk import TransferDesk

NO_ADAPTERS = "This engine cannot apply LoRA adapters."
log = logging.getLogger(__name__)

NO_GRAMMARS = "This engine cannot constrain answers: it has no tokenizer that grammars could be matched with."
_DESK_PAUSE_S = 0.002


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

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        """Returns what could not be computed for want of memory: the first missing piece of each such request. Its
        sample, if it has one, carries an error."""
        ...

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
        adapters: AdapterDesk[Any] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """`watch` is called before every step, and raises when the executor cannot go on."""
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._depth = depth
        self._recorder = recorder
        self._grammars = grammars
        self._adapters = adapters
        self._watch = watch
        self._transfers: TransferDesk | None = None  # where KV is shared with other engines
        self._rejections: list[RequestRejected] = []
        self._in_flight: deque[StepPlan] = deque()
        self._is_stuck = False
        self._num_steps = 0
        self._tokens_computed = 0
        self._step_tokens = 0
        self._step_s = 0.0
        self._plan_s = 0.0
        self._num_nan_logits = 0
        self._num_out_of_memory = 0

    @property
    def has_work(self) -> bool:
        return (
            bool(self._in_flight)
            or self.scheduler.has_work
            or bool(self._grammars)
            or bool(self._adapters)
            or bool(self._transfers)
        )

    @property
    def is_stuck(self) -> bool:
        """Whether only other engines can bring what there is to do any further."""
        return self._is_stuck

    @property
    def step_s(self) -> float:
        """What the executor needed for the latest step."""
        return self._step_s

    def share_kv(self, transfers: TransferDesk) -> None:
        """Let KV come from other engines, and go to them."""
        self._transfers = transfers

    def add(
        self, request: Request, timeout_s: float | None = None, kv_source: KVSource | None = None
    ) -> None:
        """Raises what `Scheduler.add` raises; a refused request leaves no trace. One with an adapter or a grammar is
        added once that is loaded or compiled, and one with a source of KV once that is there; what is wrong with it
        shows in `take_rejections`."""
        now = self._clock.now()
        if timeout_s is not None:
            request = msgspec.structs.replace(request, deadline_s=now + timeout_s)
        if kv_source is not None and self._transfers is not None and request.pooling is None:
            self._transfers.enter(request, kv_source)
        else:
            self._begin(request, now)

    def _begin(self, request: Request, now: float) -> None:
        """Whatever can come from other engines is here."""
        if request.adapter is None:
            self._enter(request, now)
        elif self._adapters is None:
            raise InvalidRequest(NO_ADAPTERS)
        else:
            self._adapters.enter(request, now)

    def take_rejections(self) -> list[RequestRejected]:
        """Requests that `add` accepted, but whose adapter or grammar turned out to be no good. Ask after `step`."""
        rejections, self._rejections = self._rejections, []
        return rejections if self._transfers is None else self._transfers.take_rejections(rejections)

    def abort(self, request_id: str) -> None:
        now = self._clock.now()
        if self._transfers is not None:
            self._transfers.leave(request_id)
        if self._grammars is not None:
            self._grammars.leave(request_id)
        if self._adapters is not None:
            self._adapters.leave(request_id)
        if self._recorder is not None:
            self._recorder.abort(request_id, now)
        self.scheduler.abort(request_id, now)
        self._executor.remove(request_id)

    def step(self) -> list[TokenEvent]:
        """Advance by at most one committed step; returns the news for clients."""
        if self._transfers is not None:
            self._add_served(self._transfers)
        if self._watch is not None:
            self._watch()
        if self._adapters:
            self._add_adapted(self._adapters)
        if self._grammars:
            self._add_compiled(self._grammars)
        planning_s = self._fill()
        events = self.scheduler.take_events()
        others = self._in_flight or self._grammars or self._adapters
        self._is_stuck = self._transfers is not None and not others
        if self._in_flight:
            plan = self._in_flight.popleft()
            result = self._executor.collect()
            committing = self._clock.now()
            events += self._commit(plan, result, committing)
            self._plan_s = planning_s + self._clock.now() - committing
        for event in events:
            if event.finish_reason is not None:
                self._executor.remove(event.request_id)
                if self._adapters is not None:
                    self._adapters.leave(event.request_id)
            elif event.token_ids:
                self._executor.append(event.request_id, event.token_ids)
        return events if self._transfers is None else self._transfers.take_events(events)

    def stats(self) -> EngineStats:
        fetches = self._transfers.borrowing.counters if self._transfers is not None else FetchCounters()
        stats = self.scheduler.stats()
        num_at_desks = sum(len(desk) for desk in (self._transfers, self._adapters) if desk is not None)
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + num_at_desks,
            num_steps=self._num_steps,
            tokens_computed=self._tokens_computed,
            step_tokens=self._step_tokens,
            step_s=self._step_s,
            plan_s=self._plan_s,
            kv_fetches=fetches.num_begun,
            kv_fetches_failed=fetches.num_failed,
            kv_fetched_tokens=fetches.num_tokens,
            num_nan_logits=self._num_nan_logits,
            num_out_of_memory=self._num_out_of_memory,
        )

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        if self._adapters is not None:
            self._adapters.close()

    def _enter(self, request: Request, now: float) -> None:
        """Its adapter, if it has one, is loaded."""
        if request.sampling.grammar is None:
            self._add(request, None, now)
        elif self._grammars is None:
            raise InvalidRequest(NO_GRAMMARS)
        else:
            self._grammars.enter(request, now)

    def _add(self, request: Request, grammar: CompiledGrammar | None, now: float) -> None:
        self.scheduler.add(request, now)
        if self._recorder is not None:
            self._recorder.add(request, now)
        self._executor.add(request, grammar)

    def _add_served(self, transfers: TransferDesk) -> None:
        now = self._clock.now()
        for request, failure in transfers.served(now, may_wait=self.scheduler.has_work):
            try:
                if failure is not None:
                    raise failure
                self._begin(request, now)
            except PenstockError as error:
                self._reject(request, error)

    def _add_compiled(self, grammars: GrammarDesk) -> None:
        if not self._in_flight and not self.scheduler.has_work:
            grammars.pause(_DESK_PAUSE_S)
        now = self._clock.now()
        for request, outcome in grammars.served(now):
            try:
                if isinstance(outcome, PenstockError):
                    raise outcome
                self._add(request, outcome, now)
            except PenstockError as error:
                self._reject(request, error)

    def _add_adapted(self, adapters: AdapterDesk[Any]) -> None:
        if not self._in_flight and not self.scheduler.has_work:
            adapters.pause(_DESK_PAUSE_S)
        now = self._clock.now()
        for request, failure in adapters.served(now):
            try:
                if failure is not None:
                    raise failure
                self._enter(request, now)
            except PenstockError as error:
                self._reject(request, error)

    def _reject(self, request: Request, error: PenstockError) -> None:
        if self._transfers is not None:
            self._transfers.leave(request.id)
        if self._adapters is not None:
            self._adapters.leave(request.id)
        self._rejections.append(RequestRejected(request.id, error.code, error.message, error.retry_after_s))

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
            if self._transfers is not None:
                self._transfers.begin_step(plan)
            missing = self._executor.submit(plan)
            if self._transfers is not None:
                self._transfers.end_step(missing)
            self._in_flight.append(plan)
            for chunk in missing:
                self._give_up(chunk, now)
        return planning_s

    def _give_up(self, chunk: Chunk, now: float) -> None:
        log.error("request %s ends: %s", chunk.request_id, OUT_OF_MEMORY)
        self._num_out_of_memory += 1
        if self._recorder is not None:
            self._recorder.fail(chunk, OUT_OF_MEMORY, now)
        self.scheduler.fail(chunk, OUT_OF_MEMORY, now)

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        events = self.scheduler.commit(plan, result, now)
        if self._recorder is not None:
            self._recorder.commit(result, now)
        self._num_steps += 1
        self._step_tokens = plan.num_tokens
        self._tokens_computed += plan.num_tokens
        self._step_s = result.elapsed_s
        self._num_nan_logits += sum(event.error == NOT_A_NUMBER for event in events)
        return events
