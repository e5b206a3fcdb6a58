"""Properties of the dispatcher under random faults: every request ends exactly once, no token is delivered twice or
lost, the waiting room stays bounded, and an open circuit gets no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import EngineUnavailable, InvalidRequest, Overloaded
from penstock.core.messages import EngineStats
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.dispatch import (
    Action,
    Cancel,
    Deliver,
    DispatchConfig,
    Dispatcher,
    Fail,
    FleetStatus,
    ReplicaStatus,
    Send,
    WaitingConfig,
    WakeAt,
)
from penstock.dispatch.health import BreakerConfig, Circuit
from penstock.dispatch.requests import RetryConfig
from penstock.router import Replica, ReplicaState

MODEL = "model"
WAITING = WaitingConfig(max_requests=4, max_tokens=40, max_wait_s=5.0)
BREAKER = BreakerConfig(max_failures=2, probes=1, first_pause_s=1.0)
CONFIG = DispatchConfig(
    routing_policy="power-of-two",
    waiting=WAITING,
    breaker=BREAKER,
    retries=RetryConfig(max_attempts=3, next_pause_s=0.2),
)
LIVE_STATES = [ReplicaState.STARTING, ReplicaState.WARMING, ReplicaState.READY, ReplicaState.DRAINING]


@dataclass
class Client:
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    has_left: bool = False


@dataclass
class Server:
    """A replica: its state, and the requests that it has."""

    state: ReplicaState
    requests: dict[str, Request] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)


class DispatchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wake_s: float | None = None
        self.clients: dict[str, Client] = {}
        self.servers: dict[str, Server] = {}
        self.num_servers = 0
        self.starts_on_demand = False

    @initialize(seed=st.integers(0, 1000), count=st.integers(0, 4), on_demand=st.booleans())
    def begin(self, seed: int, count: int, on_demand: bool) -> None:
        self.dispatcher = Dispatcher(CONFIG, Random(seed), self.now)
        self.starts_on_demand = on_demand
        for _ in range(count):
            self.start()
        self.update()

    def start(self, state: ReplicaState = ReplicaState.READY) -> None:
        self.num_servers += 1
        self.servers[f"replica-{self.num_servers}"] = Server(state)

    def update(self) -> None:
        replicas = tuple(
            ReplicaStatus(
                replica=Replica(id=name, models=frozenset({MODEL}), state=server.state),
                model=MODEL,
                is_connected=server.state is not ReplicaState.STARTING,
            )
            for name, server in self.servers.items()
        )
        status = FleetStatus(replicas=replicas, models={MODEL: 16}, starts_on_demand=self.starts_on_demand)
        self.act(self.dispatcher.update(status, self.now))

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(replica_id, request, _, _):
                    server = self.servers[replica_id]
                    assert server.state is ReplicaState.READY
                    assert request.id not in server.requests
                    client = self.clients[request.id]
                    assert list(request.output_token_ids) == client.tokens, (
                        "a replica continues where the client is"
                    )
                    server.requests[request.id] = request
                    server.emitted[request.id] = len(client.tokens)
                case Cancel(replica_id, request_id):
                    del self.servers[replica_id].requests[request_id]
                case Deliver(events):
                    for event in events:
                        self.deliver(event)
                case Fail(request_id, _):
                    client = self.clients[request_id]
                    assert not client.num_ends
                    assert not client.has_left
                    client.num_ends += 1
                case WakeAt(at_s):
                    self.wake_s = at_s
                case _:
                    pass

    def deliver(self, event: TokenEvent) -> None:
        client = self.clients[event.request_id]
        assert not client.num_ends
        assert not client.has_left
        client.tokens += event.token_ids
        assert client.tokens == list(range(len(client.tokens)))
        client.num_ends += event.finish_reason is not None

    def running(self) -> list[tuple[str, str]]:
        return [(name, request_id) for name, server in self.servers.items() for request_id in server.requests]

    @rule(
        count=st.integers(1, 5),
        max_tokens=st.integers(1, 4),
        prompt_tokens=st.integers(1, 20),
        timeout_s=st.none() | st.floats(0.1, 3.0),
        tenant=st.sampled_from(["", "a", "b", "c"]),
    )
    def add(
        self, count: int, max_tokens: int, prompt_tokens: int, timeout_s: float | None, tenant: str
    ) -> None:
        for _ in range(count):
            request_id = f"request-{len(self.clients)}"
            self.clients[request_id] = Client(max_tokens)
            request = Request(
                id=request_id,
                prompt_token_ids=(1,) * prompt_tokens,
                sampling=SamplingParams(max_tokens=max_tokens),
                model=MODEL,
                tenant=tenant,
            )
            is_open = self.open_circuits()
            actions = self.dispatcher.add(request, self.now, timeout_s=timeout_s)
            assert not [each for each in actions if isinstance(each, Send) and each.replica_id in is_open]
            self.act(actions)

    def open_circuits(self) -> set[str]:
        """Replicas that the circuit breaker must protect at this moment."""
        return {
            record.id
            for record in self.dispatcher.table.records.values()
            if (record.breaker.circuit is Circuit.OPEN and self.now < record.breaker.retry_at_s)
            or (
                record.breaker.circuit is Circuit.HALF_OPEN
                and record.breaker.probing + record.breaker.succeeded >= BREAKER.probes
            )
        }

    @precondition(lambda self: self.running())
    @rule(data=st.data(), count=st.integers(1, 5))
    def emit(self, data: st.DataObject, count: int) -> None:
        name, request_id = data.draw(st.sampled_from(self.running()))
        server, client = self.servers[name], self.clients[request_id]
        start = server.emitted[request_id]
        end = server.emitted[request_id] = min(start + count, client.max_tokens)
        is_last = end == client.max_tokens
        if is_last:
            del server.requests[request_id]
        event = TokenEvent(
            request_id, tuple(range(start, end)), finish_reason=FinishReason.LENGTH if is_last else None
        )
        self.act(self.dispatcher.news(name, [event], self.now))

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        error=st.sampled_from([EngineUnavailable("broken"), Overloaded("full"), InvalidRequest("bad")]),
    )
    def refuse(self, data: st.DataObject, error: Exception) -> None:
        name, request_id = data.draw(st.sampled_from(self.running()))
        del self.servers[name].requests[request_id]
        self.act(self.dispatcher.failed(name, request_id, error, self.now))  # type: ignore[arg-type]

    @precondition(lambda self: self.servers)
    @rule(data=st.data(), is_replaced=st.booleans())
    def lose(self, data: st.DataObject, is_replaced: bool) -> None:
        """A replica dies with everything that it has. A late event of it must change nothing."""
        name = data.draw(st.sampled_from(sorted(self.servers)))
        server = self.servers.pop(name)
        if is_replaced:
            self.start(ReplicaState.STARTING)
        self.update()
        for request_id in server.requests:
            late = TokenEvent(request_id, (99,), finish_reason=FinishReason.LENGTH)
            assert not self.dispatcher.news(name, [late], self.now)
            assert not self.dispatcher.failed(name, request_id, EngineUnavailable("late"), self.now)

    @rule(data=st.data(), state=st.sampled_from(LIVE_STATES))
    def change(self, data: st.DataObject, state: ReplicaState) -> None:
        if self.servers:
            server = self.servers[data.draw(st.sampled_from(sorted(self.servers)))]
            if state in (ReplicaState.READY, ReplicaState.DRAINING) or not server.requests:
                server.state = state
        else:
            self.start(state)
        self.update()

    @rule(data=st.data(), num_running=st.integers(0, 3), step_s=st.floats(0.01, 1.0))
    def beat(self, data: st.DataObject, num_running: int, step_s: float) -> None:
        for number, name in enumerate(sorted(self.servers)):
            steps = int(self.now / (step_s if number else 0.01)) + 1
            stats = EngineStats(num_running=num_running, num_steps=steps, tokens_computed=steps)
            self.act(self.dispatcher.heartbeat(name, stats, self.now))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.clients)))
        client = self.clients[request_id]
        actions = self.dispatcher.abort(request_id, self.now)
        if client.num_ends or client.has_left:
            assert not actions
            return
        client.has_left = True
        self.act(actions)

    @rule(seconds=st.floats(0.01, 4.0))
    def wait(self, seconds: float) -> None:
        until_s = self.now + seconds
        while self.wake_s is not None and self.wake_s <= until_s:
            self.now, self.wake_s = max(self.now, self.wake_s), None
            self.act(self.dispatcher.tick(self.now))
        self.now = until_s

    @invariant()
    def every_open_request_is_known_and_every_other_forgotten(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        clients = self.clients.values()
        assert all(client.num_ends <= 1 for client in clients)
        open_ones = sum(not client.num_ends and not client.has_left for client in clients)
        assert self.dispatcher.num_requests == open_ones
        assert self.dispatcher.waiting.num_requests() <= WAITING.max_requests
        assert self.dispatcher.waiting.num_tokens() <= WAITING.max_tokens
        if self.dispatcher.waiting.num_requests():
            assert self.wake_s is not None, "waiting has an end"

    def teardown(self) -> None:
        """Every replica answers, and time passes: nothing stays behind."""
        if not hasattr(self, "dispatcher"):
            return
        for _ in range(10):
            for name, request_id in self.running():
                client = self.clients[request_id]
                tokens = tuple(range(len(client.tokens), client.max_tokens))
                del self.servers[name].requests[request_id]
                event = TokenEvent(request_id, tokens, finish_reason=FinishReason.LENGTH)
                self.act(self.dispatcher.news(name, [event], self.now))
            self.wait(WAITING.max_wait_s)
        assert self.dispatcher.num_requests == 0
        assert all(client.num_ends == 1 or client.has_left for client in self.clients.values())
        for name in self.servers:
            load = self.dispatcher.router.load(name)
            assert load is None or load.own_requests == 0


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(
    max_examples=settings.default.max_examples * 3 // 4, stateful_step_count=40, deadline=None
)
