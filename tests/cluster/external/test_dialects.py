"""Servers that do not speak OpenAI's API: what they are asked, and what their answers become."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.cluster.external.wire import ExternalCall, StreamChunk
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError, EngineUnavailable, InvalidRequest
from tests.cluster.external.openai_server import listening, text_chunks, whole_answer

MARK = {"type": "ephemeral"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
START: dict[str, Any] = {
    "type": "message_start",
    "message": {
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 3}
    },
}


def ended(reason: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "message_delta",
        "delta": {"stop_reason": reason, **more},
        "usage": {"output_tokens": 9},
    }


class ScriptedServer:
    """Answers each request with the next of `answers`: events, or a body."""

    def __init__(self, *answers: list[dict[str, Any]] | dict[str, Any] | Response) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"type": "model", "id": "claude", "display_name": "Claude"}]})

    async def _answer(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append((path, dict(request.headers), await request.json()))
        answer = self.answers.pop(0)
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, dict):
            return JSONResponse(answer)
        events = (f"event: {each.get('type', '')}\ndata: {json.dumps(each)}\n\n" for each in answer)
        return Response("".join(events), media_type="text/event-stream")

    @asynccontextmanager
    async def pool(self, **settings: Any) -> AsyncIterator[ExternalPool]:
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/openai/models", self._models),
                Route("/{path:path}", self._answer, methods=["POST"]),
            ]
        )
        async with listening(app) as url:
            pool = ExternalPool([ExternalServer(ExternalServerConfig(url=url, **settings))])
            await pool.probe()
            try:
                yield pool
            finally:
                await pool.close()


def chat(*messages: dict[str, Any], **body: Any) -> ExternalCall:
    call = {name: body.pop(name) for name in ("is_whole", "has_cache_marks") if name in body}
    asked = {"messages": list(messages or ({"role": "user", "content": "Hi"},)), **body}
    return ExternalCall(id="r", model="claude", api="chat/completions", body=asked, text="Hi", **call)


async def chunks_of(pool: ExternalPool, call: ExternalCall) -> list[StreamChunk]:
    found: list[StreamChunk] = []
    await pool.send(call, found.extend)
    return found


async def test_an_anthropic_server_streams_text_thoughts_and_usage() -> None:
    events: list[dict[str, Any]] = [
        START,
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hello"}},
        ended("stop_sequence", stop_sequence="END"),
        {"type": "message_stop"},
    ]
    server = ScriptedServer(events)
    settings = {"dialect": "anthropic", "api_key": "secret", "shows_cached_tokens": True}
    async with server.pool(**settings) as pool:
        assert list(pool.models) == ["claude"]
        chunks = await chunks_of(pool, chat(max_tokens=50, stop=["END"], temperature=1.5))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    deltas = [choice.delta for choice in choices if choice.delta is not None]
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "Hm."
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "END")
    (usage,) = (chunk.usage for chunk in chunks if chunk.usage is not None)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (28, 20, 9)
    ((path, headers, body),) = server.requests
    assert path == "/v1/messages"
    assert headers["x-api-key"] == "secret"
    assert headers["anthropic-version"]
    assert "authorization" not in headers
    assert body == {
        "model": "claude",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 50,
        "stream": True,
        "stop_sequences": ["END"],
        "temperature": 1.0,
    }


async def test_tools_of_an_anthropic_server() -> None:
    called = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"a":1}'}}
    turns = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "t1", "content": "Sun"},
    )
    events: list[dict[str, Any]] = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I ask."}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"b"'},
        },
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": ":2}"},
        },
        ended("tool_use"),
    ]
    server = ScriptedServer(events)
    async with server.pool(dialect="anthropic") as pool:
        call = chat(*turns, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        chunks = await chunks_of(pool, call)
    calls = [
        each
        for chunk in chunks
        for choice in chunk.choices
        if choice.delta is not None
        for each in choice.delta.tool_calls or ()
    ]
    assert [call.index for call in calls] == [0, 0, 0]
    assert (calls[0].id, calls[0].function.name) == ("t2", "weather")
    assert "".join(call.function.arguments or "" for call in calls) == '{"b":2}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    body = server.requests[0][2]
    assert body["system"] == [{"type": "text", "text": "Be brief."}]
    assert body["tools"] == [{"name": "weather", "input_schema": {"type": "object"}}]
    assert body["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sun"}]}
            ],
        },
    ]


async def test_a_whole_answer_of_an_anthropic_server() -> None:
    answer = {
        "type": "message",
        "content": [
            {"type": "text", "text": "Hello"},
            {"type": "tool_use", "id": "t", "name": "weather", "input": {"a": 1}},
        ],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 5, "output_tokens": 7},
    }
    async with ScriptedServer(answer).pool(dialect="anthropic") as pool:
        (chunk,) = await chunks_of(pool, chat(is_whole=True))
    (choice,) = chunk.choices
    assert choice.delta is not None
    assert choice.delta.content == "Hello"
    assert choice.delta.tool_calls is not None
    assert choice.delta.tool_calls[0].function.arguments == '{"a":1}'
    assert choice.finish_reason == "length"
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (5, 7)
    assert chunk.usage.cached_tokens is None, "the cache is shared with others"


async def test_what_an_anthropic_server_cannot_do_is_refused() -> None:
    server = ScriptedServer()
    async with server.pool(dialect="anthropic") as pool:
        with pytest.raises(InvalidRequest, match="logprobs"):
            await chunks_of(pool, chat(logprobs=True))
        plain = ExternalCall(id="r", model="claude", api="completions", body={"prompt": "Hi"}, text="Hi")
        with pytest.raises(InvalidRequest, match="chats only"):
            await chunks_of(pool, plain)
        for arguments in ("{", "[" * 2000 + "]" * 2000):
            function = {"name": "f", "arguments": arguments}
            turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
            with pytest.raises(InvalidRequest, match="not JSON"):
                await chunks_of(pool, chat({"role": "user", "content": "Hi"}, turn))
    assert not server.requests


@pytest.mark.parametrize(
    "answer",
    [
        [START, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}],
        [START, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}],
        [{"type": "message_start", "message": 7}],
        JSONResponse({"type": "error", "error": {"type": "api_error", "message": "no"}}, 500),
    ],
    ids=["error", "cut off", "garbage", "status"],
)
async def test_a_broken_answer_of_an_anthropic_server_is_an_error(answer: Any) -> None:
    async with ScriptedServer(answer).pool(dialect="anthropic") as pool:
        with pytest.raises(EngineUnavailable):
            await chunks_of(pool, chat())


async def test_marks_of_prompt_caching_go_only_where_they_are_taken() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": MARK}, {"type": "text", "text": "b"}]
    result = {"role": "tool", "tool_call_id": "t", "content": [parts[0]]}
    call = chat(
        {"role": "user", "content": parts},
        result,
        tools=[TOOL | {"cache_control": MARK}],
        has_cache_marks=True,
    )
    server = ScriptedServer([START, ended("end_turn")])
    async with server.pool(dialect="anthropic") as pool:
        await chunks_of(pool, call)
    body = server.requests[0][2]
    assert body["messages"][0]["content"][:2] == parts
    assert body["messages"][0]["content"][2]["cache_control"] == MARK, "on the whole result"
    assert body["tools"][0]["cache_control"] == MARK

    answers = [whole_answer(text_chunks("x")), whole_answer(text_chunks("x"))]
    server = ScriptedServer(*answers)
    whole = chat(*call.body["messages"], tools=call.body["tools"], has_cache_marks=True, is_whole=True)
    async with server.pool(models={"claude": "m"}) as pool:
        await chunks_of(pool, whole)
    async with server.pool(models={"claude": "m"}, takes_cache_control=True) as pool:
        await chunks_of(pool, whole)
    without, with_marks = (body for _, _, body in server.requests)
    assert "cache_control" not in json.dumps(without)
    assert without["messages"][0]["content"] == "a\nb"
    assert with_marks["messages"][0]["content"] == parts


async def test_a_deployment_of_azure() -> None:
    server = ScriptedServer(whole_answer(text_chunks("Hello")))
    settings = {"dialect": "azure", "api_version": "2025-01-01", "models": {"claude": "my dep/1"}}
    async with server.pool(api_key="secret", **settings) as pool:
        (chunk,) = await chunks_of(pool, chat(is_whole=True))
    assert chunk.choices[0].delta is not None
    assert chunk.choices[0].delta.content == "Hello"
    ((path, headers, _),) = server.requests
    assert path.endswith("/chat/completions?api-version=2025-01-01")
    assert path.startswith("/openai/deployments/my")
    assert headers["api-key"] == "secret"


def test_a_server_of_azure_must_name_its_deployments() -> None:
    with pytest.raises(ConfigError, match="must name its models"):
        ExternalServer(ExternalServerConfig(url="http://x", dialect="azure"))
