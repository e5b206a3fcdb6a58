"""Answers with very many log-probabilities: written off the event loop, in every dialect, and bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from penstock.api.http.answers import TURN_BYTES, EventStream
from penstock.api.openai import answers, prompt_echo
from penstock.core.request import FinishReason
from penstock.gateway.answers import stream
from penstock.gateway.answers.choice import Delta, TokenAlternative, TokenDetail
from penstock.gateway.answers.stream import EmptyAnswer
from penstock.gateway.reuse import replay
from tests.gateway.fake_engine import FakeEngine, script_text

from .conftest import Served

Serve = Callable[..., Served]

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 3}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "store": True}),
    ("/v1/completions", {"model": "bytes", "prompt": ["ab", "cd"], "logprobs": 2, "max_tokens": 9}),
    (
        "/v1/completions",
        {"model": "bytes", "prompt": ["ab", "cd"], "logprobs": 2, "echo": True, "max_tokens": 0},
    ),
    ("/v1/completions", {"model": "bytes", "prompt": ["ab", "cd"], "prompt_logprobs": 2, "max_tokens": 1}),
    (
        "/v1/responses",
        {
            "model": "bytes",
            "input": "hi",
            "store": False,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
    ),
    (
        "/api/chat",
        {
            "model": "bytes",
            "messages": CHAT["messages"],
            "stream": False,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_many_are_written_off_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    threads: set[str] = set()

    def noted(data: bytes) -> str:
        threads.add(threading.current_thread().name)
        return data.decode("utf-8", "replace")

    monkeypatch.setattr(answers, "token_text", noted)
    monkeypatch.setattr(prompt_echo, "token_text", noted)
    served = serve(FakeEngine(script_text("x" * 30)))
    few = httpx.post(served.url + path, json=body)
    on_loop = set(threads)
    assert few.status_code == 200, few.text
    assert not any(name.startswith("asyncio") for name in on_loop)

    threads.clear()
    monkeypatch.setattr(stream, "DIRECT_LOGPROBS", 2)
    monkeypatch.setattr(prompt_echo, "DIRECT_LOGPROBS", 2)
    many = httpx.post(served.url + path, json=body)
    assert many.status_code == 200, many.text
    assert threads
    assert not threads & on_loop


def test_one_whole_answer_has_a_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_WHOLE_LOGPROBS", 60)
    monkeypatch.setattr(replay, "MAX_WHOLE_LOGPROBS", 60)
    served = serve(FakeEngine(script_text("x" * 30)))
    path, body = REQUESTS[0]

    def post(headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        return httpx.post(served.url + path, json={**body, **changes}, headers=headers)

    assert post(n=1, max_tokens=20).status_code == 200
    for headers in (None, {"idempotency-key": "one"}):
        refused = post(headers)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "logprobs"
    streamed = post(stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert not served.gateway.num_live


def test_an_answer_is_kept_with_its_alternatives_counted() -> None:
    tops = tuple(TokenAlternative(b"x", -1.0) for _ in range(20))
    many = [[Delta(0, "x", (TokenDetail(b"x", -1.0, place, tops),))] for place in range(100)]

    class Answered:
        id, model, num_choices, usage, warnings = "a", "m", 1, replay.NOTHING_USED, ()

    encoded = replay.encode_answer(Answered(), many)  # type: ignore[arg-type]
    counted = sum(replay._weight(delta) for deltas in many for delta in deltas)
    assert len(encoded) / 2 < counted < len(encoded) * 2


async def test_events_of_many_answers_leave_in_turns() -> None:
    num_answers = 5

    class Late(EmptyAnswer):
        """All answers are there at once, as for a reader that was slow."""

        num_choices = num_answers
        _has_shown = False

        async def __anext__(self) -> list[Delta]:
            if self._has_shown:
                raise StopAsyncIteration
            self._has_shown = True
            return [Delta(index, "x", (), FinishReason.STOP) for index in range(num_answers)]

    class Events:
        def opening(self, answer: object) -> bytes:
            return b""

        def chunk(self, delta: Delta) -> bytes:
            return b"x" * (TURN_BYTES + 1)

        def closing(self, usage: object) -> bytes:
            return b"end"

        failure = closing

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays, and sends nothing more

    async def submitted() -> Late:
        return Late("a", "m")

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
    request = Request(scope, receive, send)
    events = Events()
    opened = await EventStream.open(request, submitted(), lambda _: events, events.failure)
    await opened(scope, receive, send)
    bodies = [each["body"] for each in sent if each["type"] == "http.response.body"]
    assert b"".join(bodies) == b"x" * (TURN_BYTES + 1) * num_answers + b"end"
    assert max(map(len, bodies)) <= TURN_BYTES + 4
