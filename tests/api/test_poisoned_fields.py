"""Whatever value stands in any field of a request, at any depth, the answer is no 500: also where the caches of
answers read the request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from penstock.api.http.application import call_endpoint
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.gateway_config import GatewayConfig
from penstock.core.identity import OPEN_PRINCIPAL
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request
from penstock.gateway.gateway import Gateway
from penstock.gateway.reuse.idempotency import IdempotentAnswers
from penstock.gateway.reuse.replay import IdempotencySettings, ResponseCacheSettings
from penstock.gateway.reuse.reuse import AnswerReuse
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text

Place: TypeAlias = tuple[str | int, ...]

POISON = [
    "NaN", "-Infinity", "1e400", "-1", "0", "1.5", "true", "null", '""', '"\\ud800"', '"\\u0000"', '"../x"', "[]",
    "{}", "[null]", "[[]]", '{"":null}', '{"$ref":"#"}', "[" * 200 + "]" * 200, str(1 << 31), str(1 << 63),
    str(1 << 64), str(-(1 << 63) - 1), "1" + "0" * 400,
]  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "required": ["a"]}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
]
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _CHAT, "tools": [_TOOL], "max_tokens": 2, "n": 2, "seed": 1, "logit_bias": {"5": 1},
        "stop": ["x"], "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True},
        "metadata": {"a": "b"}, "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {
        "prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1,
        "stop_token_ids": [1], "min_tokens": 1, "bad_words": ["a"],
    },
    "/v1/messages": {
        "max_tokens": 2, "messages": _BLOCKS, "tools": [{"name": "f", "input_schema": _SCHEMA}], "top_k": 3,
        "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "input": _ITEMS, "max_output_tokens": 2, "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
    },
    "/api/chat": {
        "messages": [{"role": "user", "content": "hi", "images": []}],
        "options": {"num_predict": 2, "temperature": 1}, "format": _SCHEMA, "keep_alive": "5m", "stream": False,
    },
    "/v1/embeddings": {"input": [[1, 2], [3]], "dimensions": 2, "encoding_format": "base64"},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/tokenize": {"messages": _CHAT, "tools": [_TOOL]},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from places_in(child, (*place, key))


def poisoned(body: Any, place: Place, poison: str) -> bytes:
    """Return the body as JSON with `poison`, which need not be JSON, in one place."""
    mark = "the place of the poison"

    def changed(value: Any, rest: Place) -> Any:
        if not rest:
            return mark
        if isinstance(value, dict):
            return {**value, rest[0]: changed(value[rest[0]], rest[1:])}
        return [changed(each, rest[1:]) if at == rest[0] else each for at, each in enumerate(value)]

    return json.dumps(changed(body, place)).replace(json.dumps(mark), poison).encode()


def answer(request: Request) -> Sequence[TokenEvent | PenstockError]:
    if request.pooling is None:
        return script_text("fine")(request)
    return [TokenEvent(request.id, finish_reason=FinishReason.STOP, embedding=b"\0\0\x80?" * 4)]


@pytest.mark.parametrize("path", BODIES)
async def test_no_value_in_any_field_is_a_500(path: str) -> None:
    engine = FakeEngine(answer, ready=engine_ready(model_card(embedding_size=4)))
    reuse = AnswerReuse(ResponseCacheSettings(enabled=True), IdempotentAnswers(IdempotencySettings()))
    gateway = Gateway(engine, GatewayConfig(), reuse=reuse)
    body = BODIES[path]
    changes = [(place, poison) for place in places_in(body) for poison in POISON]
    failed = []
    async with direct_client(engine, gateway) as client:
        for number, (place, poison) in enumerate(random.Random(path).sample(changes, min(150, len(changes)))):
            headers = {"idempotency-key": f"key {number}", "x-penstock-cache": "60"}
            got = await client.post(path, content=poisoned(body, place, poison), headers=headers)
            if got.status_code not in (200, 400, 404, 409):
                failed.append((place, poison[:40], got.status_code, got.text[:80]))
    assert not failed


async def test_a_value_that_only_a_later_step_finds_too_deep_is_refused() -> None:
    reuse = AnswerReuse(idempotency=IdempotentAnswers(IdempotencySettings()))
    gateway = Gateway(FakeEngine(answer), GatewayConfig(), reuse=reuse)
    body = {"messages": _CHAT, "chat_template_kwargs": {"a": 1}}
    statuses = set()
    async with direct_client(FakeEngine(answer), gateway) as client:
        for depth in range(600, 1000, 4):  # how deep a step gets depends on where it is called
            content = poisoned(body, ("chat_template_kwargs", "a"), "[" * depth + "]" * depth)
            headers = {"idempotency-key": str(depth)}
            got = await client.post("/v1/chat/completions", content=content, headers=headers)
            statuses.add(got.status_code)
    assert 500 not in statuses


async def test_a_line_of_a_batch_that_a_step_finds_too_deep_is_refused() -> None:
    async def endpoint(request: HttpRequest) -> ASGIApp:
        raise RecursionError

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await call_endpoint(endpoint, "/v1/x", b"{}", principal=OPEN_PRINCIPAL, request_id="r")
