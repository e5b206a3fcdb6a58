"""Requests for many answers proceed in slices, and others are served between the slices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import Request
from penstock.gateway.embeddings.service import EmbeddingRequest, Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import BeamOptions, GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.turns import SLICE, Turns
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text, until


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
