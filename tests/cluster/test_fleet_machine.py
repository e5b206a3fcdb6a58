"""Whatever happens to replicas, in whatever order: no token of an answer is missing, none comes twice, every request
ends once, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.cluster.fleet import Fleet
from penstock.core.clock import VirtualClock
from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.plan import TokenEvent
from penstock.dispatch import DispatchConfig
from penstock.dispatch.requests import RetryConfig
from penstock.router import ReplicaState
from tests.cluster.fake_replicas import FakeReplica, FakeReplicas, make_request, member, token_at

MAX_ATTEMPTS = 3


class Reader:
    """A client. Fails at once when it hears what it should not."""

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.is_over = False
        self.is_aborted = False
        self.num_failures = 0  # of replicas that had this request

    def on_event(self, event: TokenEvent) -> None:
        assert not self.is_over
        assert not self.is_aborted
        self.tokens += event.token_ids
        assert self.tokens == [token_at(self.request_id, position) for position in range(len(self.tokens))]
        if event.finish_reason is not None:
            assert len(self.tokens) == self.max_tokens
            self.is_over = True

    def on_error(self, error: PenstockError) -> None:
        assert not self.is_over
        assert not self.is_aborted
        self.is_over = True
        # Replicas start in this test whenever one has gone: only too many attempts are a reason to give up.
        assert self.num_failures >= MAX_ATTEMPTS, error


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.fakes = FakeReplicas()
        self.clock = VirtualClock()
        self.readers: dict[str, Reader] = {}
        self.states: dict[str, ReplicaState] = {}
        self.num_replicas = 0

    def do(self, action: Callable[[], None]) -> None:
        """On the event loop, and one turn more for what it put off."""

        async def act() -> None:
            action()
            await asyncio.sleep(0)

        self.loop.run_until_complete(act())

    @initialize(count=st.integers(1, 6), policy=st.sampled_from(["prefix-aware", "round-robin"]))
    def begin(self, count: int, policy: str) -> None:
        # A budget that no run uses up: a run may fail more than the hundred attempts of the default.
        retries = RetryConfig(max_attempts=MAX_ATTEMPTS, max_budget=100_000.0, next_pause_s=0.0)
        config = DispatchConfig(routing_policy=policy, retries=retries)  # type: ignore[arg-type]
        self.fleet = Fleet(config, clock=self.clock, seed=0, connect=self.fakes.connect)
        for _ in range(count):
            self.start()
        for replica_id in self.states:
            self.states[replica_id] = ReplicaState.READY
        self.do(self.tell)

    def start(self) -> None:
        self.num_replicas += 1
        self.states[f"replica-{self.num_replicas}"] = ReplicaState.STARTING

    def tell(self) -> None:
        self.fleet.update([member(replica_id, state) for replica_id, state in self.states.items()])

    def live(self) -> list[FakeReplica]:
        return [self.fakes[name] for name in self.states if name in self.fakes.by_id]

    def busy(self) -> list[tuple[FakeReplica, str]]:
        return [(fake, request_id) for fake in self.live() for request_id in fake.requests]

    def num_serving(self) -> int:
        return sum(state is ReplicaState.READY for state in self.states.values())

    def note_failures(self, fake: FakeReplica) -> None:
        for request_id in fake.requests:
            self.readers[request_id].num_failures += 1

    @rule(
        lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
        prompt=st.sampled_from([b"short", b"a long one" * 10]),
    )
    def add(self, lengths: list[int], prompt: bytes) -> None:
        for max_tokens in lengths:
            request_id = f"request-{len(self.readers)}"
            reader = self.readers[request_id] = Reader(request_id, max_tokens)
            request = make_request(request_id, max_tokens, prompt)
            send = partial(
                self.fleet.add, request, timeout_s=None, on_event=reader.on_event, on_error=reader.on_error
            )
            self.do(send)

    @precondition(lambda self: self.busy())
    @rule(seed=st.integers(0, 255), count=st.integers(1, 2))
    def emit(self, seed: int, count: int) -> None:
        """About half of the answers go on."""
        rng = Random(seed)
        for fake, request_id in self.busy():
            if rng.random() < 0.5:
                self.do(partial(fake.emit, request_id, count))

    @precondition(lambda self: self.busy() and self.num_serving() > MAX_ATTEMPTS)
    @rule(data=st.data(), is_full=st.booleans())
    def refuse(self, data: st.DataObject, is_full: bool) -> None:
        fake, request_id = data.draw(st.sampled_from(self.busy()))
        self.readers[request_id].num_failures += 1
        error = Overloaded("full") if is_full else EngineUnavailable("broken")
        self.do(partial(fake.reject, request_id, error))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), is_noticed_first=st.booleans())
    def die(self, data: st.DataObject, is_noticed_first: bool) -> None:
        """Another one starts in its place. Before that is known, it may have been called unhealthy."""
        replica_id = data.draw(st.sampled_from(sorted(self.states)))
        if replica_id in self.fakes.by_id:
            self.note_failures(self.fakes[replica_id])
        self.start()
        if is_noticed_first:
            self.states[replica_id] = ReplicaState.UNHEALTHY
            self.do(self.tell)
        del self.states[replica_id]
        self.do(self.tell)

    @rule(data=st.data(), state=st.sampled_from([ReplicaState.READY, ReplicaState.DRAINING]))
    def change(self, data: st.DataObject, state: ReplicaState) -> None:
        replica_id = data.draw(st.sampled_from(sorted(self.states)))
        others = [other for name, other in self.states.items() if name != replica_id]
        if state is ReplicaState.READY or any(other is not ReplicaState.DRAINING for other in others):
            self.states[replica_id] = state
            self.do(self.tell)

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ones = [reader for reader in self.readers.values() if not (reader.is_over or reader.is_aborted)]
        reader = data.draw(st.sampled_from(open_ones))
        reader.is_aborted = True
        self.do(partial(self.fleet.abort, reader.request_id))

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def every_open_request_is_somewhere(self) -> None:
        if not self.states:
            return
        held = self.fleet.waiting.num_requests()
        running = sum(len(fake.requests) for fake in self.live())
        open_ones = sum(not (reader.is_over or reader.is_aborted) for reader in self.readers.values())
        assert running + held == open_ones

    def teardown(self) -> None:
        if self.states:
            for replica_id in self.states:
                self.states[replica_id] = ReplicaState.READY
            self.do(self.tell)
            for fake in self.live():
                self.do(fake.finish_all)
            assert all(reader.is_over or reader.is_aborted for reader in self.readers.values())
            for replica_id in self.states:
                load = self.fleet.router.load(replica_id)
                assert load is not None
                assert load.own_requests == 0
            self.fleet.close()
        self.loop.close()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
