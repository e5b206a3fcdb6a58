"""LoRA adapters in a running engine: loaded on demand, mixed in one batch, waited for, put away."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.engine_config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.hashing import adapter_digest
from penstock.core.plan import TokenEvent
from penstock.core.request import Adapter, FinishReason, Request
from penstock.engine.adapters import AdapterQueue
from penstock.engine.build import Engine, build_engine
from penstock.engine.collaborator import NO_ADAPTERS, Arrival
from tests.engine.tiny import request, run, tokens
from tests.models.adapters import write_adapter
from tests.models.checkpoints import Reference, make_reference

PROMPT = [7, 11, 200, 45, 9, 30] * 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def merged(base: Reference, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return [write_adapter(base, tmp_path_factory.mktemp(f"lora{seed}"), seed=seed) for seed in range(1, 4)]


def engine_for(base: Reference, max_loras: int = 4, **scheduler: Any) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(base.folder), device="cpu", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128),
        scheduler=SchedulerConfig(**{"itl_target_ms": None, **scheduler}),
        lora=LoRAConfig(max_loras=max_loras, max_lora_rank=8),
        num_threads=1,
    )
    return build_engine(config, base.folder)


def adapter_of(model: Reference) -> Adapter:
    return Adapter(model.name, str(model.folder), adapter_digest(model.folder))


def with_adapter(asked: Request, model: Reference) -> Request:
    return msgspec.structs.replace(asked, adapter=adapter_of(model))


def finish(events: list[TokenEvent]) -> FinishReason | None:
    return events[-1].finish_reason


def test_adapters_and_the_base_model_share_a_batch(base: Reference, merged: list[Reference]) -> None:
    engine = engine_for(base, max_num_batched_tokens=32)  # so that prompts come in pieces too
    asked = [request(f"base-{n}", PROMPT[n:], 10) for n in range(2)]
    for number, model in enumerate(merged):
        asked += [with_adapter(request(f"{number}-{n}", PROMPT[n:], 10), model) for n in range(2)]
    events = run(engine, asked)
    for n in range(2):
        assert tokens(events[f"base-{n}"]) == base.greedy(PROMPT[n:], 10)
        for number, model in enumerate(merged):
            assert tokens(events[f"{number}-{n}"]) == model.greedy(PROMPT[n:], 10)
    assert len({tuple(tokens(events[name])) for name in ("base-0", "0-0", "1-0", "2-0")}) == 4


def test_a_prefix_is_shared_within_an_adapter_only(base: Reference, merged: list[Reference]) -> None:
    engine = engine_for(base)
    first = run(engine, [with_adapter(request("a", PROMPT), merged[0])])
    again = run(engine, [with_adapter(request("b", PROMPT), merged[0])])
    other = run(engine, [with_adapter(request("c", PROMPT), merged[1]), request("d", PROMPT)])
    assert again["b"][0].num_cached_tokens == 32
    assert tokens(again["b"]) == tokens(first["a"])
    assert other["c"][0].num_cached_tokens == other["d"][0].num_cached_tokens == 0


def test_more_adapters_than_slots_take_turns(base: Reference, merged: list[Reference]) -> None:
    engine = engine_for(base, max_loras=1)
    asked = [with_adapter(request(f"{n}", PROMPT, 6), merged[n % 3]) for n in range(6)]
    events = run(engine, asked)
    for n in range(6):
        assert tokens(events[f"{n}"]) == merged[n % 3].greedy(PROMPT, 6)
        assert finish(events[f"{n}"]) is FinishReason.LENGTH


def test_a_bad_adapter_costs_only_its_own_request(base: Reference, merged: list[Reference]) -> None:
    engine = engine_for(base)
    missing = Adapter("missing", "/nowhere", "m")
    engine.loop.add(msgspec.structs.replace(request("bad", PROMPT), adapter=missing))
    events = run(engine, [with_adapter(request("good", PROMPT), merged[0])])
    (rejected,) = engine.loop.take_rejections()
    assert (rejected.request_id, rejected.code) == ("bad", InvalidRequest.code)
    assert "/nowhere has no adapter_config.json" in rejected.message
    assert finish(events["good"]) is FinishReason.LENGTH
    engine.loop.add(msgspec.structs.replace(request("bad", PROMPT), adapter=missing))  # leaves no trace
    engine.loop.abort("bad")
    assert not engine.loop.has_work


def test_weights_that_changed_on_disk_are_not_taken_for_the_old_ones(
    base: Reference, merged: list[Reference], tmp_path: Path
) -> None:
    engine = engine_for(base)
    changed = msgspec.structs.replace(adapter_of(merged[0]), digest="of other weights")
    engine.loop.add(msgspec.structs.replace(request("a", PROMPT), adapter=changed))
    assert run(engine, []) == {}
    (rejected,) = engine.loop.take_rejections()
    assert "has changed on disk" in rejected.message


def test_a_request_may_leave_while_its_adapter_is_loaded(base: Reference, merged: list[Reference]) -> None:
    engine = engine_for(base, max_loras=1)
    engine.loop.add(with_adapter(request("first", PROMPT, 200), merged[0]))
    while not engine.loop.step():
        pass
    engine.loop.add(with_adapter(request("waits", PROMPT), merged[1]))
    engine.loop.add(with_adapter(request("late", PROMPT), merged[1]), timeout_s=0.0)
    for _ in range(20):
        engine.loop.step()
    assert [rejected.code for rejected in engine.loop.take_rejections()] == ["deadline_exceeded"]
    engine.loop.abort("waits")
    engine.loop.abort("first")  # frees the slot
    events = run(engine, [with_adapter(request("next", PROMPT, 4), merged[2])])
    assert tokens(events["next"]) == merged[2].greedy(PROMPT, 4)


def test_an_engine_without_adapters_says_so() -> None:
    engine = build_engine(EngineConfig(model=ModelConfig(model="echo")), Path("echo"))
    assert engine.ready.max_lora_rank == 0
    with pytest.raises(InvalidRequest, match=NO_ADAPTERS):
        engine.loop.add(msgspec.structs.replace(request("a", [1]), adapter=Adapter("x", "/x", "x")))


class Shelf:
    """Loads anything; remembers what."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.loaded: list[str] = []

    def __contains__(self, digest: str) -> bool:
        return digest in self.loaded

    def read(self, adapter: Adapter) -> str:
        if adapter.path == "broken":
            raise InvalidRequest("It cannot be read.")
        return adapter.digest

    def make_room(self, in_use: frozenset[str]) -> bool:
        unused = [digest for digest in self.loaded if digest not in in_use]
        if len(self.loaded) >= self.room and not unused:
            return False
        if len(self.loaded) >= self.room:
            self.loaded.remove(unused[0])
        return True

    def load(self, adapter: Adapter, weights: str) -> None:
        assert adapter.digest == weights
        self.loaded.append(adapter.digest)
        assert len(self.loaded) <= self.room

    def touch(self, digest: str) -> None:
        self.loaded.remove(digest)
        self.loaded.append(digest)


class HeldReader:
    """Stands in for the thread that reads adapters. Every read ends when the test says so, however fast the machine
    is."""

    def __init__(self) -> None:
        self._begun: list[tuple[Future[str], Callable[[], str]]] = []

    def submit(self, read: Callable[[Adapter], str], adapter: Adapter) -> Future[str]:
        future: Future[str] = Future()
        self._begun.append((future, partial(read, adapter)))
        return future

    def end_all(self) -> None:
        for future, read in self._begun:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read())
                except InvalidRequest as error:
                    future.set_exception(error)
        self._begun.clear()

    def shutdown(self, **_: bool) -> None:
        """There is no thread."""


class QueueMachine(RuleBasedStateMachine):
    """Requests come, are let in, leave and time out, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(room=2)
        self.queue = AdapterQueue(self.shelf)
        self.reader = HeldReader()
        self.queue._reader = self.reader  # type: ignore[assignment]
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, str] = {}
        self.num_asked = 0
        self.now = 0.0

    @rule(digest=st.sampled_from("abcde"), patience_s=st.none() | st.just(2.0))
    def come(self, digest: str, patience_s: float | None) -> None:
        asked = msgspec.structs.replace(
            request(f"{self.num_asked}", [1]),
            adapter=Adapter("", "broken" if digest == "e" else "", digest),
            deadline_s=None if patience_s is None else self.now + patience_s,
        )
        self.num_asked += 1
        self.queue.enter(Arrival(asked), self.now)
        self.waiting[asked.id] = asked

    @rule()
    def serve(self) -> None:
        self.reader.end_all()
        self.now += 1.0
        for arrival, error in self.queue.ready(self.now, is_idle=False):
            asked = arrival.request
            assert asked.adapter is not None
            del self.waiting[asked.id]
            if error is None:
                self.running[asked.id] = asked.adapter.digest
            else:
                assert asked.adapter.path == "broken" or asked.deadline_s is not None

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted([*self.waiting, *self.running], key=int)))
        self.queue.forget(gone)
        self.waiting.pop(gone, None)
        self.running.pop(gone, None)

    @invariant()
    def a_request_that_runs_has_its_adapter(self) -> None:
        assert set(self.running.values()) <= set(self.shelf.loaded)
        assert len(self.shelf.loaded) <= self.shelf.room
        assert len(self.queue) == len(self.waiting)

    def teardown(self) -> None:
        """Everyone is served in the end, once those who run leave."""
        for _ in range(4 * self.num_asked + 4):
            for gone in tuple(self.running):
                self.queue.forget(gone)
                del self.running[gone]
            self.serve()
        assert not self.waiting
        self.queue.close()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_an_id_is_let_in_once() -> None:
    queue = AdapterQueue(Shelf(room=1))
    asked = msgspec.structs.replace(request("a", [1]), adapter=Adapter("", "", "a"))
    queue.enter(Arrival(asked), 0.0)
    with pytest.raises(InvalidRequest, match="already being served"):
        queue.enter(Arrival(asked), 0.0)
    queue.close()


def test_the_queue_is_bounded_in_length_and_time() -> None:
    queue = AdapterQueue(Shelf(room=0), max_waiting=2, queue_timeout_s=10.0)
    asked = [msgspec.structs.replace(request(f"{n}", [1]), adapter=Adapter("", "", str(n))) for n in range(3)]
    queue.enter(Arrival(asked[0]), 0.0)
    queue.enter(Arrival(asked[1]), 5.0)
    with pytest.raises(Overloaded, match="Too many requests wait"):
        queue.enter(Arrival(asked[2]), 5.0)
    assert list(queue.ready(9.0, is_idle=False)) == []
    ((gone, error),) = queue.ready(10.0, is_idle=False)
    assert gone.request is asked[0]
    assert isinstance(error, Overloaded)
    queue.enter(Arrival(asked[2]), 10.0)
    queue.close()
