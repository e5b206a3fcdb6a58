"""The engine's loop: plan, execute, commit. Knows no tensor, no socket and no model.

With `depth` 2, step N+1 is planned and submitted before the result of step N is collected, so that an asynchronous
executor never waits for the host. With depth 1, on a CPU, the three verbs follow each other. Every optional feature
is a `Collaborator`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.clock import Clock
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats, RequestRejected
from penstock.core.plan import (
    NO_DRAFTS,
    NOT_A_NUMBER,
    ON_DEVICE,
    OUT_OF_MEMORY,
    Chunk,
    StepPlan,
    StepResult,
    TokenEvent,
)
from penstock.core.request import Request
from penstock.engine.collaborator import Arrival, Collaborator
from penstock.engine.drafters.interface import Drafter
from penstock.scheduler.ranks import RankSchedulers
from penstock.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import CompiledGrammar

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs plans in the order they are submitted. The scheduler alone decides which tokens a request has: the
    loop passes them on with `append`, after each commit."""

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Add a request, which may appear in plans from now on. `grammar` comes from its sampling settings."""
        ...

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Append tokens to a request."""
        ...

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended, and may still be part of a submitted plan."""
        ...

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        """Start a plan. Returns the chunks that were not computed for lack of memory: the first missing piece of each
        such request. The sample of such a request, if it has one, carries an error."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan."""
        ...


@dataclass(slots=True)
class _Counters:
    """The loop's own figures for `EngineStats`."""

    num_steps: int = 0
    tokens_computed: int = 0
    step_tokens: int = 0  # of the latest step
    step_s: float = 0.0  # seconds of the executor for the latest step
    busy_s: float = 0.0  # seconds of the executor for all steps
    plan_s: float = 0.0  # seconds of planning and committing the latest step
    num_nan_logits: int = 0
    num_out_of_memory: int = 0
    image_encoder_s: float = 0.0


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler | RankSchedulers,
        executor: Executor,
        clock: Clock,
        *,
        vocab_size: int,
        depth: int = 1,
        collaborators: Sequence[Collaborator] = (),
        drafter: Drafter | None = None,
    ) -> None:
        """Requests pass the waiting lists of `collaborators` in their order, before they reach the scheduler."""
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._vocab_size = vocab_size
        self._depth = depth
        self._collaborators = list(collaborators)
        self.drafter = drafter
        self._rejections: list[RequestRejected] = []
        self._in_flight: deque[StepPlan] = deque()
        self._is_stuck = False
        self._counters = _Counters()

    def step(self) -> list[TokenEvent]:
        """Advance by at most one committed step. Returns the events for clients."""
        self._admit_ready()
        began_s = self._clock.now()
        executing_s = 0.0
        while len(self._in_flight) < self._depth and (plan := self._plan()) is not None:
            executing_s += self._execute(plan)
        events = self.scheduler.take_events()
        planning_s = self._clock.now() - began_s - executing_s
        self._is_stuck = self._lacks_only_peers()
        if self._in_flight:
            result = self.executor.collect()
            events += self._commit(self._in_flight.popleft(), result, planning_s)
        return self._deliver(events)

    def add(
        self, request: Request, timeout_s: float | None = None, kv_source: KVSource | None = None
    ) -> None:
        """Add a request. Raises the errors of `Scheduler.add` and of waiting lists; a refused request leaves no
        trace. A request that waits for KV, an adapter or a grammar reaches the scheduler later; `take_rejections`
        returns the request if the scheduler refuses it then."""
        now = self._clock.now()
        self._check_token_ids(request)
        if timeout_s is not None:
            request = msgspec.structs.replace(request, deadline_s=now + timeout_s)
        self._advance(Arrival(request, kv_source), 0, now)

    def restart_kv_events(self) -> None:
        """Make the next KV events start with the whole index, for a reader that is new or has missed events."""
        self.scheduler.restart_kv_events(self._clock.now())

    def abort(self, request_id: str) -> None:
        """Forget a request in any state. No event follows. Unknown ids are ignored."""
        now = self._clock.now()
        for collaborator in self._collaborators:
            collaborator.forget(request_id)
        for collaborator in self._collaborators:
            collaborator.aborting(request_id, now)
        self.scheduler.abort(request_id, now)
        self._remove(request_id)

    def take_rejections(self) -> list[RequestRejected]:
        """Return the requests that `add` accepted, and that were refused later. Call this after `step`."""
        rejections, self._rejections = self._rejections, []
        for collaborator in self._collaborators:
            rejections = collaborator.rejections_for_clients(rejections)
        return rejections

    def collaborate_first(self, collaborator: Collaborator) -> None:
        """Add a collaborator whose waiting list comes before all others."""
        self._collaborators.insert(0, collaborator)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work or any(map(len, self._collaborators))

    @property
    def is_stuck(self) -> bool:
        """Return True if every request waits for another engine to send or read KV."""
        return self._is_stuck

    @property
    def step_s(self) -> float:
        """Return the seconds of the executor for the latest step."""
        return self._counters.step_s

    def stats(self) -> EngineStats:
        counters = self._counters
        stats = self.scheduler.stats()
        stats = msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + sum(map(len, self._collaborators)),
            num_steps=counters.num_steps,
            tokens_computed=counters.tokens_computed,
            step_tokens=counters.step_tokens,
            step_s=counters.step_s,
            busy_s=counters.busy_s,
            plan_s=counters.plan_s,
            num_nan_logits=counters.num_nan_logits,
            num_out_of_memory=counters.num_out_of_memory,
            image_encoder_s=counters.image_encoder_s,
        )
        for collaborator in self._collaborators:
            stats = collaborator.add_stats(stats)
        return stats

    def close(self) -> None:
        for collaborator in self._collaborators:
            collaborator.close()

    def _admit_ready(self) -> None:
        """Move requests on that no longer have to wait for a collaborator."""
        for index, collaborator in enumerate(self._collaborators):
            collaborator.before_step()
            is_idle = not self._in_flight and not self.scheduler.has_work
            now = self._clock.now()
            for arrival, error in collaborator.ready(now, is_idle=is_idle):
                try:
                    if error is not None:
                        raise error
                    self._advance(arrival, index + 1, now)
                except PenstockError as refusal:
                    self._reject(arrival.request.id, refusal)

    def _advance(self, arrival: Arrival, first: int, now: float) -> None:
        """Put a request on the next waiting list that it has to pass, or hand it to the scheduler."""
        for collaborator in self._collaborators[first:]:
            if collaborator.must_wait(arrival):
                collaborator.enter(arrival, now)
                return
        self.scheduler.add(arrival.request, now)
        for collaborator in self._collaborators:
            collaborator.added(arrival.request, now)
        self.executor.add(arrival.request, arrival.grammar)
        if self.drafter is not None:
            self.drafter.add(arrival.request)

    def _plan(self) -> StepPlan | None:
        drafts = NO_DRAFTS
        if self.drafter is not None and (wanted := self.scheduler.wants_drafts()):
            # Looking up a token that the model does not have would end the engine.
            drafts = {
                request_id: draft
                for request_id, draft in self.drafter.propose(wanted).items()
                if draft.token_ids
                and (ON_DEVICE in draft.token_ids or min(draft.token_ids) >= 0)
                and max(draft.token_ids) < self._vocab_size
            }
        now = self._clock.now()
        plan = self.scheduler.plan(now, drafts)
        for collaborator in self._collaborators:
            collaborator.planned(plan, drafts, now)
        return plan

    def _execute(self, plan: StepPlan) -> float:
        """Submit a plan. Returns the seconds that it took."""
        began_s = self._clock.now()
        for collaborator in self._collaborators:
            collaborator.executing(plan)
        missing = self.executor.submit(plan)
        for collaborator in self._collaborators:
            collaborator.executed(missing)
        self._in_flight.append(plan)
        for chunk in missing:
            self._fail(chunk)
        return self._clock.now() - began_s

    def _fail(self, chunk: Chunk) -> None:
        logger.error("request %s ends: %s", chunk.request_id, OUT_OF_MEMORY)
        now = self._clock.now()
        self._counters.num_out_of_memory += 1
        for collaborator in self._collaborators:
            collaborator.failing(chunk, OUT_OF_MEMORY, now)
        self.scheduler.fail(chunk, OUT_OF_MEMORY, now)

    def _commit(self, plan: StepPlan, result: StepResult, planning_s: float) -> list[TokenEvent]:
        now = self._clock.now()
        events = self.scheduler.commit(plan, result, now)
        for collaborator in self._collaborators:
            collaborator.committed(result, now)
        counters = self._counters
        counters.num_steps += 1
        counters.step_tokens = plan.num_tokens
        counters.tokens_computed += plan.num_tokens
        counters.step_s = result.elapsed_s
        counters.busy_s += result.elapsed_s
        counters.image_encoder_s += result.encoder_s
        counters.num_nan_logits += sum(event.error == NOT_A_NUMBER for event in events)
        counters.plan_s = planning_s + self._clock.now() - now
        return events

    def _deliver(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Tell the executor about committed tokens and ended requests. Returns the events for clients."""
        for event in events:
            if event.token_ids and self.drafter is not None:
                num_verified = event.draft_use.num_drafted if event.draft_use is not None else 0
                self.drafter.append(event.request_id, event.token_ids, num_verified)
            if event.finish_reason is not None:
                self._remove(event.request_id)
            elif event.token_ids:
                self.executor.append(event.request_id, event.token_ids)
        for_clients = events
        for collaborator in self._collaborators:
            for_clients = collaborator.for_clients(for_clients)
        for event in events:
            if event.finish_reason is not None:
                for collaborator in self._collaborators:
                    collaborator.forget(event.request_id)
        return for_clients

    def _remove(self, request_id: str) -> None:
        self.executor.remove(request_id)
        if self.drafter is not None:
            self.drafter.remove(request_id)

    def _reject(self, request_id: str, error: PenstockError) -> None:
        for collaborator in self._collaborators:
            collaborator.forget(request_id)
        self._rejections.append(RequestRejected(request_id, error.code, error.message, error.retry_after_s))

    def _lacks_only_peers(self) -> bool:
        if self._in_flight or any(len(each) for each in self._collaborators if not each.wakes_worker):
            return False
        return any(each.wakes_worker for each in self._collaborators)

    def _check_token_ids(self, request: Request) -> None:
        """Raise InvalidRequest for a token that the model does not have: looking it up would end the engine."""
        sampling = request.sampling
        for param, token_ids in (
            ("prompt", request.prompt_token_ids),
            ("prompt", request.output_token_ids),
            ("prediction", request.prediction),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", [token_id for sequence in sampling.bad_words for token_id in sequence]),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
                raise InvalidRequest(
                    f"The model has no token {wrong}: its vocabulary has {self._vocab_size}.", param=param
                )
