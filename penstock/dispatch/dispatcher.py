"""The fleet's state machine: requests, events of replicas and the time go in, actions come out. Does no I/O.

    update(status, now)                       replicas came, went or changed
    route_by(weights, now)                    some revisions have routing weights of their own
    add(request, now, ...)                    a client asks
    abort(request_id, now)                    a client left
    news(replica_id, events, now)             a replica sent events of answers
    failed(replica_id, request_id, error, now)  a replica refused a request or lost it
    heartbeat(replica_id, stats, now)         a replica reported its load
    kv_events(replica_id, events, now)        a replica reported changes of its cache
    tick(now)                                 the time of the last WakeAt has come

Every method returns the actions that its driver must carry out, in order; see `actions`. A request that loses its
replica before its first token is sent to another one; an answer that has begun continues elsewhere after the last
token that the client got. A request that finds no replica waits for one that starts, if there is room.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from penstock.core.errors import DeadlineExceeded, EngineUnavailable, ModelNotFound, Overloaded, PenstockError
from penstock.core.messages import EngineStats, KVEvent, KVStored
from penstock.core.objective import RoutingWeights
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.dispatch.actions import (
    Action,
    Arrived,
    AttemptEnded,
    Cancel,
    Deliver,
    Eject,
    Fail,
    FirstToken,
    ResyncKVEvents,
    Send,
    SubscribeKVEvents,
    Waits,
    WakeAt,
)
from penstock.dispatch.config import DispatchConfig
from penstock.dispatch.health import CircuitBreaker
from penstock.dispatch.kept import KeptPrefixes
from penstock.dispatch.kv_sources import KVSources
from penstock.dispatch.replicas import FleetStatus, ReplicaRecord, ReplicaTable
from penstock.dispatch.requests import (
    Failure,
    RequestPhase,
    RequestRecord,
    RetryPolicy,
    Timers,
    WaitingRoom,
    last_sent_by_others,
    tenants_at,
)
from penstock.dispatch.suspects import Suspects
from penstock.router import Decision, RandomSource, Router, RoutingRequest, hash_tokens, policy_named

_EXPECTED_OUTPUT_TOKENS = 128  # unless the request's limit is lower
# Hashing takes one or two microseconds per block, on the event loop. Requests that share more than this many tokens
# are routed together because of these tokens.
_MAX_HASHED_TOKENS = 32_768
_DEFAULT_BLOCK_SIZE = 16
_NOTHING: tuple[Action, ...] = ()


class Dispatcher:
    def __init__(self, config: DispatchConfig, rng: RandomSource, now: float) -> None:
        self.config = config
        self._rng = rng
        self.router = Router(policy_named(config.routing_policy, config.routing))
        self.table = ReplicaTable(self.router, config.outliers)
        self.kv_sources = KVSources(self.table, rng)
        self.waiting = WaitingRoom(config.waiting)
        self.kept = KeptPrefixes()
        self.choose_revision: Callable[[Request], str | None] = _any_revision  # asked for every attempt
        self.reasons: Counter[str] = Counter()  # the reasons of routing decisions
        self.verdicts: Counter[str] = Counter()  # on attempts that failed
        self.routed_tokens = 0  # of prompts
        self.matched_tokens = 0  # routed tokens that were expected in the cache of their replica
        self._requests: dict[str, RequestRecord] = {}
        self._retries = RetryPolicy(config.retries)
        self._budget = self._retries.first_budget(now)
        self._breaker = CircuitBreaker(config.breaker)
        self.suspects = Suspects(config.suspects)
        self._timers = Timers(self._requests)
        self._wake_s: float | None = None  # the time that the driver was last asked to call `tick`

    @property
    def num_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def update(self, status: FleetStatus, now: float) -> Sequence[Action]:
        lost = self.table.update(status)
        if lost:
            self.kv_sources.speeds.keep(self.table.records)
        actions = self._after_change(now)
        gone = EngineUnavailable("The engine that served this request is gone.", retry_after_s=5.0)
        for record in tuple(self._requests.values()):
            record.failed_on = record.failed_on.difference(
                lost
            )  # a replica that comes back may be tried again
            if record.replica_id in lost:
                self._fail_attempt(record, lost[record.replica_id], gone, now, actions)
        return self._with_wakeup(actions)

    def route_by(self, weights: Mapping[str, RoutingWeights], now: float) -> Sequence[Action]:
        """Route requests for these revisions by the given weights; all others as configured."""
        policy = self.config.routing_policy
        self.router.policies = {name: policy_named(policy, each) for name, each in weights.items()}
        return _NOTHING

    def add(
        self,
        request: Request,
        now: float,
        *,
        timeout_s: float | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> Sequence[Action]:
        """Route a new request. A driver that has the `block_hashes` of the prompt passes them, to save their
        computation."""
        deadline_s = None if timeout_s is None else now + timeout_s
        record = self._requests[request.id] = RequestRecord(request, deadline_s, block_hashes, arrived_s=now)
        self._budget = self._retries.attempted(self._budget, now)
        self.suspects.arrived(request.tenant, now)
        actions: list[Action] = []
        self._route(record, now, actions)
        return self._with_wakeup(actions)

    def abort(self, request_id: str, now: float) -> Sequence[Action]:
        record = self._requests.pop(request_id, None)
        if record is None:
            return _NOTHING
        self.waiting.leave(request_id)
        if record.replica_id is None:
            return _NOTHING
        replica = self.table.records[record.replica_id]
        replica.breaker = self._breaker.abandoned(replica.breaker)
        if record.is_watched:
            self.suspects.abandoned(record.request.tenant, now)
        self._leave_replica(record, now)
        ended = AttemptEnded(record.attempt(replica.revision, now, FinishReason.ABORT, None))
        return [Cancel(replica.id, request_id), ended]

    def news(self, replica_id: str, events: Sequence[TokenEvent], now: float) -> Sequence[Action]:
        """Deliver events of a replica. Events of a request that the replica no longer has are ignored."""
        actions: list[Action] = []
        delivered: list[TokenEvent] = []
        requests = self._requests
        self.table.note_life(replica_id, now)
        for event in events:
            record = requests.get(event.request_id)
            if record is None or record.replica_id != replica_id:
                continue
            if record.is_streaming and event.finish_reason is None:
                record.emitted += event.token_ids
            else:
                event = self._note_event(record, event, now, actions)
            delivered.append(event)
        if delivered:
            actions.append(Deliver(tuple(delivered)))
        return actions

    def _note_event(
        self, record: RequestRecord, event: TokenEvent, now: float, actions: list[Action]
    ) -> TokenEvent:
        """Note the first or last event of an attempt, or any event of a continued answer. Returns the event for its
        client."""
        if event.token_ids:
            if record.first_token_s is None:
                self._note_first_token(record, now, actions)
            record.emitted += event.token_ids
        if record.num_emitted_before:
            # Another replica has reported the beginning of this answer to the client.
            event = msgspec.structs.replace(
                event, num_cached_tokens=None, queue_s=None, cache_use=None, prefill=None
            )
        elif event.cache_use is not None and record.replica_id is not None:
            model, block_size = self._cache_of(record.replica_id)
            event = self.kept.settled(
                record.request,
                record.replica_id,
                event,
                record.arrived_s,
                model=model,
                block_size=block_size,
            )
        if event.finish_reason is not None:
            self._finish(record, event.finish_reason, now, actions)
        return event

    def failed(self, replica_id: str, request_id: str, error: PenstockError, now: float) -> Sequence[Action]:
        record = self._requests.get(request_id)
        if record is None or record.replica_id != replica_id:
            return _NOTHING
        actions: list[Action] = []
        self._fail_attempt(record, self.table.records[replica_id], error, now, actions)
        return self._with_wakeup(actions)

    def heartbeat(self, replica_id: str, stats: EngineStats, now: float) -> Sequence[Action]:
        self.kv_sources.speeds.heard(replica_id, stats, now)
        self.table.note_life(replica_id, now)
        changed = self.table.heartbeat(replica_id, stats, now)
        if not changed:
            return _NOTHING
        actions: list[Action] = [Eject(record.id, record.is_slow) for record in changed]
        actions += self._after_change(now)
        return self._with_wakeup(actions)

    def kv_events(self, replica_id: str, events: tuple[KVEvent, ...], now: float) -> Sequence[Action]:
        for event in events:
            if isinstance(event, KVStored) and event.kept:
                model, _ = self._cache_of(replica_id)
                self.kept.told(model, replica_id, event.kept, now)
        return (ResyncKVEvents(replica_id),) if self.table.kv_events(replica_id, events, now) else _NOTHING

    def tick(self, now: float) -> Sequence[Action]:
        self._wake_s = None
        actions: list[Action] = []
        for record in self._timers.due(now):
            if record.phase is RequestPhase.WAITING:
                self.waiting.leave(record.request.id)
                self._give_up_waiting(record, now, actions)
            else:
                self._route(record, now, actions)
        return self._with_wakeup(actions)

    def _after_change(self, now: float) -> list[Action]:
        """Route the waiting requests again after replicas changed, first come first served."""
        actions: list[Action] = [SubscribeKVEvents(name) for name in self.table.take_new_readers()]
        for request_id in self.waiting.leave_all():
            self._route(self._requests[request_id], now, actions)
        return actions

    def _route(self, record: RequestRecord, now: float, actions: list[Action]) -> None:
        """Send a request to a replica, or let it wait for one."""
        time_left_s = record.time_left_s(now)
        if time_left_s is not None and time_left_s <= 0.0:
            self._time_out(record, actions)
            return
        record.is_watched = False
        if (record.num_losses or not self.suspects.is_quiet(now)) and self._holds_back(record, now, actions):
            return
        request = record.remaining()
        try:
            routed, decision = self._choose(record, request, now)
        except PenstockError as error:
            self._wait(record, record.last_error or error, now, actions)
            return
        if not record.attempts and record.waiting_since_s is None:
            uncached = len(request.prompt_token_ids) - decision.matched_tokens
            actions.append(Arrived(record.request, uncached))
        self.reasons[decision.reason] += 1
        self.routed_tokens += len(request.prompt_token_ids)
        self.matched_tokens += decision.matched_tokens
        replica = self.table.records[decision.replica_id]
        replica.num_sent += 1
        replica.breaker = self._breaker.sent(replica.breaker, now)
        record.begin_attempt(replica.id, now)
        if record.is_watched:
            self.suspects.sent(record.request.tenant, replica.id, now)
        kv_source = None
        serves_itself = replica.status.role == "prefill"
        if not serves_itself and (request.sampling.prompt_logprobs is None or request.output_token_ids):
            kv_source = self.kv_sources.choose(routed, decision, replica, now)
        actions.append(
            Send(replica.id, request, time_left_s, kv_source, decision.reason, decision.matched_tokens)
        )

    def _holds_back(self, record: RequestRecord, now: float, actions: list[Action]) -> bool:
        """End a request whose tenant is refused, or let a request wait for the end of a test. Returns True if the
        request ended or waits."""
        suspects, tenant = self.suspects, record.request.tenant
        refusal = suspects.refusal(tenant, now)
        if refusal is not None:
            self._end_with_error(record, refusal, actions)
            return True
        record.is_watched = suspects.is_watched(tenant, record.num_losses, now)
        held_s = 0.0 if record.held_since_s is None else now - record.held_since_s
        serving = self.table.ready_for(self._model_of(record.request))
        if record.is_watched:
            self._prepare_test(tenant, serving, now)
        if not suspects.must_wait(tenant, serving, held_s, now, is_watched=record.is_watched):
            return False
        if record.held_since_s is None:
            record.held_since_s = now
        record.phase = RequestPhase.PAUSED
        wake_s = now + self.config.suspects.look_again_s
        self._timers.set(record, wake_s if record.deadline_s is None else min(wake_s, record.deadline_s))
        return True

    def _prepare_test(self, tenant: str, serving: Collection[str], now: float) -> None:
        """Set a replica aside for the test of a tenant, and note when no other tenant uses the replica."""
        last_sent_s: dict[str, float] | None = None

        def others(replica_id: str) -> float:
            nonlocal last_sent_s
            if last_sent_s is None:
                last_sent_s = last_sent_by_others(tenant, self._requests.values())
            return last_sent_s.get(replica_id, -math.inf)

        replica_id = self.suspects.replica_to_clear(tenant, others, serving, now)
        if replica_id is not None and others(replica_id) < now - self.config.suspects.test_s:
            self.suspects.cleared(tenant)

    def _choose(self, record: RequestRecord, request: Request, now: float) -> tuple[RoutingRequest, Decision]:
        """Choose a replica. Raises when no replica may take the request now."""
        if not self.suspects.is_quiet(now):
            serving = self.table.ready_for(self._model_of(request))
            avoided = self.suspects.avoided(request.tenant, serving, now, is_watched=record.is_watched)
            with contextlib.suppress(EngineUnavailable, ModelNotFound):
                return self._choose_without(avoided, record, request, now)
        return self._choose_without(frozenset(), record, request, now)

    def _choose_without(
        self, avoided: frozenset[str], record: RequestRecord, request: Request, now: float
    ) -> tuple[RoutingRequest, Decision]:
        model = self._model_of(request)
        routed = RoutingRequest(
            id=request.id,
            model=model,
            num_prompt_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            block_hashes=self._hashes(record, request, model),
            expected_output_tokens=min(request.sampling.max_tokens, _EXPECTED_OUTPUT_TOKENS),
            # Another revision might continue an answer differently, so it is the last resort.
            revision=record.revision or self._revision_for(request),
            region=request.region or None,
            spill_over_s=request.spill_over_s,
            affinity_key=request.affinity_key or None,
            excluded=record.failed_on | self.table.left_alone(self._breaker, now) | avoided,
        )
        try:
            return self._choose_serving(record, routed, now)
        except (EngineUnavailable, ModelNotFound):
            # A prefill replica that answers by itself is better than the wait for a decode replica that starts.
            decision = self.kv_sources.choose_to_serve(routed, now)
            if decision is None:
                raise
            return routed, decision

    def _choose_serving(
        self, record: RequestRecord, routed: RoutingRequest, now: float
    ) -> tuple[RoutingRequest, Decision]:
        model, serving = routed.model, self.table.serving
        try:
            return routed, self.router.choose(routed, serving, now, self._rng)
        except ModelNotFound:
            if model not in self.table.status.models:
                raise
            raise EngineUnavailable(f"No replica of {model!r} is running now.", retry_after_s=5.0) from None
        except EngineUnavailable:
            if record.revision is None:
                raise
            routed = msgspec.structs.replace(routed, revision=self._revision_for(record.request))
            return routed, self.router.choose(routed, serving, now, self._rng)

    def _hashes(self, record: RequestRecord, request: Request, model: str) -> Sequence[bytes]:
        if record.block_hashes is not None:
            return record.block_hashes
        if not self.table.offers_choice(model):
            return ()
        block_size = self.table.status.models.get(model, _DEFAULT_BLOCK_SIZE)
        tokens = request.key_token_ids + request.output_token_ids
        return hash_tokens(request.prefix_salt, tokens[: _MAX_HASHED_TOKENS + 1], block_size)

    def _revision_for(self, request: Request) -> str | None:
        return self.choose_revision(request)

    def _wait(self, record: RequestRecord, error: PenstockError, now: float, actions: list[Action]) -> None:
        """Let a request wait for a replica that starts; end it with `error` when none does."""
        request = record.request
        if not self.table.expects(self._model_of(request)):
            self._end_with_error(record, error, actions)
            return
        if record.waiting_since_s is None:
            record.waiting_since_s = now
            if not record.attempts:
                actions.append(Arrived(request, len(request.prompt_token_ids)))
        try:
            self.waiting.enter(request)
        except Overloaded as no_room:
            self._end_with_error(record, no_room, actions)
            return
        record.phase = RequestPhase.WAITING
        self._timers.set(record, self.waiting.give_up_s(record.waiting_since_s, record.deadline_s))
        actions.append(Waits(request.id))

    def _give_up_waiting(self, record: RequestRecord, now: float, actions: list[Action]) -> None:
        time_left_s = record.time_left_s(now)
        if time_left_s is not None and time_left_s <= 0.0:
            self._time_out(record, actions)
        else:
            self._end_with_error(record, self.waiting.too_late(), actions)

    def _note_first_token(self, record: RequestRecord, now: float, actions: list[Action]) -> None:
        assert record.replica_id is not None
        record.first_token_s = now
        record.is_streaming = not record.num_emitted_before
        self.router.first_token(record.request.id, now)
        self.kv_sources.ended(record.request.id, now)
        revision = record.revision = self.table.records[record.replica_id].revision
        if not record.num_emitted_before:
            ttft_s = now - record.sent_s
            actions.append(FirstToken(record.request, record.replica_id, revision, ttft_s))

    def _finish(self, record: RequestRecord, reason: FinishReason, now: float, actions: list[Action]) -> None:
        assert record.replica_id is not None
        del self._requests[record.request.id]
        self._leave_replica(record, now)
        replica = self.table.records[record.replica_id]
        replica.breaker = self._breaker.succeeded(replica.breaker)
        if record.is_watched:
            self.suspects.served(record.request.tenant, now)
        actions.append(AttemptEnded(record.attempt(replica.revision, now, reason, None)))

    def _fail_attempt(
        self,
        record: RequestRecord,
        replica: ReplicaRecord,
        error: PenstockError,
        now: float,
        actions: list[Action],
    ) -> None:
        """End the attempt of a request whose replica refused it, lost it, or is gone."""
        self._leave_replica(record, now)
        if isinstance(error, EngineUnavailable):
            self._note_loss(record, replica, now)
            replica.num_failed += 1
            replica.breaker = self._breaker.failed(replica.breaker, now)
            self.table.note_failure(replica)
        else:
            replica.breaker = self._breaker.abandoned(replica.breaker)
            if record.is_watched:
                self.suspects.abandoned(record.request.tenant, now)
        actions.append(AttemptEnded(record.attempt(replica.revision, now, None, error)))
        record.replica_id = None
        if replica.id in self.table.records:
            record.failed_on |= {replica.id}
        failure = Failure(
            attempts=record.attempts,
            num_emitted_tokens=len(record.emitted),
            is_retryable=isinstance(error, EngineUnavailable | Overloaded) and self._has_elsewhere(record),
            deadline_s=record.deadline_s,
        )
        decision, self._budget = self._retries.decide(failure, self._budget, now)
        self.verdicts[decision.verdict] += 1
        if not decision.is_retry:
            self._end_with_error(record, error, actions)
            return
        record.last_error = error
        if decision.pause_s:
            record.phase = RequestPhase.PAUSED
            self._timers.set(record, now + decision.pause_s)
        else:
            self._route(record, now, actions)

    def _note_loss(self, record: RequestRecord, replica: ReplicaRecord, now: float) -> None:
        if record.num_losses == 0 or replica.heard_s > record.lost_s:
            record.num_losses += 1
            record.lost_s = now
        record.last_lost = (replica.id, record.sent_s)
        if record.is_watched:
            tenant = record.request.tenant
            since_s = now - self.config.suspects.test_s
            is_alone = tenants_at(replica.id, since_s, self._requests.values()) == {tenant}
            self.suspects.lost(tenant, replica.id, now, is_alone=is_alone)

    def _leave_replica(self, record: RequestRecord, now: float) -> None:
        """Stop counting a request at its replica."""
        self.router.ended(record.request.id, now)
        self.kv_sources.ended(record.request.id, now)

    def _has_elsewhere(self, record: RequestRecord) -> bool:
        """Return whether there is, or will be, a replica that has not failed this request yet."""
        model = self._model_of(record.request)
        return self.table.expects(model) or self.table.serves(model, excluding=record.failed_on)

    def _cache_of(self, replica_id: str) -> tuple[str, int]:
        """Return the model of a replica, and the block size of its cache."""
        record = self.table.records.get(replica_id)
        model = "" if record is None else record.status.model
        return model, self.table.status.models.get(model, _DEFAULT_BLOCK_SIZE)

    def _model_of(self, request: Request) -> str:
        return request.model or next(iter(self.table.status.models), "")

    def _time_out(self, record: RequestRecord, actions: list[Action]) -> None:
        if not record.emitted:
            late = DeadlineExceeded("The request's deadline passed before its first token.")
            self._end_with_error(record, late, actions)
        else:  # as in an engine: the tokens that the client got stay valid
            del self._requests[record.request.id]
            actions.append(Deliver((TokenEvent(record.request.id, finish_reason=FinishReason.DEADLINE),)))

    def _end_with_error(self, record: RequestRecord, error: PenstockError, actions: list[Action]) -> None:
        del self._requests[record.request.id]
        actions.append(Fail(record.request.id, error))

    def _with_wakeup(self, actions: list[Action]) -> Sequence[Action]:
        """Ask for a call of `tick` when the first timer is due, unless that was asked for already."""
        wake_s = self._timers.next_s()
        if wake_s is not None and wake_s != self._wake_s:
            self._wake_s = wake_s
            actions.append(WakeAt(wake_s))
        return actions


def _any_revision(request: Request) -> str | None:
    return None
