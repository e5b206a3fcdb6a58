"""A stream that waits for its first token: headers and signs of life come early, errors in the form of each API."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anthropic
import httpx
import openai
import pytest
from starlette.requests import Request

from penstock.api.http.answers import answer_whole
from penstock.api.http.context import ON_DEPARTURE
from penstock.api.http.routes import Operation
from penstock.core.errors import Overloaded
from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import FinishReason
from penstock.gateway.answers.stream import AnswerStream, ReaderGone
from penstock.gateway.gateway import Gateway
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.responses.service import EventLog
from penstock.gateway.text.tokenizer import TextTokenizer
from tests.api.bounded_server import bounded_server
from tests.api.conftest import Serve, Served
from tests.api.test_streams import ThreadedFakeEngine, open_stream, read_until
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text, until
from tests.gateway.guards.read_settings import guard_settings

USER: Any = {"role": "user", "content": "hi"}
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}, ": waiting"),
    "completions": ("/v1/completions", {"prompt": "hi"}, ": waiting"),
    "responses": ("/v1/responses", {"input": "hi"}, ": waiting"),
    "background": ("/v1/responses", {"input": "hi", "background": True}, ": waiting"),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 5}, "event: ping"),
    "ollama": ("/api/chat", {"messages": [USER]}, '"done":false'),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.http.answers.FIRST_BYTES_S", 0.02)
    monkeypatch.setattr("penstock.api.http.answers.KEEP_ALIVE_S", 0.02)


@contextmanager
def waiting(served: Served, name: str) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """An open stream that has shown three signs of life, and no token."""
    path, body, sign = ROUTES[name]
    body = {"model": "bytes", "stream": True} | body
    with httpx.stream("POST", served.url + path, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        num_signs = 0
        while num_signs < 3:
            line = next(lines)
            num_signs += sign in line
            assert "message_start" not in line
        yield answer, lines


def fail_soon(engine: ThreadedFakeEngine) -> None:
    for stream in list(engine.streams.values()):
        error = Overloaded("The queue is full.", retry_after_s=1.0)
        engine.loop.call_soon_threadsafe(stream.on_error, error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ROUTES)
def test_headers_and_signs_of_life_come_before_the_first_token(serve: Serve, name: str) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    with waiting(served, name) as (answer, lines):
        assert answer.status_code == 200
        engine.emit_soon(ord("a"))
        engine.emit_soon(ord("b"), finish_reason=FinishReason.STOP)
        rest = "\n".join(lines)
    assert "a" in rest
    ending = {
        "messages": "message_stop",
        "responses": "response.completed",
        "background": "response.completed",
        "ollama": '"done":true',
    }
    assert ending.get(name, "[DONE]") in rest
    assert served.gateway.num_live == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat", 'data: {"error":{"message":"The queue is full.","type":"overloaded_error"'),
        ("completions", 'data: {"error":{"message":"The queue is full.","type":"overloaded_error"'),
        ("responses", '"code":"server_is_overloaded","message":"The queue is full."'),
        ("background", '"code":"server_is_overloaded","message":"The queue is full."'),
        ("messages", 'data: {"error":{"type":"overloaded_error","message":"The queue is full."}'),
        ("ollama", '{"error":"The queue is full."'),
    ],
)
def test_an_error_after_the_headers_ends_the_stream(serve: Serve, name: str, expected: str) -> None:
    engine = ThreadedFakeEngine()
    with waiting(serve(engine), name) as (_, lines):
        fail_soon(engine)
        rest = "\n".join(lines)
    assert expected in rest
    assert "[DONE]" not in rest


JUDGE = {"guard": "judge", "constitution": "Be kind.", "stage": "input", "timeout_s": 60.0}


def judged(served: Served) -> ThreadedFakeEngine:
    """A judge reads every prompt, and waits for its first token as all requests do."""
    policy = {"rules": [JUDGE], "on_failure": "closed"}
    served.gateway.guards.apply(guard_settings({"policies": {"p": policy}, "default_policy": "p"}))
    assert isinstance(served.engine, ThreadedFakeEngine)
    return served.engine


def roomy_engine() -> ThreadedFakeEngine:
    return ThreadedFakeEngine(ready=engine_ready(model_card(max_model_len=4096), max_output_tokens=512))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ROUTES)
def test_a_judge_that_waits_does_not_keep_the_headers_back(serve: Serve, name: str) -> None:
    served = serve(roomy_engine())
    engine = judged(served)
    with waiting(served, name) as (answer, lines):
        assert answer.status_code == 200
        assert len(engine.added) == 1, "the judge alone"
        engine.emit_soon(*b'{"verdict": "allow"}', finish_reason=FinishReason.STOP)
        served.wait_until(lambda: len(engine.streams) == 1)
        engine.emit_soon(*b"hello", finish_reason=FinishReason.STOP)
        rest = "\n".join(lines)
    assert "hello" in rest
    assert served.gateway.num_live == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chat", 'data: {"error":{"message":"'),
        ("responses", '"type":"response.failed"'),
        ("background", '"type":"response.failed"'),
        ("messages", 'event: error\ndata: {"error":{"type":"invalid_request_error"'),
        ("ollama", '{"error":"'),
    ],
)
def test_a_refusal_after_the_headers_ends_the_stream(serve: Serve, name: str, expected: str) -> None:
    served = serve(roomy_engine())
    engine = judged(served)
    with waiting(served, name) as (_, lines):
        engine.emit_soon(*b'{"verdict": "violation", "reason": "rude"}', finish_reason=FinishReason.STOP)
        rest = "\n".join(lines)
    assert expected in rest
    assert "[DONE]" not in rest
    assert len(engine.added) == 1


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("is_bounded", [True, False], ids=["penstock", "uvicorn"])
def test_a_client_that_leaves_before_dispatch_ends_what_waits(
    serve: Serve, *, streams: bool, is_bounded: bool
) -> None:
    engine = roomy_engine()
    with ExitStack() as stack:
        served = stack.enter_context(bounded_server(engine)) if is_bounded else serve(engine)
        judged(served)
        connection = open_stream(served, stream=streams)
        served.wait_until(lambda: len(engine.streams) == 1)
        connection.close()
        served.wait_until(lambda: len(engine.aborted) == 1)
        served.wait_until(lambda: not served.gateway._on_the_way)
        assert len(engine.added) == 1
        assert served.gateway.num_live == 0


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_after_a_large_prompt_is_noticed(*, streams: bool) -> None:
    """The server stops reading while it holds a large body, and must read to notice a departure."""
    engine = ThreadedFakeEngine(ready=engine_ready(model_card(max_model_len=400_000)))
    with bounded_server(engine) as served:
        connection = open_stream(served, stream=streams, prompt="x" * 300_000)
        served.wait_until(lambda: len(engine.streams) == 1)
        connection.close()
        served.wait_until(lambda: len(engine.aborted) == 1)


class HeldWork:
    """Work for a client that does not end. Notes what happens to it."""

    def __init__(self) -> None:
        self.has_begun, self.was_cancelled = threading.Event(), threading.Event()

    async def __call__(self, *_: Any, **options: Any) -> Any:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise


def leave_during(work: HeldWork, served: Served, method: str, path: str, body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode() + sent)
        assert work.has_begun.wait(60)
    assert work.was_cancelled.wait(60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"model": "bytes", "messages": [USER]}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/api/embed", {"model": "bytes", "input": "hi"}),
    ],
)
def test_a_client_that_leaves_ends_the_tokenizing(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Hundreds of clients that have left would keep the threads busy with large texts for minutes."""
    work = HeldWork()
    for name in ("encode", "encode_marked", "encode_with_template"):
        monkeypatch.setattr(TextTokenizer, name, work)
    card = model_card(embedding_size=4 if "embed" in path else None)
    with bounded_server(FakeEngine(ready=engine_ready(card))) as served:
        leave_during(work, served, "POST", path, body)
        served.wait_until(lambda: not served.gateway._on_the_way)


def test_a_client_that_leaves_ends_what_only_reads() -> None:
    work = HeldWork()

    def routes(_: Gateway) -> list[Operation]:
        return [Operation("GET /held", work.__call__)]

    with bounded_server(FakeEngine(), more_routes=routes) as served:
        leave_during(work, served, "GET", "/held", {})


def test_the_last_token_and_the_end_of_a_stream_leave_together(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("")))
    path, body, _ = ROUTES["chat"]
    with httpx.stream("POST", served.url + path, json=body | {"stream": True}, timeout=60) as answer:
        (piece,) = answer.iter_raw()
    assert b'"finish_reason":"stop"' in piece
    assert piece.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in ("ollama", "background")])
def test_an_error_known_at_once_has_its_status(serve: Serve, name: str) -> None:
    path, body, _ = ROUTES[name]
    engine = FakeEngine(lambda request: [Overloaded("The queue is full.")])
    answer = httpx.post(serve(engine).url + path, json={"model": "bytes", "stream": True} | body)
    assert answer.status_code == (529 if name == "messages" else 503)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.usefixtures("impatient")
def test_a_client_that_leaves_while_it_waits_frees_its_request(serve: Serve) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    connection = open_stream(served, stream=True, n=2)
    read_until(connection, b": waiting")
    connection.close()
    served.wait_until(lambda: len(engine.aborted) == 2)
    assert served.gateway.num_live == 0


@pytest.mark.usefixtures("impatient")
def test_sdks_take_the_signs_of_life_and_raise_the_error(serve: Serve) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    chat = served.sdk().chat.completions.create(model="bytes", messages=[USER], stream=True)
    assert engine.added
    engine.emit_soon(ord("a"), finish_reason=FinishReason.STOP)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == "a"

    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with client.messages.stream(model="bytes", messages=[USER], max_tokens=5) as stream:
        fail_soon(engine)
        with pytest.raises(anthropic.APIStatusError, match="queue is full"):
            stream.get_final_message()

    with served.sdk().responses.stream(model="bytes", input="hi") as events:
        fail_soon(engine)
        kinds = [event.type for event in events]
    assert kinds == ["response.created", "response.failed"]

    broken = served.sdk().chat.completions.create(model="bytes", messages=[USER], stream=True)
    fail_soon(engine)
    with pytest.raises(openai.APIError, match="queue is full"):
        list(broken)


async def test_work_that_begins_in_spite_of_a_departure_is_cancelled() -> None:
    watches: list[Any] = []
    scope = {"type": "http", "headers": [], "extensions": {ON_DEPARTURE: {"watch": watches.append}}}
    gateway = Gateway(FakeEngine(), GatewayConfig())

    async def submit() -> AnswerStream:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        sampling = SamplingOptions(max_tokens=5)
        return await gateway.submit(GenerationRequest(prompts=(TextPrompt("hi"),), sampling=sampling))

    answering = asyncio.create_task(answer_whole(Request(scope), submit(), lambda answer, deltas: b""))
    await until(lambda: watches)
    watches[0]()
    with pytest.raises(ReaderGone):
        await answering
    assert gateway.num_live == 0
    assert watches[1:] == [None], "the watch has ended"


@pytest.mark.parametrize("is_bounded", [True, False], ids=["penstock", "uvicorn"])
def test_a_response_in_the_background_goes_on_without_its_reader(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, *, is_bounded: bool
) -> None:
    is_left = threading.Event()
    follow = EventLog.follow

    async def followed(log: EventLog, first: int) -> AsyncIterator[bytes]:
        try:
            async for events in follow(log, first):
                yield events
        finally:
            is_left.set()

    monkeypatch.setattr(EventLog, "follow", followed)
    engine = ThreadedFakeEngine()
    path, body, _ = ROUTES["background"]
    with ExitStack() as stack:
        served = stack.enter_context(bounded_server(engine)) if is_bounded else serve(engine)
        body = {"model": "bytes", "stream": True} | body
        with httpx.stream("POST", served.url + path, json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
            assert not is_left.is_set()
        assert is_left.wait(60)
        engine.emit_soon(ord("a"), finish_reason=FinishReason.STOP)
        sdk = served.sdk()
        served.wait_until(lambda: sdk.responses.retrieve(response_id).status == "completed")
    assert not engine.aborted
