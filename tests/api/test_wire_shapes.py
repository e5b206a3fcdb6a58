"""Every answer has the fields that the models of the providers' SDKs require, with values that those models allow.

The SDKs themselves do not check: they build objects from whatever comes. Other clients do, so this test validates the
JSON strictly. A field that an answer does not have is left out rather than null, unless the provider documents null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import anthropic.types.messages
import httpx
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest

from tests.api.conftest import Serve, Served
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, scripted
from tests.api.stored_work import serving_work
from tests.api.test_embeddings import embedding_engine

ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "k"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"role": "user", "content": "Hi"}
KINDS = ["text", "call", "thought"]

# Fields that Anthropic documents as null. All others are left out when there is nothing to say.
NULL_AT_ANTHROPIC = {"stop_reason", "stop_sequence", "first_id", "last_id"}


def engine_for(kind: str) -> Any:
    if kind == "call":
        return scripted(CALL, template=TOOL_TEMPLATE)
    if kind == "thought":
        return scripted("I think.</think>Hello", template=THINKING_TEMPLATE)
    return scripted("Hello")


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, serve: Serve) -> Served:
    return serve(engine_for(request.param))


def post(served: Served, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    answer = httpx.post(f"{served.url}{path}", json={"model": "bytes"} | body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def check(model: Any, shape: Any) -> None:
    pydantic.TypeAdapter(model).validate_python(shape)


def refuse_nulls(shape: Any, path: str = "") -> None:
    if isinstance(shape, dict):
        for name, value in shape.items():
            assert value is not None or name in NULL_AT_ANTHROPIC, f"{path}.{name} is null"
            refuse_nulls(value, f"{path}.{name}")
    elif isinstance(shape, list):
        for value in shape:
            refuse_nulls(value, f"{path}[]")


def test_chat_completions(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    ask = {"messages": [USER], "tools": tools, "logprobs": True, "top_logprobs": 0}
    check(openai.types.chat.ChatCompletion, post(served, "/v1/chat/completions", ask).json())
    streamed = post(
        served, "/v1/chat/completions", ask | {"stream": True, "stream_options": {"include_usage": True}}
    )
    for chunk in events_of(streamed):
        check(openai.types.chat.ChatCompletionChunk, chunk)


def test_completions(serve: Serve) -> None:
    served = serve(scripted("Hello"))
    ask = {"prompt": "Hi", "max_tokens": 20, "logprobs": 1}
    check(openai.types.Completion, post(served, "/v1/completions", ask).json())
    for chunk in events_of(post(served, "/v1/completions", ask | {"stream": True})):
        for choice in chunk["choices"]:
            choice["finish_reason"] = (
                choice["finish_reason"] or "stop"
            )  # OpenAI sends null, against its model
        check(openai.types.Completion, chunk)


def test_responses(served: Served) -> None:
    ask = {"input": "Hi", "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]}
    response = post(served, "/v1/responses", ask).json()
    check(openai.types.responses.Response, response)
    stored = httpx.get(f"{served.url}/v1/responses/{response['id']}").json()
    check(openai.types.responses.Response, stored)
    for event in events_of(post(served, "/v1/responses", ask | {"stream": True})):
        check(openai.types.responses.ResponseStreamEvent, event)


def test_messages(served: Served) -> None:
    ask = {
        "messages": [USER],
        "max_tokens": 2000,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
    }
    message = post(served, "/v1/messages", ask, ANTHROPIC).json()
    check(anthropic.types.Message, message)
    refuse_nulls(message)
    for event in events_of(post(served, "/v1/messages", ask | {"stream": True}, ANTHROPIC)):
        if event["type"] != "ping":  # which the SDK knows, and its types do not
            check(anthropic.types.RawMessageStreamEvent, event)
        refuse_nulls(event)
    count = {name: ask[name] for name in ("messages", "tools")}
    counted = post(served, "/v1/messages/count_tokens", count, ANTHROPIC).json()
    check(anthropic.types.MessageTokensCount, counted)


def test_models(serve: Serve) -> None:
    served = serve(scripted("Hello"))
    for path in ("/v1/models", "/v1/models/bytes"):
        ours = httpx.get(f"{served.url}{path}").json()
        for entry in ours.get("data", [ours]):
            check(openai.types.Model, entry)
        theirs = httpx.get(f"{served.url}{path}", headers=ANTHROPIC).json()
        for entry in theirs.get("data", [theirs]):
            check(anthropic.types.ModelInfo, entry)
        refuse_nulls(theirs)


def test_embeddings(serve: Serve) -> None:
    served = serve(embedding_engine())
    for encoding in ("float", "base64"):
        answer = post(served, "/v1/embeddings", {"input": "Hi", "encoding_format": encoding}).json()
        if encoding == "base64":
            answer["data"][0]["embedding"] = []  # which the SDK decodes before it has a model for it
        check(openai.types.CreateEmbeddingResponse, answer)


def test_files_and_batches(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    lines = json.dumps(line | {"body": {"model": "bytes", "messages": [USER]}}).encode()
    with serving_work(scripted("Hello"), tmp_path) as work:
        ours = httpx.Client(base_url=f"{work.url}/v1", headers={"authorization": "Bearer w1"})
        file = ours.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", lines)}).json()
        check(openai.types.FileObject, file)
        check(openai.types.FileDeleted, ours.delete(f"/files/{file['id']}").json())
        file = ours.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", lines)}).json()
        ask = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = ours.post("/batches", json=ask).json()
        check(openai.types.Batch, batch)
        check(openai.types.Batch, ours.get(f"/batches/{batch['id']}").json())
        theirs = httpx.Client(base_url=f"{work.url}/v1", headers=ANTHROPIC | {"x-api-key": "w1"})
        check(anthropic.types.FileMetadata, theirs.post("/files", files={"file": ("a.txt", b"x")}).json())
        params = {"model": "bytes", "max_tokens": 9, "messages": [USER]}
        request = {"custom_id": "a", "params": params}
        message_batch = theirs.post("/messages/batches", json={"requests": [request]}).json()
        check(anthropic.types.messages.MessageBatch, message_batch)
