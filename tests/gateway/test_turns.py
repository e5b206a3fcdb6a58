"""Requests for many answers proceed in slices, and others are served between the slices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.core.errors import EngineUnavailable, Overloaded, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import Request
from penstock.gateway import turns as turns_module
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import BeamOptions, GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.text.tokenizer import ENCODE_THREADS, TextTokenizer
from penstock.gateway.turns import SLICE, FairSlots, Turns, WorkspaceTurns, in_thread, working_for
from tests.gateway.fake_engine import FakeEngine, engine_ready, let_begin, model_card, script_text, until
from tests.loop_time import pass_time, settle


def asked(num_prompts: int = 1, n: int = 1, **options: Any) -> GenerationRequest:
    sampling = SamplingOptions(max_tokens=4)
    prompts = tuple(TextPrompt(f"prompt {number}") for number in range(num_prompts))
    return GenerationRequest(prompts=prompts, sampling=sampling, n=n, **options)


@pytest.mark.parametrize(("num_prompts", "n"), [(20 * SLICE, 1), (20, SLICE)])
async def test_another_request_is_sent_between_the_slices_of_a_large_one(num_prompts: int, n: int) -> None:
    engine = FakeEngine(script_text("ok"))
    gateway = Gateway(engine, GatewayConfig())
    large = asyncio.create_task(gateway.submit(asked(num_prompts, n)))
    await until(lambda: engine.added)
    small = await gateway.submit(asked())
    sent = [request.id for request in engine.added]
    assert sent.index(f"{small.id}-0") < 10 * SLICE
    answers = await (await large).collect()
    assert len(answers) == 20 * SLICE
    assert [answer.index for answer in answers] == list(range(20 * SLICE))
    assert len({request.id for request in engine.added}) == 20 * SLICE + 1


class FailingEngine(FakeEngine):
    """Refuses every request after the first slice."""

    error: Exception = EngineUnavailable("The engine has gone.")

    def add(self, request: Request, **options: Any) -> None:
        if len(self.added) >= SLICE:
            raise self.error
        super().add(request, **options)


@pytest.mark.parametrize("error", [EngineUnavailable("The engine has gone."), ValueError("a bug")])
async def test_an_engine_that_fails_in_a_later_slice_ends_the_request(error: Exception) -> None:
    engine = FailingEngine()
    engine.error = error
    gateway = Gateway(engine, GatewayConfig())
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    answer = await gateway.submit(asked(3 * SLICE))
    with pytest.raises(PenstockError) as failed:
        await answer.collect()
    assert isinstance(failed.value, type(error)) or reported == [error]
    assert not engine.streams, "those that were sent are aborted"
    assert gateway.num_live == 0


class FullEngine(FakeEngine):
    """Has room for some requests, and refuses the others."""

    room = 5 * SLICE

    def add(self, request: Request, *, on_error: Callable[[PenstockError], None], **options: Any) -> None:
        if len(self.streams) < self.room:
            super().add(request, on_error=on_error, **options)
        else:
            asyncio.get_running_loop().call_soon(on_error, Overloaded("The queue is full."))


async def test_of_many_large_requests_at_once_those_are_served_for_which_there_is_room() -> None:
    """Each of them would else get a part of the room, and be refused for the rest."""
    engine = FullEngine()
    gateway = Gateway(engine, GatewayConfig())
    answers = await asyncio.gather(*(gateway.submit(asked(n=2 * SLICE)) for _ in range(6)))
    await until(lambda: gateway.num_live <= 2)
    assert len(engine.streams) == 2 * 2 * SLICE
    for answer in answers[2:]:
        with pytest.raises(Overloaded):
            await answer.collect()
    small = await gateway.submit(asked())
    await until(lambda: f"{small.id}-0" in engine.streams)


async def test_a_request_that_is_cancelled_between_its_slices_sends_no_more() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    answer = await gateway.submit(asked(3 * SLICE))
    answer.cancel()
    await gateway.turns.next()
    assert len(engine.added) == len(engine.aborted) < 3 * SLICE


async def test_searches_with_beams_for_many_prompts_take_turns() -> None:
    engine = FakeEngine()
    gateway = Gateway(engine, GatewayConfig())
    await gateway.submit(asked(8, 2, beams=BeamOptions(width=2)))
    assert len(engine.added) < 8
    await until(lambda: len(engine.added) == 8)


async def test_another_request_is_served_between_the_texts_of_a_large_embedding() -> None:
    engine = FakeEngine(ready=engine_ready(model_card(embedding_size=4)))
    gateway = Gateway(engine, GatewayConfig())
    texts = tuple(f"text {number}" for number in range(20 * SLICE))
    large = asyncio.create_task(Embeddings(gateway).open(EmbeddingRequest(inputs=texts)))
    await asyncio.sleep(0)
    await gateway.submit(asked())
    assert not large.done()
    (await large).cancel()


async def test_turns_are_taken_in_order_and_survive_an_error() -> None:
    turns, order = Turns(), []
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    async def go(name: str) -> None:
        for number in range(2):
            await turns.next()
            order.append(f"{name}{number}")

    def fail() -> None:
        raise ValueError("late")

    going = [asyncio.create_task(go(name)) for name in "ab"]
    doomed = asyncio.create_task(go("c"))
    await asyncio.sleep(0)
    turns.wait(fail)
    doomed.cancel()
    await asyncio.gather(*going)
    assert order == ["a0", "b0", "a1", "b1"]
    assert [str(error) for error in reported] == ["late"]


async def test_large_requests_of_workspaces_take_turns() -> None:
    turns, order = Turns(), []

    def go_on(name: str) -> None:
        order.append(name)
        if name == "greedy 0":
            turns.wait(partial(order.append, "greedy 0 again"), is_next=True)

    for number in range(3):
        working_for.set("greedy")
        turns.wait(partial(go_on, f"greedy {number}"))
    working_for.set("other")
    await turns.next()
    assert order == ["greedy 0", "greedy 0 again"]
    await until(lambda: len(order) == 4)


async def test_workspaces_share_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    may_end = threading.Semaphore(0)

    def work(name: str) -> None:
        begun.append(name)
        assert may_end.acquire(timeout=60)

    async def ask(workspace_id: str) -> None:
        working_for.set(workspace_id)
        await in_thread(work, workspace_id)

    monkeypatch.setattr(turns_module, "_NUM_THREADS", 2)
    asked = [asyncio.create_task(ask("greedy")) for _ in range(6)]
    await until(lambda: len(begun) == 2)
    asked.append(asyncio.create_task(ask("other")))
    await asyncio.sleep(0)
    await let_begin(begun, "other", may_end)
    assert begun.index("other") in (2, 3)
    may_end.release(len(asked))
    await asyncio.gather(*asked)


async def test_threads_of_callers_who_left_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        assert may_end.wait(60)
        raise ValueError("nobody reads this")

    monkeypatch.setattr(turns_module, "_NUM_THREADS", 1)
    first = asyncio.create_task(in_thread(work, 1))
    await until(lambda: begun)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(in_thread(work, 2))
    await settle()
    assert begun == [1]
    may_end.set()
    with pytest.raises(ValueError, match="nobody"):
        await second


async def test_workspaces_share_the_threads_of_a_tokenizer() -> None:
    tokenizer = TextTokenizer(model_card())
    begun: list[str] = []
    may_end = threading.Semaphore(0)

    async def ask(workspace_id: str) -> None:
        def work() -> None:
            begun.append(workspace_id)
            assert may_end.acquire(timeout=60)

        working_for.set(workspace_id)
        await tokenizer._off_loop(work, "a text")

    asked = [asyncio.create_task(ask("greedy")) for _ in range(6)]
    asked.append(asyncio.create_task(ask("other")))
    await until(lambda: len(begun) == ENCODE_THREADS)
    await let_begin(begun, "other", may_end)
    assert begun.index("other") <= ENCODE_THREADS + 1
    may_end.release(len(asked))
    await asyncio.gather(*asked)


async def test_workspaces_take_turns_with_long_work() -> None:
    turns = WorkspaceTurns()
    done: list[str] = []
    greedy = [asyncio.create_task(turns.run("greedy", partial(done.append, "greedy"))) for _ in range(3)]
    other = asyncio.create_task(turns.run("other", partial(done.append, "other")))
    left = asyncio.create_task(turns.run("left", partial(done.append, "left")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(*greedy, other)
    assert done == ["greedy", "other", "greedy", "greedy"]
    await turns.run("late", partial(done.append, "late"))
    assert done[-1] == "late"


async def test_the_event_loop_is_free_for_as_long_as_the_work_took() -> None:
    turns = WorkspaceTurns()
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(turns.run("one", partial(pass_time, 30.0)))
    second = asyncio.create_task(turns.run("two", partial(pass_time, 1.0)))
    await first
    await settle()
    assert not second.done()
    pass_time(30.0)
    await second
    ended_s = loop.time()
    with pytest.raises(ValueError, match="bad"):
        await turns.run("three", _fail)
    await turns.run("four", partial(pass_time, 0.0))
    assert loop.time() - ended_s < 30.0


async def test_a_turn_of_work_that_is_cancelled_goes_to_the_next() -> None:
    turns = WorkspaceTurns()
    first = asyncio.create_task(turns.run("one", partial(pass_time, 0.0)))
    second = asyncio.create_task(turns.run("two", partial(pass_time, 0.0)))
    await asyncio.sleep(0)  # both wait
    await asyncio.sleep(0)  # the turn is the first one's, which has not begun
    first.cancel()
    await second
    assert first.cancelled()


async def test_slots_go_to_the_workspace_that_has_the_fewest() -> None:
    slots = FairSlots(2)
    served: list[str] = []

    async def take(workspace_id: str) -> None:
        await slots.acquire(workspace_id)
        served.append(workspace_id)

    greedy = [asyncio.create_task(take("greedy")) for _ in range(5)]
    late = [asyncio.create_task(take("late")) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert served == ["greedy"] * 2
    slots.release("greedy")
    slots.release("greedy")
    late[1].cancel()  # at the moment when it may have been given a slot
    await asyncio.wait(late)
    assert served[2:] == ["late", "greedy"]
    for holder in (served[2], served[3]):
        slots.release(holder)
    await asyncio.wait_for(greedy[3], 60)
    slots.release("greedy")
    slots.release("greedy")
    await asyncio.gather(*greedy)
    async with slots.slot("last"):
        pass


def _fail() -> None:
    raise ValueError("bad")
