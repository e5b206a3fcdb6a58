"""What a fleet does with requests when replicas come, go and refuse, with replicas that a test holds in its hand."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from penstock.cluster.fleet import Fleet
from penstock.core.clock import VirtualClock
from penstock.core.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, Overloaded
from penstock.core.messages import DrafterStats, EngineStats, KVCleared, KVStored
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.dispatch import Attempt, DispatchConfig, WaitingConfig
from penstock.dispatch.requests import RetryConfig
from penstock.router import ReplicaState, hash_tokens
from tests.cluster.engines import Inbox, send, until
from tests.cluster.fake_replicas import MODEL, FakeReplicas, make_request, member, token_at
from tests.gateway.fake_engine import byte_tokenizer, model_card


class Harness:
    """A fleet, its replicas, and a clock."""

    def __init__(
        self, *replica_ids: str, config: DispatchConfig | None = None, starts_on_demand: bool = False
    ) -> None:
        self.clock = VirtualClock(100.0)
        self.fakes = FakeReplicas()
        self.fleet = Fleet(
            config,
            clock=self.clock,
            seed=0,
            connect=self.fakes.connect,
            starts_on_demand=starts_on_demand,
        )
        self.states = dict.fromkeys(replica_ids, ReplicaState.READY)
        self.tell()

    def tell(self, **states: ReplicaState | None) -> None:
        """The replicas as they are now; None takes one away. Names have _ in place of -."""
        for name, state in states.items():
            if state is None:
                del self.states[name]
            else:
                self.states[name] = state
        self.fleet.update([member(replica_id, state) for replica_id, state in self.states.items()])

    def send(self, request_id: str, max_tokens: int = 5, timeout_s: float | None = None) -> Inbox:
        return send(self.fleet, make_request(request_id, max_tokens), timeout_s)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness("one", "two")
    yield harness
    harness.fleet.close()


def expected(request_id: str, count: int) -> list[int]:
    return [token_at(request_id, position) for position in range(count)]


async def test_a_request_without_output_is_sent_elsewhere_when_its_replica_dies(harness: Harness) -> None:
    inbox = harness.send("a")
    first = harness.fakes.holder_of("a")
    harness.tell(**{first: None})
    second = harness.fakes.holder_of("a")
    assert second != first
    harness.fakes[second].finish_all()
    assert inbox.tokens == expected("a", 5)
    assert inbox.finish_reason is FinishReason.LENGTH
    assert harness.fleet.verdicts == {"restart": 1}


async def test_a_stream_that_has_begun_goes_on_where_it_was(harness: Harness) -> None:
    events: list[TokenEvent] = []
    inbox = Inbox()
    harness.fleet.add(make_request("a"), timeout_s=None, on_event=events.append, on_error=inbox.on_error)
    first = harness.fakes.holder_of("a")
    harness.fakes[first].emit("a", 2)
    harness.tell(**{first: ReplicaState.UNHEALTHY})
    second = harness.fakes[harness.fakes.holder_of("a")]
    assert second.requests["a"].output_token_ids == tuple(expected("a", 2))
    second.finish_all()
    assert [token for event in events for token in event.token_ids] == expected("a", 5)
    assert [event.num_cached_tokens for event in events] == [3, None], "a beginning is told once"
    assert [event.queue_s for event in events] == [0.5, None]
    assert inbox.error is None


async def test_what_only_one_could_answer_waits_for_its_successor() -> None:
    harness = Harness("one")
    inbox = harness.send("a")
    harness.fakes["one"].emit("a", 2)
    harness.tell(one=None, successor=ReplicaState.STARTING)
    assert harness.fleet.waiting.num_requests() == 1
    assert harness.fleet.ready is None
    assert MODEL in harness.fleet.models, "what is known of the model outlives its replica"
    late = harness.send("b")
    harness.tell(successor=ReplicaState.READY)
    harness.fakes["successor"].finish_all()
    assert inbox.tokens == expected("a", 5)
    assert late.tokens == expected("b", 5)
    assert harness.fleet.waiting.num_requests() == 0


async def test_requests_wait_while_the_only_replica_is_killed_and_started_again() -> None:
    harness = Harness("one")
    stream = harness.send("a")
    harness.fakes["one"].emit("a", 2)
    harness.tell(one=ReplicaState.UNHEALTHY)  # frozen: its process is about to be killed
    late = harness.send("b")
    assert not stream.is_over
    assert not late.is_over
    harness.tell(one=None, successor=ReplicaState.STARTING)
    harness.tell(successor=ReplicaState.READY)
    harness.fakes["successor"].finish_all()
    assert (stream.tokens, late.tokens) == (expected("a", 5), expected("b", 5))


async def test_a_known_model_without_replicas_is_unavailable_and_not_unknown() -> None:
    harness = Harness("one")
    harness.tell(one=None)
    error = harness.send("a").error
    assert isinstance(error, EngineUnavailable)
    assert error.retry_after_s


async def test_nobody_waits_when_nobody_comes() -> None:
    harness = Harness("one")
    inbox = harness.send("a")
    harness.tell(one=None)
    assert isinstance(inbox.error, EngineUnavailable)


async def test_who_may_wait_for_replicas_that_are_not_even_starting() -> None:
    harness = Harness("one", starts_on_demand=True)
    harness.tell(one=None)
    notes = Notes()
    harness.fleet.observers.append(notes)
    inbox = harness.send("a")
    assert not inbox.is_over
    harness.tell(next=ReplicaState.READY)
    harness.fakes["next"].finish_all()
    assert inbox.tokens == expected("a", 5)
    assert notes.arrivals == [("a", 8)]


async def test_waiting_has_an_end_and_needs_room() -> None:
    waiting = WaitingConfig(max_requests=1, max_wait_s=0.02)
    harness = Harness("one", config=DispatchConfig(waiting=waiting))
    harness.tell(one=None, successor=ReplicaState.STARTING)
    held, too_many = harness.send("a"), harness.send("b")
    assert isinstance(too_many.error, Overloaded)
    await held.until_over()
    assert isinstance(held.error, EngineUnavailable)
    assert "0 s" in held.error.message


async def test_a_deadline_goes_along_and_ends_retries() -> None:
    harness = Harness("one", "two", "three")
    inbox = harness.send("a", timeout_s=10.0)
    first = harness.fakes.holder_of("a")
    assert harness.fakes[first].timeouts_s["a"] == 10.0
    harness.clock.advance(4.0)
    harness.tell(**{first: None})
    second = harness.fakes.holder_of("a")
    assert harness.fakes[second].timeouts_s["a"] == 6.0
    harness.clock.advance(7.0)
    harness.tell(**{second: None})
    assert isinstance(inbox.error, EngineUnavailable), "no time is left for another attempt"
    assert harness.fleet.verdicts["no_time_left"] == 1


async def test_a_held_stream_ends_with_what_it_has_when_its_time_is_over() -> None:
    harness = Harness("one")
    begun, waiting = harness.send("a", timeout_s=0.02), harness.send("b", timeout_s=0.02)
    harness.fakes["one"].emit("a")
    harness.tell(one=None, successor=ReplicaState.STARTING)
    harness.clock.advance(0.05)
    await waiting.until_over()
    await begun.until_over()
    assert begun.finish_reason is FinishReason.DEADLINE
    assert begun.tokens == expected("a", 1)
    assert isinstance(waiting.error, DeadlineExceeded)


async def test_a_full_replica_sends_a_request_to_the_next(harness: Harness) -> None:
    inbox = harness.send("a")
    first = harness.fakes.holder_of("a")
    harness.fakes[first].reject("a", Overloaded("full"))
    second = harness.fakes.holder_of("a")
    assert second != first
    harness.fakes[second].reject("a", Overloaded("also full"))
    assert isinstance(inbox.error, Overloaded)


async def test_an_invalid_request_is_not_tried_again(harness: Harness) -> None:
    inbox = harness.send("a")
    harness.fakes[harness.fakes.holder_of("a")].reject("a", InvalidRequest("nonsense"))
    assert isinstance(inbox.error, InvalidRequest)
    assert harness.fleet.verdicts == {"not_retryable": 1}


async def test_attempts_and_the_budget_bound_retries() -> None:
    retries = RetryConfig(max_attempts=2, max_budget=1.0, budget_ratio=0.0, budget_per_s=0.0)
    harness = Harness("one", "two", "three", config=DispatchConfig(retries=retries))
    unlucky, second = harness.send("a"), harness.send("b")
    for _ in range(2):
        harness.fakes[harness.fakes.holder_of("a")].reject("a", EngineUnavailable("broken"))
    assert isinstance(unlucky.error, EngineUnavailable)
    harness.fakes[harness.fakes.holder_of("b")].reject("b", EngineUnavailable("broken"))
    assert isinstance(second.error, EngineUnavailable)
    assert harness.fleet.verdicts == {"restart": 1, "no_attempts_left": 1, "no_budget_left": 1}


async def test_a_replica_that_keeps_failing_is_left_alone_for_a_while(harness: Harness) -> None:
    for number in range(200):
        request_id = f"request-{number}"
        harness.send(request_id)
        if harness.fakes.holder_of(request_id) == "one":
            harness.fakes["one"].reject(request_id, EngineUnavailable("broken"))
    assert harness.fleet.replicas["one"].num_failed == 5
    harness.clock.advance(1.5)
    for number in range(200, 300):
        harness.send(f"request-{number}")
    assert len(harness.fakes["one"].requests) == 2, "so many probes, until they succeed"
    harness.fakes["one"].finish_all()
    for number in range(300, 400):
        harness.send(f"request-{number}")
    assert len(harness.fakes["one"].requests) > 2


async def test_an_abort_reaches_the_replica_and_silences_the_request(harness: Harness) -> None:
    inbox = harness.send("a")
    first = harness.fakes.holder_of("a")
    harness.fleet.abort("a")
    harness.fleet.abort("a")
    assert not harness.fakes[first].requests
    harness.tell(**{first: None})
    assert not inbox.is_over
    assert not inbox.tokens
    load = harness.fleet.router.load("two" if first == "one" else "one")
    assert load is not None
    assert load.own_requests == 0


async def test_an_abort_of_one_that_pauses_before_its_next_attempt() -> None:
    harness = Harness("one", "two", "three", config=DispatchConfig(retries=RetryConfig(next_pause_s=0.02)))
    inbox = harness.send("a")
    harness.send("b")
    for request_id in ("a", "a", "b", "b"):
        harness.fakes[harness.fakes.holder_of(request_id)].reject(request_id, EngineUnavailable("broken"))
    harness.fleet.abort("a")
    harness.clock.advance(0.02)
    await until(lambda: any(fake.requests for fake in harness.fakes.by_id.values()))
    # The pause of "b" began after the pause of "a", so both are over.
    assert [list(fake.requests) for fake in harness.fakes.by_id.values() if fake.requests] == [["b"]]
    assert not inbox.is_over


async def test_a_replica_with_another_tokenizer_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness("one")
    fakes = harness.fakes
    harness.tell(two=ReplicaState.READY)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    fakes["two"].describe(model_card(name=MODEL, tokenizer=tokenizer))
    for number in range(8):
        harness.send(f"r{number}")
    assert not fakes["two"].requests
    assert "tokenizer is not that of the other replicas" in caplog.text
    same = byte_tokenizer().to_str(pretty=True).encode()
    assert same != model_card().tokenizer_json
    fakes["two"].describe(model_card(name=MODEL, tokenizer_json=same))
    harness.tell(one=ReplicaState.DRAINING)
    harness.send("s")
    assert fakes.holder_of("s") == "two"
    fakes["two"].describe(model_card(name=MODEL, tokenizer=tokenizer))
    harness.tell(one=None)
    harness.send("last")
    assert fakes.holder_of("last") == "two", "the gateway follows the tokenizer of those that are left"
    harness.fleet.close()


async def test_draining_replicas_keep_what_they_have_and_get_nothing_new(harness: Harness) -> None:
    harness.send("a")
    first = harness.fakes.holder_of("a")
    harness.tell(**{first: ReplicaState.DRAINING})
    for number in range(10):
        harness.send(f"later-{number}")
    assert list(harness.fakes[first].requests) == ["a"]


async def test_kv_events_are_read_from_two_replicas_on_and_lead_requests_to_where_their_prefix_is() -> None:
    harness = Harness("one")
    assert harness.fakes["one"].num_subscriptions == 0
    harness.tell(two=ReplicaState.READY)
    assert [fake.num_subscriptions for fake in harness.fakes.by_id.values()] == [1, 1]
    request = replace(make_request("a"), prompt_token_ids=tuple(range(200)), tenant="someone")
    hashes = tuple(hash_tokens("someone", request.prompt_token_ids, 16))
    harness.fakes["two"].tell_kv_events((KVCleared(0), KVStored(1, hashes, b"")))
    for number in range(5):
        send(harness.fleet, replace(request, id=f"request-{number}"))
    assert len(harness.fakes["two"].requests) == 5
    assert harness.fleet.reasons == {"prefix": 5}
    assert harness.fleet.matched_tokens == 5 * 192


async def test_lost_kv_events_are_asked_for_again_but_not_all_the_time(harness: Harness) -> None:
    fake = harness.fakes["one"]
    fake.tell_kv_events((KVCleared(0),))
    fake.tell_kv_events((KVStored(2, (b"x" * 16,), b""),))  # number 1 was lost
    fake.tell_kv_events((KVStored(3, (b"y" * 16,), b""),))
    assert fake.num_restarts == 1
    harness.clock.advance(1.1)
    fake.tell_kv_events((KVStored(4, (b"z" * 16,), b""),))
    assert fake.num_restarts == 2
    fake.tell_kv_events((KVCleared(5), KVStored(6, (b"w" * 16,), b"")))
    harness.clock.advance(1.1)
    fake.tell_kv_events((KVStored(7, (b"v" * 16,), b""),))
    assert fake.num_restarts == 2


async def test_a_replica_much_slower_than_its_peers_is_left_out() -> None:
    harness = Harness("one", "two", "three")
    for beat in range(1, 200):
        harness.clock.advance(0.1)
        for name, fake in harness.fakes.by_id.items():
            step_s = 0.08 if name == "three" else 0.01
            num_steps = int(beat * 0.1 / step_s)
            fake.tell_stats(EngineStats(num_running=1, num_steps=num_steps, tokens_computed=4 * num_steps))
    assert harness.fleet.replicas["three"].state is ReplicaState.UNHEALTHY
    assert harness.fleet.dispatcher.table.num_ejections == 1
    for number in range(20):
        harness.send(f"request-{number}")
    assert not harness.fakes["three"].requests


async def test_engines_that_start_or_drain_count_as_engines_of_their_model(harness: Harness) -> None:
    harness.tell(one=ReplicaState.STARTING, three=ReplicaState.READY)
    assert harness.fleet.num_engines_of(MODEL) == 3
    harness.tell(one=None)
    assert harness.fleet.num_engines_of(MODEL) == 2
    assert harness.fleet.num_engines_of("another") == 0


async def test_counters_never_fall_when_a_replica_goes(harness: Harness) -> None:
    for fake in harness.fakes.by_id.values():
        drafters = (DrafterStats("lookup", (4, 3), (3, 1)),)
        fake.stats = EngineStats(
            num_running=2, num_steps=10, tokens_computed=100, num_kv_blocks=50, drafters=drafters
        )
        fake.tell_stats(fake.stats)
    assert harness.fleet.stats.num_running == 4
    assert harness.fleet.stats is harness.fleet.stats, "the same object until there is news"
    harness.tell(one=None)
    assert harness.fleet.stats.num_running == 2
    assert harness.fleet.stats.num_kv_blocks == 50
    assert harness.fleet.stats.tokens_computed == harness.fleet.stats_of(MODEL).tokens_computed == 200
    assert harness.fleet.stats.drafters == (DrafterStats("lookup", (8, 6), (6, 2)),)


async def test_drafters_are_added_up_by_name_and_position(harness: Harness) -> None:
    one, two = harness.fakes.by_id.values()
    one.stats = EngineStats(
        drafters=(DrafterStats("heads", (5, 5), (4, 2)), DrafterStats("lookup", (2,), (1,)))
    )
    two.stats = EngineStats(drafters=(DrafterStats("lookup", (3, 2, 1), (2, 1, 0)),))
    for fake in (one, two):
        fake.tell_stats(fake.stats)
    stats = harness.fleet.stats
    assert stats.drafters == (
        DrafterStats("heads", (5, 5), (4, 2)),
        DrafterStats("lookup", (5, 2, 1), (3, 1, 0)),
    )
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 18, 10)


class Notes:
    """Implements `fleet.FleetObserver`."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[str, int]] = []
        self.first_tokens: list[str] = []
        self.attempts: list[Attempt] = []

    def arrived(self, request: Request, uncached_tokens: int) -> None:
        self.arrivals.append((request.id, uncached_tokens))

    def first_token(self, request: Request, replica_id: str, revision: str, ttft_s: float) -> None:
        self.first_tokens.append(replica_id)

    def ended(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)


async def test_observers_hear_of_every_attempt(harness: Harness) -> None:
    notes = Notes()
    harness.fleet.observers.append(notes)
    harness.send("a")
    first = harness.fakes.holder_of("a")
    harness.clock.advance(1.0)
    harness.fakes[first].emit("a", 1)
    harness.clock.advance(1.0)
    harness.tell(**{first: None})
    second = harness.fakes.holder_of("a")
    harness.clock.advance(3.0)
    harness.fakes[second].emit("a", 2)
    harness.clock.advance(2.0)
    harness.fakes[second].emit("a", 2)
    assert notes.arrivals == [("a", 8)]
    assert notes.first_tokens == [first]
    lost, whole = notes.attempts
    assert (lost.replica_id, lost.ttft_s, lost.itl_s) == (first, 1.0, None)
    assert isinstance(lost.error, EngineUnavailable)
    assert (whole.replica_id, whole.ttft_s) == (second, 3.0)
    assert whole.itl_s == pytest.approx(2.0 / 3.0)
    assert whole.output_token_ids == tuple(expected("a", 5)[1:])
    assert whole.finish_reason is FinishReason.LENGTH


async def test_a_revision_is_chosen_per_request_and_kept_once_it_has_begun() -> None:
    fakes = FakeReplicas()
    fleet = Fleet(DispatchConfig(retries=RetryConfig(next_pause_s=0.0)), seed=0, connect=fakes.connect)
    old, new = member("old", revision="1"), member("new", revision="2")
    spare = member("spare", revision="2")
    fleet.update([old, new, spare])
    fleet.choose_revisions(lambda request: "2" if request.id == "canary" else "1")
    for number in range(8):
        send(fleet, make_request(f"usual-{number}"))
    canary = send(fleet, make_request("canary"))
    assert len(fakes["old"].requests) == 8
    holder = fakes.holder_of("canary")
    fakes[holder].emit("canary")
    fleet.choose_revisions(lambda request: "1")
    fleet.update([old, spare if holder == "new" else new])
    other = fakes.holder_of("canary")
    assert other in {"new", "spare"} - {holder}
    fleet.update([old])
    assert fakes.holder_of("canary") == "old", "rather than not at all"
    fakes["old"].finish_all()
    assert canary.tokens == expected("canary", 5)
