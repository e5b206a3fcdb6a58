"""Every kind of answer fits the provider's published model: no field is missing, unknown, or null without permission.
A field that an answer does not have is left out rather than null, unless the provider documents null."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.chat as oc
import pytest

from penstock.api.admin.fleet import UsageEndpoints
from penstock.api.app import create_app
from penstock.api.http.routes import Operation
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.gateway import Gateway
from penstock.gateway.store.database import Database
from tests.api.conftest import Serve
from tests.api.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, scripted
from tests.api.stored_work import serving_work
from tests.api.test_embeddings import embedding_engine
from tests.api.test_guarded_apis import guarded
from tests.api.wire_models import (
    ANTHROPIC,
    CHAT,
    CONVERSATION,
    MESSAGE_BATCH,
    OPENAI,
    RESPONSE,
    UPLOAD,
    WITHOUT_MODEL,
    CheckedClient,
    OpenAIError,
    check,
    refuse_nulls,
)
from tests.gateway.fake_engine import FakeEngine

KINDS = ("text", "call", "thought", "custom")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"role": "user", "content": "Hi"}
BYTES = {"model": "bytes"}


def call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def engine_for(kind: str) -> Any:
    if kind == "call":
        return scripted(call("weather", {"city": "Paris"}), template=TOOL_TEMPLATE)
    if kind == "custom":
        return scripted("Well. " + call("note", {"input": "hi"}), template=TOOL_TEMPLATE)
    if kind == "thought":
        return scripted("I think.</think>Hello", template=THINKING_TEMPLATE)
    return FakeEngine() if kind == "silence" else scripted("Hello")


@pytest.fixture(scope="module")
def url_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The address of a server whose model answers with one kind of output. Tests share the server."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def serve(kind: str) -> str:
            if kind not in urls:
                folder = tmp_path_factory.mktemp(kind)
                urls[kind] = stack.enter_context(serving_work(engine_for(kind), folder)).url
            return urls[kind]

        yield serve


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def openai_client(url: str, key: str = "w1") -> CheckedClient:
    return CheckedClient(url, OPENAI, {"authorization": f"Bearer {key}"})


def anthropic_client(url: str) -> CheckedClient:
    return CheckedClient(url, ANTHROPIC, {"anthropic-version": "2023-06-01", "x-api-key": "w1"})


def outline(item: dict[str, Any]) -> list[Any]:
    """What a model said in an output item, without ids and log-probabilities."""
    content = [part.get("text") for part in item.get("content", ())]
    return [item["type"], item.get("arguments"), item.get("input"), content]


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


async def test_every_route_has_a_model(tmp_path: Path) -> None:
    app: Any = create_app(
        Gateway(FakeEngine(), GatewayConfig()),
        ServerConfig(),
        work=StoredWork(Database("sqlite://"), FileFolder(tmp_path)),
        more_routes=UsageEndpoints(None).routes(),
    )
    operations = [route for route in app.routes if isinstance(route, Operation)]
    routes = {f"{each.method} {each.path}" for each in operations if each.path.startswith("/v1/")}
    assert routes == OPENAI.keys() | ANTHROPIC.keys() | WITHOUT_MODEL


def test_the_check_is_strict() -> None:
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    good = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    check(oc.ChatCompletion, good)
    with pytest.raises(AssertionError, match="created"):
        check(oc.ChatCompletion, {**good, "created": "1"})
    with pytest.raises(AssertionError, match="model"):
        check(oc.ChatCompletion, {**good, "model": None})
    with pytest.raises(AssertionError, match="finish_reason"):
        check(oc.ChatCompletion, {**good, "choices": [{"index": 0, "message": message}]})
    with pytest.raises(AssertionError, match=r"ChatCompletionMessage\.mood"):
        check(oc.ChatCompletion, {**good, "choices": [{**choice, "message": {**message, "mood": "good"}}]})
    with pytest.raises(AssertionError, match="citations"):
        refuse_nulls([{"citations": None}])


def test_chat_completions(kind: str, url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for(kind))
    function = {"parameters": PARAMETERS}
    tools = [{"type": "function", "function": {**function, "name": name}} for name in ("weather", "note")]
    body = {**BYTES, "messages": [USER], "tools": tools, "n": 2, "store": True, "metadata": {"a": "b"}}
    stored = ask(f"POST {CHAT}", body | {"logprobs": True, "top_logprobs": 1})
    ask(f"POST {CHAT}", body | {"max_tokens": 2, "service_tier": "priority"})
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert len(ask(f"POST {CHAT}", body | stream | {"logprobs": True})) > 2
    ask(f"POST {CHAT}", body | {"max_tokens": 99_999, "prompt_logprobs": 1})
    ask(f"GET {CHAT}")
    one = {"completion_id": stored["id"]}
    ask(f"GET {CHAT}/{{completion_id}}", **one)
    ask(f"POST {CHAT}/{{completion_id}}", {"metadata": {"a": "c"}}, **one)
    assert ask(f"GET {CHAT}/{{completion_id}}/messages", **one)["data"]
    ask(f"DELETE {CHAT}/{{completion_id}}", **one)


def test_completions(url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for("text"))
    body = {**BYTES, "prompt": "Hi", "max_tokens": 20, "logprobs": 1}
    ask("POST /v1/completions", body)
    ask("POST /v1/completions", body | {"echo": True, "prompt_logprobs": 1})
    ask("POST /v1/completions", body | {"max_tokens": 99_999})
    ask("POST /v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})


def test_responses(kind: str, url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for(kind))
    tools = [
        {"type": "function", "name": "weather", "parameters": PARAMETERS},
        {"type": "custom", "name": "note"},
    ]
    body = {**BYTES, "input": "Hi", "tools": tools, "instructions": "Be kind.", "metadata": {"a": "b"}}
    response = ask("POST /v1/responses", body)
    ask(f"GET {RESPONSE}", response_id=response["id"])
    history = ask("POST /v1/responses", {**BYTES, "input": [USER, *response["output"], USER], "tools": tools})
    assert ask(f"GET {RESPONSE}/input_items", response_id=history["id"])["data"]
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = ask("POST /v1/responses", body | {"stream": True} | logprobs)
    assert [outline(item) for item in events[-1]["response"]["output"]] == list(
        map(outline, response["output"])
    )
    ask("POST /v1/responses", body | {"max_output_tokens": 16, "stream": True, "store": False})
    short = ask("POST /v1/responses", body | {"max_output_tokens": 16, "text": {"format": {"type": "text"}}})
    ask("POST /v1/responses", {**BYTES, "input": "Hi", "previous_response_id": short["id"]})
    ask("POST /v1/responses", body | {"tools": [{"type": "web_search"}], "max_output_tokens": 99_999})
    ask("POST /v1/responses/input_tokens", {**BYTES, "input": "Hi"})
    ask("POST /v1/responses/compact", {**BYTES, "input": [USER, *response["output"], USER]})


def test_background_responses(url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for("text"))
    begun = ask("POST /v1/responses", {**BYTES, "input": "Hi", "background": True})
    one = {"response_id": begun["id"]}
    until(lambda: ask(f"GET {RESPONSE}", **one)["status"] == "completed")
    ask("POST /v1/responses", {**BYTES, "input": "Hi", "background": True, "stream": True})
    ask(f"POST {RESPONSE}/cancel", **one)


def test_conversations(kind: str, url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for(kind))
    items = [
        {"type": "message", **USER},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    made = ask("POST /v1/conversations", {"items": items[:1], "metadata": {"a": "b"}})
    one = {"conversation_id": made["id"]}
    ask("POST /v1/responses", {**BYTES, "input": "Hi", "conversation": made["id"]})
    ask(f"GET {CONVERSATION}", **one)
    ask(f"POST {CONVERSATION}", {"metadata": {"a": "c"}}, **one)
    added = ask(f"POST {CONVERSATION}/items", {"items": items[1:]}, **one)
    for item in ask(f"GET {CONVERSATION}/items", **one)["data"]:
        ask(f"GET {CONVERSATION}/items/{{item_id}}", **one, item_id=item["id"])
    ask(f"DELETE {CONVERSATION}/items/{{item_id}}", **one, item_id=added["data"][0]["id"])
    ask(f"DELETE {CONVERSATION}", **one)


def test_messages(kind: str, url_for: Callable[[str], str]) -> None:
    ask = anthropic_client(url_for(kind))
    tools = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "note", "input_schema": PARAMETERS}]
    body = {**BYTES, "messages": [USER], "max_tokens": 2000, "tools": tools}
    ask("POST /v1/messages", body)
    ask("POST /v1/messages", body | {"stop_sequences": ["ell"], "max_tokens": 40})
    assert len(ask("POST /v1/messages", body | {"stream": True})) > 4
    ask("POST /v1/messages", body | {"stream": True, "max_tokens": 99_999})
    ask("POST /v1/messages/count_tokens", {**BYTES, "messages": [USER], "tools": tools})


def test_message_batches(url_for: Callable[[str], str]) -> None:
    ask = anthropic_client(url_for("text"))
    good = {**BYTES, "max_tokens": 9, "messages": [USER]}
    requests = [{"custom_id": "a", "params": good}, {"custom_id": "b", "params": {**good, "model": "other"}}]
    made = ask("POST /v1/messages/batches", {"requests": requests})
    one = {"batch_id": made["id"]}
    ended = until(lambda: (now := ask(f"GET {MESSAGE_BATCH}", **one))["processing_status"] == "ended" and now)
    assert ended["request_counts"]["succeeded"] == 1
    kinds = {line["result"]["type"] for line in ask(f"GET {MESSAGE_BATCH}/results", **one)}
    assert kinds == {"succeeded", "errored"}
    ask("GET /v1/messages/batches")
    ask(f"DELETE {MESSAGE_BATCH}", **one)
    ask = anthropic_client(url_for("silence"))  # a batch that does not end by itself
    made = ask("POST /v1/messages/batches", {"requests": requests})
    ask(f"POST {MESSAGE_BATCH}/cancel", batch_id=made["id"])


def test_models(url_for: Callable[[str], str]) -> None:
    for ask in (openai_client(url_for("text")), anthropic_client(url_for("text"))):
        assert ask("GET /v1/models")["data"]
        ask("GET /v1/models/{name:path}", name="bytes")


def test_embeddings(serve: Serve) -> None:
    ask = openai_client(serve(embedding_engine()).url)
    ask("POST /v1/embeddings", {**BYTES, "input": ["Hi", "Ho"], "encoding_format": "float"})


def test_moderations(serve: Serve) -> None:
    ask = openai_client(guarded(serve, "ok").url)
    answer = ask("POST /v1/moderations", {"input": ["about nightfall", "about daylight"]})
    assert [result["flagged"] for result in answer["results"]] == [True, False]


def test_files_and_uploads(url_for: Callable[[str], str]) -> None:
    ours, theirs = openai_client(url_for("text")), anthropic_client(url_for("text"))
    for ask, fields in ((ours, {"purpose": "user_data"}), (theirs, {})):
        file = ask("POST /v1/files", fields, _upload={"file": ("a.txt", b"x", "text/plain")})
        ask("GET /v1/files/{file_id}", file_id=file["id"])
        assert ask("GET /v1/files")["data"]
        ask("DELETE /v1/files/{file_id}", file_id=file["id"])
    asked = {"filename": "a.jsonl", "purpose": "batch", "mime_type": "text/plain", "bytes": 1}
    upload = ours("POST /v1/uploads", asked)
    part = ours(f"POST {UPLOAD}/parts", {}, upload_id=upload["id"], _upload={"data": ("part", b"x")})
    ours(f"POST {UPLOAD}/complete", {"part_ids": [part["id"]]}, upload_id=upload["id"])
    ours(f"POST {UPLOAD}/cancel", upload_id=ours("POST /v1/uploads", asked)["id"])


def test_batches(url_for: Callable[[str], str]) -> None:
    ask = openai_client(url_for("text"))
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**BYTES, "messages": [USER]}}

    def begin(text: str, ask: CheckedClient = ask) -> Any:
        file = ask("POST /v1/files", {"purpose": "batch"}, _upload={"file": ("a.jsonl", text.encode())})
        asked = {
            "input_file_id": file["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        return ask("POST /v1/batches", asked)

    def end(batch: Any, status: str) -> Any:
        return until(
            lambda: (
                (now := ask("GET /v1/batches/{batch_id}", batch_id=batch["id"]))["status"] == status and now
            )
        )

    assert end(begin(json.dumps(line)), "completed")["output_file_id"]
    assert end(begin("{nonsense"), "failed")["errors"]["data"]
    ask("GET /v1/batches")
    silent = openai_client(url_for("silence"))  # its batches do not end by themselves
    silent("POST /v1/batches/{batch_id}/cancel", batch_id=begin(json.dumps(line), silent)["id"])


@pytest.mark.parametrize("path", ["/v1/models/none", "/v1/files/none"])
def test_errors(path: str, url_for: Callable[[str], str]) -> None:
    ours, theirs = openai_client(url_for("text")), anthropic_client(url_for("text"))
    for ask in (ours, theirs):
        ask.error("GET", path)
        ask.error("PUT", path)
    ours.error("GET", "/v1/no-such-path")
    ours.error("POST", CHAT, {"messages": 5})
    ours.error("POST", "/v1/responses", {"model": "other", "input": "Hi"})
    theirs.error("POST", "/v1/messages", {})


def test_errors_inside_streams(serve: Serve) -> None:
    def break_off(request: Request) -> list[TokenEvent | PenstockError]:
        begun = TokenEvent(request.id, (ord("H"),), num_cached_tokens=0, queue_s=0.0)
        return [begun, EngineUnavailable("The engine has gone.")]

    url = serve(FakeEngine(break_off)).url
    body = {**BYTES, "max_tokens": 9, "stream": True}
    *chunks, error = openai_client(url)(f"POST {CHAT}", body | {"messages": [USER]}, _ends_with=OpenAIError)
    assert chunks
    assert error["error"]["message"] == "The engine has gone."
    (*_, failed) = openai_client(url)("POST /v1/responses", {**BYTES, "input": "Hi", "stream": True})
    assert failed["type"] == "response.failed"
    asked = body | {"messages": [USER]}
    (*_, error) = anthropic_client(url)("POST /v1/messages", asked, _ends_with=anthropic.types.ErrorResponse)
    assert error["error"]["type"] == "api_error"
