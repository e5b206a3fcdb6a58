"""Replicas without processes: a test decides when each of them answers, fails or falls silent.

What a fake answers depends on the request and the position alone, so that any replica can go on with what another one
began, and a gap or a repetition shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.cluster.replica import Member, ReplicaSpec
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.messages import EngineReady, EngineStats, KVEvent, ModelCard
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.router import Replica, ReplicaState
from tests.gateway.fake_engine import engine_ready, model_card

MODEL = "fake"


def token_at(request_id: str, position: int) -> int:
    return (sum(request_id.encode()) * 31 + position * 7) % 251


def make_request(request_id: str, max_tokens: int = 5, prompt: bytes = b"a prompt") -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        model=MODEL,
    )


def member(replica_id: str, state: ReplicaState = ReplicaState.READY, **changes: str) -> Member:
    return Member(
        replica=Replica(
            id=replica_id,
            models=frozenset((MODEL,)),
            state=state,
            revision=changes.get("revision", ""),
            num_kv_blocks=4096,
        ),
        spec=ReplicaSpec(model=MODEL, engine=EngineConfig(), model_path="fake"),
        endpoint=f"fake://{replica_id}",
    )


class FakeReplica:
    """Implements `client.ReplicaClient`."""

    def __init__(
        self,
        on_ready: Callable[[], None],
        on_stats: Callable[[EngineStats], None],
        on_events: Callable[[Sequence[TokenEvent]], None],
        on_kv_events: Callable[[tuple[KVEvent, ...]], None],
    ) -> None:
        self._on_ready = on_ready
        self.tell_events = on_events
        self.tell_stats = on_stats
        self.tell_kv_events = on_kv_events
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.requests: dict[str, Request] = {}
        self.timeouts_s: dict[str, float | None] = {}
        self.num_emitted: dict[str, int] = {}
        self._on_error: dict[str, Callable[[PenstockError], None]] = {}
        self.num_subscriptions = 0
        self.num_restarts = 0
        self.is_closed = False

    def start(self) -> None:
        self.describe(model_card(name=MODEL))

    def describe(self, card: ModelCard) -> None:
        """Become ready with a model."""
        self.ready = engine_ready(card)
        self._on_ready()

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_error: Callable[[PenstockError], None],
        **_: object,
    ) -> None:
        assert not self.is_closed
        if self.ready is None:
            on_error(EngineUnavailable("not ready"))
            return
        self.requests[request.id] = request
        self.timeouts_s[request.id] = timeout_s
        self.num_emitted[request.id] = len(request.output_token_ids)
        self._on_error[request.id] = on_error

    def abort(self, request_id: str) -> None:
        self._forget(request_id)

    def fail(self, error: PenstockError) -> None:
        self.ready = None
        self._on_ready()
        for request_id in tuple(self.requests):
            self.reject(request_id, error)

    def close(self) -> None:
        self.is_closed = True
        for request_id in tuple(self.requests):
            self._forget(request_id)

    def subscribe_kv_events(self) -> None:
        self.num_subscriptions += 1

    def restart_kv_events(self) -> None:
        self.num_restarts += 1

    def reject(self, request_id: str, error: PenstockError) -> None:
        on_error = self._on_error.get(request_id)
        self._forget(request_id)
        if on_error is not None:
            on_error(error)

    def emit(self, request_id: str, count: int = 1) -> None:
        """The next tokens of an answer, up to its end."""
        request = self.requests[request_id]
        start = self.num_emitted[request_id]
        end = min(start + count, request.sampling.max_tokens)
        self.num_emitted[request_id] = end
        tokens = tuple(token_at(request_id, position) for position in range(start, end))
        is_first = start == len(request.output_token_ids)
        is_last = end == request.sampling.max_tokens
        if is_last:
            self._forget(request_id)
        event = TokenEvent(
            request_id,
            tokens,
            finish_reason=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=3 if is_first else None,
            queue_s=0.5 if is_first else None,
        )
        self.tell_events((event,))

    def finish_all(self) -> None:
        for request_id in tuple(self.requests):
            self.emit(request_id, 1_000_000)

    def _forget(self, request_id: str) -> None:
        for known in (self.requests, self._on_error, self.num_emitted):
            known.pop(request_id, None)  # type: ignore[attr-defined]


class FakeReplicas:
    """All that a fleet connected to, by id."""

    def __init__(self) -> None:
        self.by_id: dict[str, FakeReplica] = {}

    def connect(
        self,
        member: Member,
        *,
        on_ready: Callable[[], None],
        on_stats: Callable[[EngineStats], None],
        on_events: Callable[[Sequence[TokenEvent]], None],
        on_kv_events: Callable[[tuple[KVEvent, ...]], None],
    ) -> FakeReplica:
        fake = self.by_id[member.id] = FakeReplica(on_ready, on_stats, on_events, on_kv_events)
        return fake

    def __getitem__(self, replica_id: str) -> FakeReplica:
        return self.by_id[replica_id]

    def holder_of(self, request_id: str) -> str:
        (holder,) = (name for name, fake in self.by_id.items() if request_id in fake.requests)
        return holder
