"""The real `openai` SDK is the judge of our shapes."""

from __future__ import annotations

import asyncio
from collections import deque

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from penstock.core.errors import EngineUnavailable, Overloaded
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, Tier
from tests.api.conftest import Serve
from tests.gateway.fake_engine import FakeEngine, script_text

TEXT = "Grüße, Welt 😀!"
USER = {"role": "user", "content": "hi"}


def test_chat(serve: Serve) -> None:
    served = serve(FakeEngine(script_text(TEXT, num_cached_tokens=2)))
    answer = served.sdk().chat.completions.create(model="bytes", messages=[USER])
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "bytes"
    assert answer.usage is not None
    num_tokens = len(TEXT.encode()) + 1
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, num_tokens)
    assert answer.usage.total_tokens == 5 + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(serve: Serve) -> None:
    served = serve(FakeEngine(script_text(TEXT)))
    stream = served.sdk().chat.completions.create(
        model="bytes", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, *_, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("stop") == 1
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(TEXT.encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_without_usage(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("ab")))
    chunks = list(served.sdk().chat.completions.create(model="bytes", messages=[USER], stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_answers(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent]:
        return list(script_text(f"seed {request.sampling.seed}")(request))

    sdk = serve(FakeEngine(script)).sdk()
    answer = sdk.chat.completions.create(model="bytes", messages=[USER], n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == ["seed 7", "seed 8", "seed 9"]
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in sdk.chat.completions.create(model="bytes", messages=[USER], n=2, seed=7, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "seed 7", 1: "seed 8"}
    assert reasons == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(serve: Serve, stream: bool) -> None:
    sdk = serve(FakeEngine(script_text("né"))).sdk()
    options = {"model": "bytes", "messages": [USER], "logprobs": True, "top_logprobs": 2}
    if stream:
        content = [
            entry
            for chunk in sdk.chat.completions.create(**options, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        content = sdk.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["n", "\ufffd", "\ufffd"]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "né"
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("n", -0.25), ("o", -1.25)]


def test_completion_of_every_kind_of_prompt(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent]:
        return list(script_text(repr(bytes(request.prompt_token_ids)))(request))

    sdk = serve(FakeEngine(script)).sdk()
    for prompt, expected in (
        ("ab", ["b'ab'"]),
        (["ab", "c"], ["b'ab'", "b'c'"]),
        ([97, 98], ["b'ab'"]),
        ([[97], [98]], ["b'a'", "b'b'"]),
    ):
        answer = sdk.completions.create(model="bytes", prompt=prompt)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.object == "text_completion"


def test_completion_that_echoes_its_prompt(serve: Serve) -> None:
    sdk = serve(FakeEngine(script_text(" and on"))).sdk()
    answer = sdk.completions.create(model="bytes", prompt=["on", "off"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["on and on"] * 2 + ["off and on"] * 2
    assert sdk.completions.create(model="bytes", prompt=[111, 110], echo=True).choices[0].text == "on and on"
    chunks = list(sdk.completions.create(model="bytes", prompt="on", echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "on and on"


def test_completion_defaults_to_sixteen_tokens(serve: Serve) -> None:
    answer = serve(FakeEngine(script_text("x" * 50))).sdk().completions.create(model="bytes", prompt="a")
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def test_completion_stream_with_logprobs_and_stop(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("one two three")))
    stream = served.sdk().completions.create(
        model="bytes",
        prompt="a",
        stream=True,
        stop=[" th", "zzz"],
        logprobs=1,
        stream_options={"include_usage": True},
    )
    *chunks, usage = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"
    offsets = [
        offset
        for chunk in chunks
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == list(range(len("one two")))
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len("one two th")
    assert served.engine.aborted == [served.engine.added[0].id]


def test_completion_logprobs(serve: Serve) -> None:
    sdk = serve(FakeEngine(script_text("ab"))).sdk()
    logprobs = sdk.completions.create(model="bytes", prompt="x", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.25, -0.25]
    assert logprobs.top_logprobs == [{"a": -0.25, "b": -1.25}, {"b": -0.25, "c": -1.25}]
    assert logprobs.text_offset == [0, 1]
    alone = sdk.completions.create(model="bytes", prompt="x", logprobs=0).choices[0].logprobs
    assert alone is not None
    assert alone.top_logprobs is None


def test_options_and_extensions_reach_the_engine(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("a")))
    answer = served.sdk().chat.completions.create(
        model="bytes",
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            }
        ],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -1},
        stop="zz",
        seed=3,
        service_tier="flex",
        user="me",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        response_format={"type": "text"},
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [7],
        },
    )
    (request,) = served.engine.added
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.9, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (
        0.1,
        0.2,
        {5: -1.0},
    )
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (1, True, (7,))
    assert sampling.stop == ("zz",)
    assert request.tier is Tier.BATCH
    assert answer.service_tier == "flex"
    system = 260
    assert request.prompt_token_ids[:9] == (system, *b"be\nbrief")


def test_top_k_written_as_off(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("a")))
    for top_k in (-1, 0):
        served.sdk().completions.create(model="bytes", prompt="x", extra_body={"top_k": top_k})
    assert [request.sampling.top_k for request in served.engine.added] == [None, None]


def test_models(serve: Serve) -> None:
    sdk = serve(FakeEngine()).sdk()
    assert [model.id for model in sdk.models.list()] == ["bytes"]
    assert sdk.models.retrieve("bytes").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError) as error:
        sdk.models.retrieve("org/other")
    assert error.value.code == "model_not_found"


def test_errors_are_those_of_the_sdk(serve: Serve) -> None:
    sdk = serve(FakeEngine(script_text("a"))).sdk()
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="other", messages=[USER])
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.completions.create(model="bytes", prompt="x" * 300)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.param == "prompt"
    assert too_long.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_before_the_first_byte_is_a_503(serve: Serve, stream: bool) -> None:
    sdk = serve(FakeEngine(lambda request: [Overloaded("The queue is full.", retry_after_s=2.5)])).sdk()
    with pytest.raises(openai.InternalServerError) as error:
        sdk.chat.completions.create(model="bytes", messages=[USER], stream=stream)
    assert error.value.status_code == 503
    assert error.value.code == "overloaded"
    assert error.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_without_a_token_is_a_504(serve: Serve, stream: bool) -> None:
    sdk = serve(
        FakeEngine(lambda request: [TokenEvent(request.id, finish_reason=FinishReason.DEADLINE)])
    ).sdk()
    with pytest.raises(openai.InternalServerError) as error:
        sdk.completions.create(model="bytes", prompt="x", stream=stream)
    assert error.value.status_code == 504


def test_error_after_the_stream_began_reaches_the_reader(serve: Serve) -> None:
    def script(request: Request) -> list[TokenEvent | EngineUnavailable]:
        return [TokenEvent(request.id, tuple(b"par")), EngineUnavailable("The engine has gone.")]

    stream = (
        serve(FakeEngine(script)).sdk().chat.completions.create(model="bytes", messages=[USER], stream=True)
    )
    chunks: list[ChatCompletionChunk] = []
    with pytest.raises(openai.APIError, match="The engine has gone"):
        deque(map(chunks.append, stream))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "par"
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}


async def test_many_streams_at_once(serve: Serve) -> None:
    served = serve(
        FakeEngine(lambda request: script_text(f"answer to {bytes(request.prompt_token_ids)!r}")(request))
    )
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def one(number: int) -> str:
        stream = await client.completions.create(
            model="bytes", prompt=f"p{number}", stream=True, max_tokens=64
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    answers = await asyncio.gather(*(one(number) for number in range(20)))
    assert answers == [f"answer to b'p{number}'" for number in range(20)]
    await client.close()
