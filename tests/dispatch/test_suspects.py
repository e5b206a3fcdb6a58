"""Requests of one tenant that end every engine they reach, among those of others, on a simulated fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.core.messages import HEARTBEAT_INTERVAL_S, EngineStats
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
)
from penstock.dispatch.suspects import SuspectConfig, Suspects
from penstock.router import Replica, ReplicaState

MODEL = "model"
TICK_S = 0.05
RESTART_S = 1.0


class Fleet:
    """Replicas that a request with poison ends after a while, and that start again under another name."""

    def __init__(self, num_replicas: int, seed: int, fatal_after_s: float) -> None:
        self.now = 100.0
        self.dispatcher = Dispatcher(DispatchConfig(), Random(seed), self.now)
        self.fatal_after_s = fatal_after_s
        self.running: dict[str, dict[str, tuple[Request, float]]] = {}
        self.starting: list[tuple[float, str]] = []
        self.num_started = 0
        self.ends: list[float] = []  # of replicas
        self.errors: dict[str, PenstockError] = {}
        self.num_served: Counter[str] = Counter()
        self.num_lost: Counter[str] = Counter()  # by request
        self.num_asked = 0
        for _ in range(num_replicas):
            self.start()
        self.update()

    def start(self) -> None:
        self.num_started += 1
        self.running[f"replica-{self.num_started}"] = {}

    def update(self) -> None:
        replicas = [(name, ReplicaState.READY) for name in self.running]
        replicas += [(name, ReplicaState.STARTING) for _, name in self.starting]
        status = FleetStatus(
            replicas=tuple(
                ReplicaStatus(
                    replica=Replica(id=name, models=frozenset({MODEL}), state=state),
                    model=MODEL,
                    is_connected=state is ReplicaState.READY,
                )
                for name, state in replicas
            ),
            models={MODEL: 16},
        )
        self.act(self.dispatcher.update(status, self.now))

    def ask(self, tenant: str) -> str:
        self.num_asked += 1
        request_id = f"{tenant} {self.num_asked}"
        request = Request(
            id=request_id,
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=1),
            model=MODEL,
            tenant=tenant,
        )
        self.act(self.dispatcher.add(request, self.now))
        return request_id

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(replica_id, request):
                    self.running[replica_id][request.id] = (request, self.now)
                case Cancel(replica_id, request_id):
                    del self.running[replica_id][request_id]
                case Fail(request_id, error):
                    self.errors[request_id] = error
                case Deliver(events):
                    self.num_served.update(event.request_id.split()[0] for event in events)

    def end(self, replica_id: str) -> None:
        self.ends.append(self.now)
        self.num_lost.update(list(self.running.pop(replica_id)))
        self.num_started += 1
        self.starting.append((self.now + RESTART_S, f"replica-{self.num_started}"))
        self.update()

    def run(self, seconds: float, answer_s: float = 0.5) -> None:
        until_s = self.now + seconds
        next_beat_s = self.now
        while self.now < until_s:
            self.now += TICK_S
            self.act(self.dispatcher.tick(self.now))
            if any(due_s <= self.now for due_s, _ in self.starting):
                for due_s, name in tuple(self.starting):
                    if due_s <= self.now:
                        self.starting.remove((due_s, name))
                        self.running[name] = {}
                self.update()
            for name in tuple(self.running):
                if self.now >= next_beat_s:
                    self.act(self.dispatcher.heartbeat(name, EngineStats(), self.now))
                work = list(self.running[name].values())
                if any(
                    each.tenant == "evil" and self.now - sent_s >= self.fatal_after_s for each, sent_s in work
                ):
                    self.end(name)
                    continue
                for request, sent_s in work:
                    if request.tenant != "evil" and self.now - sent_s >= answer_s:
                        del self.running[name][request.id]
                        event = TokenEvent(request.id, (7,), finish_reason=FinishReason.LENGTH)
                        self.act(self.dispatcher.news(name, [event], self.now))
            if self.now >= next_beat_s:
                next_beat_s += HEARTBEAT_INTERVAL_S


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_a_tenant_whose_requests_end_engines_is_refused_and_the_others_are_served(num_replicas: int) -> None:
    fleet = Fleet(num_replicas, 1, fatal_after_s=0.3)
    for _ in range(60):
        fleet.ask("evil")
        for tenant in ("a", "b"):
            fleet.ask(tenant)
        fleet.run(1.0)
    fleet.run(20.0)
    others = {name: error for name, error in fleet.errors.items() if not name.startswith("evil")}
    assert not others
    assert fleet.num_served["a"] == fleet.num_served["b"] == 60
    # As long as it goes on, one engine ends at the end of each pause, and the pauses double.
    late = [ends_s for ends_s in fleet.ends if ends_s > 120.0]
    assert len(late) <= 3
    assert fleet.dispatcher.suspects.num_convicted


def test_one_such_request_ends_few_engines() -> None:
    fleet = Fleet(10, 1, fatal_after_s=0.3)
    fleet.ask("other")
    poison = fleet.ask("evil")
    fleet.run(30.0)
    assert len(fleet.ends) <= 4
    assert poison in fleet.errors
    again = fleet.ask("evil")
    fleet.run(1.0)
    assert len(fleet.ends) <= 5
    assert "refused for a while" in fleet.errors[again].message
    assert fleet.errors[again].retry_after_s


def test_a_tenant_is_found_while_all_engines_end_all_the_time() -> None:
    """No replica is ever without requests of both tenants, unless one is set aside."""
    fleet = Fleet(3, 0, fatal_after_s=0.3)
    for _ in range(40):
        fleet.ask("evil")
        fleet.ask("other")
        fleet.run(0.5)
    fleet.run(20.0)
    assert fleet.num_served["other"] == 40
    assert len(fleet.ends) <= 10
    assert "refused for a while" in fleet.errors["evil 79"].message


def test_a_tenant_is_let_in_again_when_a_request_of_it_is_served() -> None:
    fleet = Fleet(4, 1, fatal_after_s=0.3)
    fleet.ask("a")
    for _ in range(2):
        fleet.ask("evil")
        fleet.run(8.0)
    assert fleet.dispatcher.suspects.num_convicted == 2
    fleet.fatal_after_s = 1e9  # the tenant has mended its prompts
    fleet.ask("a")
    fleet.run(20.0)
    request_id = fleet.ask("evil")
    assert request_id not in fleet.errors
    other = fleet.ask("evil")
    assert other in fleet.errors, "one at a time"
    (name,) = [name for name, work in fleet.running.items() if request_id in work]
    event = TokenEvent(request_id, (7,), finish_reason=FinishReason.LENGTH)
    del fleet.running[name][request_id]
    fleet.act(fleet.dispatcher.news(name, [event], fleet.now))
    assert all(fleet.ask("evil") not in fleet.errors for _ in range(5))


def test_replicas_that_are_lost_together_make_nobody_suspect() -> None:
    fleet = Fleet(6, 1, fatal_after_s=1e9)
    for number in range(30):
        fleet.ask(f"tenant-{number % 3}")
    for name in list(fleet.running)[:4]:  # the machine that they were on
        fleet.end(name)
    assert all(record.num_losses <= 1 for record in fleet.dispatcher._requests.values())
    assert fleet.dispatcher.suspects.is_quiet(fleet.now)
    fleet.run(10.0)
    assert not fleet.errors


def test_machine_after_machine_may_be_lost_and_everybody_is_served() -> None:
    fleet = Fleet(6, 1, fatal_after_s=1e9)
    for number in range(60):
        fleet.ask(f"tenant-{number % 10}")
    for _ in range(2):
        fleet.run(0.4)
        for name in list(fleet.running)[:1]:
            fleet.end(name)
    fleet.run(40.0)
    assert not fleet.errors
    assert sum(fleet.num_served.values()) == 60


def test_where_there_is_one_tenant_nothing_is_held_back() -> None:
    fleet = Fleet(8, 1, fatal_after_s=0.3)
    poison = fleet.ask("evil")
    fleet.run(20.0)
    assert len(fleet.ends) == 4, "attempts"
    assert "gone" in fleet.errors[poison].message
    assert fleet.ask("evil") not in fleet.errors


@given(
    num_replicas=st.integers(2, 8),
    seed=st.integers(0, 1000),
    fatal_after_s=st.sampled_from([0.1, 0.3, 0.8]),
    at_once=st.integers(1, 4),
    num_others=st.integers(1, 5),
)
@settings(deadline=None, max_examples=40)
def test_others_are_served_and_engines_stand_whatever_one_tenant_sends(
    num_replicas: int, seed: int, fatal_after_s: float, at_once: int, num_others: int
) -> None:
    fleet = Fleet(num_replicas, seed, fatal_after_s)
    for _ in range(40):
        for _ in range(at_once):
            fleet.ask("evil")
        for number in range(num_others):
            fleet.ask(f"other-{number}")
        fleet.run(0.5)
    fleet.run(40.0)
    innocent = [error for name, error in fleet.errors.items() if not name.startswith("evil")]
    assert not [error for error in innocent if "refused for a while" in error.message], (
        "nobody else is refused"
    )
    served = sum(fleet.num_served[f"other-{number}"] for number in range(num_others))
    assert served + len(innocent) == 40 * num_others
    assert len(innocent) <= 0.1 * 40 * num_others
    assert fleet.dispatcher.num_requests == 0
    after = [ends_s for ends_s in fleet.ends if ends_s > 110.0]
    assert len(after) <= 4


@given(
    st.lists(st.tuples(st.sampled_from("slafw"), st.sampled_from("abc"), st.floats(0.0, 3.0)), max_size=80)
)
@settings(deadline=None)
def test_what_one_tenant_does_never_refuses_another(steps: list[tuple[str, str, float]]) -> None:
    suspects, now = Suspects(SuspectConfig()), 1.0
    suspects.arrived("good", now)
    suspects.arrived("bad", now)
    for verb, replica_id, elapsed_s in steps:
        now += elapsed_s
        if verb == "s":
            suspects.sent("bad", replica_id, now)
        elif verb == "l":
            suspects.lost("bad", replica_id, now, is_alone=True)
        elif verb == "a":
            suspects.abandoned("bad", now)
        elif verb == "f":
            suspects.served("bad", now)
        assert suspects.refusal("good", now) is None
        for is_watched in (False, True):
            if suspects.must_wait("good", ("a", "b", "c"), 0.0, now, is_watched=is_watched):
                raise AssertionError("one test leaves two replicas of three")
        later = now + SuspectConfig().breaker.max_pause_s
        assert suspects.refusal("bad", later) is None or suspects._circuits["bad"].probing
