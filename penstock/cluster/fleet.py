"""All replicas as one engine, for one gateway process: routes each request, and sees it through when replicas fail.

A request that loses its replica before its first token is sent elsewhere; one that has begun goes on elsewhere, from
the last token that the client got. `control` decides whether to try again, whom to leave alone and who may wait; the
router decides where to. All of it runs on one event loop, without locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import msgspec

from penstock.cluster.disaggregation import KVSources
from penstock.cluster.fleet_config import FleetConfig
from penstock.cluster.held import HeldRequests
from penstock.cluster.journey import Journey
from penstock.cluster.link import Connector, Link
from penstock.cluster.observation import FleetObserver
from penstock.cluster.replica import Member
from penstock.cluster.roster import Roster
from penstock.control.breaker import Circuit, CircuitBreaker
from penstock.control.holding import give_up_s
from penstock.control.retries import Failure, RetryPolicy
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, Overloaded, PenstockError
from penstock.core.messages import EngineReady, EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.router import Decision, ReplicaState, Router, RoutingRequest, hash_tokens, policy_named

_EXPECTED_OUTPUT_TOKENS = 128  # unless the request allows less
# Hashing takes a microsecond or two per block, on the event loop; who shares more than this goes to the same place
# for the sake of this much.
_MAX_HASHED_TOKENS = 32_768


class Fleet:
    """Implements `client.EngineClient`. Who the replicas are is told by `update`."""

    def __init__(
        self,
        config: FleetConfig | None = None,
        *,
        clock: Clock | None = None,
        rng: Random | None = None,
        connect: Connector | None = None,
    ) -> None:
        self.config = config or FleetConfig()
        self._clock = clock or SystemClock()
        self._rng = rng or Random()
        self.router = Router(policy_named(self.config.routing_policy))
        self.roster = Roster(self.router, self.config.outliers, self._clock, connect)
        self.kv_sources = KVSources(self.roster, self.router, self._rng)
        self.held = HeldRequests(self.config.holding)
        self.roster.on_change = self.held.release
        self.holds_without_replicas = False  # set where somebody starts replicas when requests wait
        self.observers: list[FleetObserver] = []
        self.choose_revision: Callable[[Request], str | None] = _any_revision
        self.reasons: Counter[str] = Counter()  # why requests went where they went
        self.verdicts: Counter[str] = Counter()  # on attempts that failed
        self.routed_tokens = 0  # of prompts
        self.matched_tokens = 0  # of those, thought to be cached where they were sent
        self._journeys: dict[str, Journey] = {}
        self._retries = RetryPolicy(self.config.retries)
        self._budget = self._retries.first_budget(self._clock.now())
        self._breaker = CircuitBreaker(self.config.breaker)

    @property
    def ready(self) -> EngineReady | None:
        """Also while there is no replica, where requests are held until one was started for them."""
        ready = self.roster.first_ready
        if ready is None and self.holds_without_replicas:
            return next(iter(self.models.values()), None)
        return ready

    @property
    def models(self) -> Mapping[str, EngineReady]:
        """Every model that was ever served: while its replicas start again, requests for it are held."""
        return self.roster.models

    @property
    def stats(self) -> EngineStats:
        return self.roster.stats

    def stats_of(self, model: str) -> EngineStats:
        return self.roster.stats_of(model)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.roster.members

    async def wait_ready(self) -> EngineReady:
        """Returns when some replica serves, or requests may be held until one does."""
        return self.ready or await self.roster.wait_ready()

    def know(self, models: Mapping[str, EngineReady]) -> None:
        """What was served before this process began; its replicas may all have left since."""
        self.roster.models.update(models)

    def update(self, members: Sequence[Member]) -> None:
        """Somebody came, went, or changed state."""
        for link in self.roster.update(members):
            gone = EngineUnavailable("The engine that served this request is gone.", retry_after_s=5.0)
            link.client.fail(gone)
            link.client.close()

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        now = self._clock.now()
        deadline_s = None if timeout_s is None else now + timeout_s
        journey = Journey(request, on_event, on_error, deadline_s, now)
        self._journeys[request.id] = journey
        self._budget = self._retries.attempted(self._budget, now)
        self._route(journey)

    def abort(self, request_id: str) -> None:
        journey = self._journeys.pop(request_id, None)
        if journey is None:
            return
        self.held.abort(request_id)
        if journey.pause is not None:
            journey.pause.cancel()
        link = journey.link
        if link is not None:
            now = self._clock.now()
            link.client.abort(request_id)
            link.breaker = self._breaker.abandoned(link.breaker)
            self._leave(journey, now)
            self._tell_end(journey, link, now, FinishReason.ABORT, None)

    def close(self) -> None:
        self.roster.close()

    def _route(self, journey: Journey) -> None:
        """Send it to a replica, or keep it until there is one."""
        now = self._clock.now()
        journey.pause = None
        time_left_s = journey.time_left_s(now)
        if time_left_s is not None and time_left_s <= 0.0:
            self._time_out(journey)
            return
        request = journey.remaining()
        try:
            wish, decision = self._choose(journey, request, now)
        except PenstockError as error:
            self._hold(journey, journey.last_error or error, now)
            return
        link = self.roster.links[decision.replica_id]
        if not journey.attempts and journey.held_since_s is None:
            self._tell_arrival(request, len(request.prompt_token_ids) - decision.matched_tokens)
        self.reasons[decision.reason] += 1
        self.routed_tokens += len(request.prompt_token_ids)
        self.matched_tokens += decision.matched_tokens
        journey.begin_attempt(link, now)
        link.num_sent += 1
        link.breaker = self._breaker.sent(link.breaker, now)
        link.client.add(
            request,
            timeout_s=time_left_s,
            on_event=partial(self._on_event, journey),
            on_error=partial(self._on_failure, journey, link),
            kv_source=self.kv_sources.choose(wish, decision, link, now),
        )

    def _choose(self, journey: Journey, request: Request, now: float) -> tuple[RoutingRequest, Decision]:
        """Raises when nobody may take it now."""
        roster = self.roster
        model = self._model_of(request)
        hashes: Sequence[bytes] = ()
        if roster.offers_choice(model):
            block_size = roster.models[model].block_size if model in roster.models else 16
            known_tokens = request.prompt_token_ids + request.output_token_ids
            hashes = hash_tokens(request.prefix_salt, known_tokens[: _MAX_HASHED_TOKENS + 1], block_size)
        wish = RoutingRequest(
            id=request.id,
            model=model,
            num_prompt_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            block_hashes=hashes,
            expected_output_tokens=min(request.sampling.max_tokens, _EXPECTED_OUTPUT_TOKENS),
            # What one revision began, another one might go on with differently: only where there is no choice.
            revision=journey.revision or self.choose_revision(request),
            region=request.region or None,
            affinity_key=request.affinity_key or None,
            excluded=journey.failed_on | self._left_alone(now),
        )
        try:
            return wish, self.router.choose(wish, roster.replicas, now, self._rng)
        except EngineUnavailable:
            if journey.revision is None:
                raise
            wish = replace(wish, revision=self.choose_revision(request))
            return wish, self.router.choose(wish, roster.replicas, now, self._rng)

    def _left_alone(self, now: float) -> frozenset[str]:
        """Replicas that keep failing, and are not to be tried again yet."""
        return frozenset(
            [
                link.id
                for link in self.roster.links.values()
                if link.breaker.circuit is not Circuit.CLOSED and not self._breaker.allows(link.breaker, now)
            ]
        )

    def _hold(self, journey: Journey, error: PenstockError, now: float) -> None:
        """Nobody can take it: wait for a replica that starts, where one does and there is room to wait."""
        request = journey.request
        if not self._may_wait(self._model_of(request)):
            self._end_with_error(journey, error)
            return
        if journey.held_since_s is None:
            journey.held_since_s = now
            if not journey.attempts:
                self._tell_arrival(request, len(request.prompt_token_ids))
        until_s = give_up_s(self.config.holding, journey.held_since_s, journey.deadline_s)
        try:
            self.held.hold(
                request,
                wait_s=max(0.0, until_s - now),
                send=partial(self._route, journey),
                on_error=partial(self._held_too_long, journey),
            )
        except Overloaded as no_room:
            self._end_with_error(journey, no_room)

    def _held_too_long(self, journey: Journey, error: PenstockError) -> None:
        time_left_s = journey.time_left_s(self._clock.now())
        if time_left_s is not None and time_left_s <= 0.0:
            self._time_out(journey)
        else:
            self._end_with_error(journey, error)

    def _on_event(self, journey: Journey, event: TokenEvent) -> None:
        if event.token_ids:
            if journey.first_token_s is None:
                self._on_first_token(journey)
            journey.emitted += event.token_ids
        if journey.num_emitted_before:
            # The client has heard of the beginning from another replica.
            event = msgspec.structs.replace(event, num_cached_tokens=None, queue_s=None, cache_use=None)
        if event.finish_reason is not None:
            self._on_end(journey, event.finish_reason)
        journey.on_event(event)

    def _on_first_token(self, journey: Journey) -> None:
        now = self._clock.now()
        journey.first_token_s = now
        self.router.first_token(journey.request.id, now)
        self.kv_sources.ended(journey.request.id, now)
        link = journey.link
        assert link is not None
        revision = journey.revision = link.member.replica.revision
        if not journey.goes_on:
            for observer in self.observers:
                observer.first_token(journey.request, link.id, revision, now - journey.sent_s)

    def _on_end(self, journey: Journey, reason: FinishReason) -> None:
        del self._journeys[journey.request.id]
        now = self._clock.now()
        self._leave(journey, now)
        link = journey.link
        assert link is not None
        link.breaker = self._breaker.succeeded(link.breaker)
        self._tell_end(journey, link, now, reason, None)

    def _on_failure(self, journey: Journey, link: Link, error: PenstockError) -> None:
        """The replica refused the request, or is gone."""
        if self._journeys.get(journey.request.id) is not journey:
            return  # aborted, by what became of another one that was lost with it
        now = self._clock.now()
        journey.link = None
        self._leave(journey, now)
        if isinstance(error, EngineUnavailable):
            link.num_failed += 1
            link.breaker = self._breaker.failed(link.breaker, now)
        else:
            link.breaker = self._breaker.abandoned(link.breaker)
        self._tell_end(journey, link, now, None, error)
        journey.failed_on |= {link.id}
        failure = Failure(
            attempts=journey.attempts,
            num_emitted_tokens=len(journey.emitted),
            is_retryable=isinstance(error, EngineUnavailable | Overloaded) and self._has_elsewhere(journey),
            deadline_s=journey.deadline_s,
        )
        decision, self._budget = self._retries.decide(failure, self._budget, now)
        self.verdicts[decision.verdict] += 1
        if not decision.is_retry:
            self._end_with_error(journey, error)
            return
        journey.last_error = error
        if decision.pause_s:
            loop = asyncio.get_running_loop()
            journey.pause = loop.call_later(decision.pause_s, self._route, journey)
        else:
            self._route(journey)

    def _leave(self, journey: Journey, now: float) -> None:
        """A request counts no longer where it was."""
        self.router.ended(journey.request.id, now)
        self.kv_sources.ended(journey.request.id, now)

    def _has_elsewhere(self, journey: Journey) -> bool:
        """Whether there is, or will be, a replica that has not failed this request yet."""
        model = self._model_of(journey.request)
        return self._may_wait(model) or any(
            model in replica.models
            and replica.state is ReplicaState.READY
            and replica.id not in journey.failed_on
            for replica in self.roster.replicas
        )

    def _model_of(self, request: Request) -> str:
        return request.model or next(iter(self.roster.models), "")

    def _may_wait(self, model: str) -> bool:
        return self.roster.expects(model) or (self.holds_without_replicas and model in self.roster.models)

    def _time_out(self, journey: Journey) -> None:
        if not journey.emitted:
            late = DeadlineExceeded("The request's deadline passed before its first token.")
            self._end_with_error(journey, late)
        else:  # as an engine does it: what there is of the answer stands
            del self._journeys[journey.request.id]
            journey.on_event(TokenEvent(journey.request.id, finish_reason=FinishReason.DEADLINE))

    def _end_with_error(self, journey: Journey, error: PenstockError) -> None:
        del self._journeys[journey.request.id]
        journey.on_error(error)

    def _tell_arrival(self, request: Request, uncached_tokens: int) -> None:
        for observer in self.observers:
            observer.arrived(request, uncached_tokens)

    def _tell_end(
        self,
        journey: Journey,
        link: Link,
        now: float,
        reason: FinishReason | None,
        error: PenstockError | None,
    ) -> None:
        if self.observers:
            attempt = journey.attempt(link, now, reason, error)
            for observer in self.observers:
                observer.ended(attempt)


def _any_revision(request: Request) -> str | None:
    return None
