"""Requests with many messages are translated off the event loop, in every dialect."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from penstock.api.http import parsing
from tests.gateway.fake_engine import FakeEngine, script_text

from .conftest import Served

Serve = Callable[..., Served]

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": letter} for letter in "abc"]}]


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that translated requests."""
    names: list[str] = []

    async def noted(work: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            names.append(threading.current_thread().name)
            return work(*args)

        return await asyncio.get_running_loop().run_in_executor(None, run)

    monkeypatch.setattr(parsing, "in_thread", noted)
    return names


@pytest.mark.parametrize("messages", [TURNS, PARTS])
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/stream"],
)
def test_many_messages_and_parts(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    in_threads: list[str],
    path: str,
    messages: list[dict[str, Any]],
) -> None:
    served = serve(FakeEngine(script_text("x")))
    field = "input" if path == "/v1/responses" else "messages"
    if field == "input":
        messages = json.loads(json.dumps(messages).replace('"type": "text"', '"type": "input_text"'))
    body = {"model": "bytes", "top_k": 3, field: messages}  # not the short way of plain chats
    if field == "messages":
        body["max_tokens"] = 5

    def ask() -> None:
        if path == "/v1/stream":
            with connect(served.url.replace("http", "ws") + path) as socket:
                socket.send(json.dumps(body))
                assert "token" in json.loads(socket.recv())
        else:
            answer = httpx.post(served.url + path, json=body)
            assert answer.status_code == 200, answer.text

    ask()
    assert not in_threads
    monkeypatch.setattr(parsing, "DIRECT_PARTS", 2)
    ask()
    assert len(in_threads) == (2 if path == "/v1/responses" else 1)  # the items get their full form, too


def test_a_refusal_is_the_same(serve: Serve, monkeypatch: pytest.MonkeyPatch, in_threads: list[str]) -> None:
    monkeypatch.setattr(parsing, "DIRECT_PARTS", 2)
    served = serve(FakeEngine(script_text("x")))
    body = {"model": "bytes", "messages": [*TURNS, {"role": "nobody", "content": "d"}]}
    refused = httpx.post(served.url + "/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[3].role"
    assert in_threads


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_large_files(serve: Serve, monkeypatch: pytest.MonkeyPatch, in_threads: list[str], path: str) -> None:
    monkeypatch.setattr(parsing, "DIRECT_PARTS", 4)
    served = serve(FakeEngine(script_text("x")))
    for num_bytes, is_large in ((1 << 10, False), (8 << 10, True)):
        data = base64.b64encode(b"x" * num_bytes).decode()
        file = {"filename": "a.txt", "file_data": data}
        part = {"type": "input_file", **file} if path == "/v1/responses" else {"type": "file", "file": file}
        turns = [{"role": "user", "content": [part]}]
        body = {"model": "bytes", ("input" if path == "/v1/responses" else "messages"): turns}
        httpx.post(f"{served.url}{path}", json=body)
        assert bool(in_threads) == is_large
