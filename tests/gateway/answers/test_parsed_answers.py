"""Answers with reasoning and calls on their way through the gateway: merged, counted, cut, and only where wanted."""

from __future__ import annotations

from typing import Any

from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import FinishReason
from penstock.gateway.answers.choice import Delta
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SamplingOptions,
    Tool,
    ToolChoice,
)
from tests.gateway.fake_engine import CHAT_TEMPLATE, EOS_ID, FakeEngine, engine_ready, model_card

THINKING = CHAT_TEMPLATE + "{# <think> #}"
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


async def submit(
    engine: FakeEngine,
    *,
    tools: bool = True,
    choice: ToolChoice | None = None,
    n: int = 1,
    **sampling: Any,
) -> AnswerStream:
    prompt = ChatPrompt(
        messages=(ChatMessage("user", "hi"),),
        tools=(Tool("f"),) if tools else (),
        tool_choice=choice or ToolChoice(),
    )
    request = GenerationRequest(prompts=(prompt,), n=n, sampling=SamplingOptions(**sampling))
    return await Gateway(engine, GatewayConfig()).submit(request)


def engine_with(template: str = CHAT_TEMPLATE) -> FakeEngine:
    card = model_card(chat_template=template, max_model_len=4096)
    return FakeEngine(ready=engine_ready(card, max_output_tokens=1024))


def emit(engine: FakeEngine, text: str, *, ends: bool = False, answer: int = 0) -> None:
    request_id = engine.added[answer].id
    for byte in text.encode():
        engine.emit(request_id, byte)
    if ends:
        engine.emit(request_id, EOS_ID, finish_reason=FinishReason.STOP)


async def read(answer: AnswerStream) -> list[Delta]:
    return [delta async for deltas in answer for delta in deltas]


async def test_what_piled_up_comes_as_one_delta_of_each_kind_in_order() -> None:
    engine = engine_with(THINKING)
    answer = await submit(engine)
    emit(engine, f"<think>hm</think>Well. {CALL}{CALL} So.", ends=True)
    reasoning, text, calls, behind = await read(answer)
    assert (reasoning.reasoning, text.text, behind.text) == ("hm", "Well.", "So.")
    assert [(call.index, call.name, call.arguments) for call in calls.tool_calls] == [
        (0, "f", '{"x": 1}'),
        (1, "f", '{"x": 1}'),
    ]
    reasons = [delta.finish_reason for delta in (reasoning, text, calls, behind)]
    assert reasons == [None, None, None, FinishReason.STOP]
    assert answer.usage.reasoning_tokens == len("hm</think>")


async def test_text_behind_calls_that_were_demanded_ends_the_answer() -> None:
    engine = engine_with()
    answer = await submit(engine, choice=ToolChoice("required"))
    emit(engine, f"{CALL}\n{CALL}\n<tool_r")
    (delta,) = await read(answer)
    assert (delta.text, len(delta.tool_calls), delta.finish_reason) == ("", 2, FinishReason.STOP)
    assert engine.aborted == [engine.added[0].id]


async def test_id_and_name_come_once() -> None:
    engine = engine_with()
    answer = await submit(engine)
    emit(engine, CALL[:40])
    (begun,) = await anext(answer)
    emit(engine, CALL[40:], ends=True)
    (rest,) = await anext(answer)
    assert begun.tool_calls[0].id
    assert begun.tool_calls[0].name == "f"
    assert [(call.index, call.id, call.name) for call in rest.tool_calls] == [(0, None, None)]
    assert begun.tool_calls[0].arguments + rest.tool_calls[0].arguments == '{"x": 1}'


async def test_a_reader_is_not_woken_for_what_is_held_back() -> None:
    engine = engine_with()
    answer = await submit(engine)
    emit(engine, "a")
    assert [delta.text for delta in await anext(answer)] == ["a"]
    emit(engine, " <tool_c")
    emit(engine, "ode>", ends=True)
    assert [delta.text for delta in await read(answer)] == [" <tool_code>"]


async def test_where_only_one_call_is_wanted_a_second_ends_the_answer() -> None:
    engine = engine_with()
    answer = await submit(engine, choice=ToolChoice(parallel=False))
    emit(engine, CALL + CALL[: CALL.index(", ")])
    (delta,) = await read(answer)
    assert [call.arguments for call in delta.tool_calls] == ['{"x": 1}']
    assert (delta.text, delta.finish_reason) == ("", FinishReason.STOP)
    assert engine.aborted == [engine.added[0].id]


async def test_a_second_call_that_comes_with_the_end_is_dropped_too() -> None:
    engine = engine_with()
    answer = await submit(engine, choice=ToolChoice(parallel=False))
    ids = tuple((CALL + CALL + "bye").encode())
    engine.emit(engine.added[0].id, *ids, EOS_ID, finish_reason=FinishReason.STOP)
    (delta,) = await read(answer)
    assert len(delta.tool_calls) == 1
    assert (delta.text, delta.finish_reason) == ("", FinishReason.STOP)


async def test_each_answer_has_its_own_calls() -> None:
    engine = engine_with()
    answer = await submit(engine, n=2)
    emit(engine, CALL, ends=True, answer=1)
    emit(engine, "no call", ends=True, answer=0)
    first, second = sorted(await read(answer), key=lambda delta: delta.index)
    assert (first.text, first.tool_calls) == ("no call", ())
    assert len(second.tool_calls) == 1


async def test_a_stop_string_ends_the_parsing_too() -> None:
    engine = engine_with()
    answer = await submit(engine, stop=("STOP",))
    emit(engine, "one <tool_STOP")
    (delta,) = await read(answer)
    assert (delta.text, delta.stop_sequence) == ("one <tool_", "STOP")
    assert engine.aborted == [engine.added[0].id]


async def test_logprobs_beside_calls() -> None:
    engine = engine_with()
    answer = await submit(engine, logprobs=0)
    emit(engine, CALL, ends=True)
    (delta,) = await read(answer)
    assert delta.text == ""
    assert len(delta.tool_calls) == 1


async def test_without_tools_nothing_is_parsed() -> None:
    engine = engine_with()
    answer = await submit(engine, tools=False)
    emit(engine, CALL, ends=True)
    (delta,) = await read(answer)
    assert (delta.text, delta.tool_calls) == (CALL, ())
