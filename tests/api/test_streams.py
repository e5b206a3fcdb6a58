"""What only a real socket shows: readers that leave, readers that are slow, and a server that drains."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from penstock.core.gateway_config import GatewayConfig
from penstock.core.request import FinishReason
from tests.api.conftest import Serve, Served
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text


class ThreadedFakeEngine(FakeEngine):
    """Remembers the server's event loop, so that a test on another thread can make it emit."""

    loop: asyncio.AbstractEventLoop

    def add(self, *arguments: Any, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        super().add(*arguments, **options)

    def emit_soon(self, *token_ids: int, finish_reason: FinishReason | None = None) -> None:
        """Give every live request the same tokens, and wait until the server has taken them in."""
        done = threading.Event()

        def emit_all() -> None:
            for request_id in list(self.streams):
                self.emit(request_id, *token_ids, finish_reason=finish_reason)
            done.set()

        self.loop.call_soon_threadsafe(emit_all)
        assert done.wait(60)


def open_stream(served: Served, **fields: Any) -> socket.socket:
    body = json.dumps({"prompt": "hi", "max_tokens": 100} | fields).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # a slow reader shows sooner
    connection.settimeout(60)
    connection.connect(("127.0.0.1", served.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_until(connection: socket.socket, needle: bytes) -> bytes:
    received = bytearray()
    while needle not in received[-(1 << 17) :]:
        data = connection.recv(1 << 16)
        assert data, f"the server closed after {bytes(received[-300:])!r}"
        received += data
    return bytes(received)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_client_that_leaves_frees_its_request(serve: Serve, stream: bool, has_begun: bool) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    connection = open_stream(served, stream=stream, n=2)
    served.wait_until(lambda: len(engine.added) == 2)
    if has_begun:
        engine.emit_soon(ord("a"))
        if stream:
            read_until(connection, b'"text":"a"')
    connection.close()
    served.wait_until(lambda: len(engine.aborted) == 2)
    assert served.gateway.num_live == 0


def test_chunks_arrive_as_tokens_do(serve: Serve) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    connection = open_stream(served, stream=True)
    served.wait_until(lambda: bool(engine.added))
    engine.emit_soon(ord("a"))
    assert b"text/event-stream" in read_until(connection, b'"text":"a"')
    engine.emit_soon(ord("b"))
    read_until(connection, b'"text":"b"')
    engine.emit_soon(ord("c"), finish_reason=FinishReason.LENGTH)
    ending = read_until(connection, b"[DONE]\n\n")
    assert b'"text":"c","logprobs":null,"finish_reason":"length"' in ending
    connection.close()


def test_a_slow_reader_is_dropped_and_the_engine_never_waits(serve: Serve) -> None:
    engine = ThreadedFakeEngine(ready=engine_ready(model_card(max_model_len=1 << 30), 1 << 29))
    served = serve(engine, gateway=GatewayConfig(max_stream_buffer_bytes=1 << 16))
    connection = open_stream(served, stream=True, max_tokens=1 << 29)
    served.wait_until(lambda: bool(engine.added))
    # The kernel's and the server's buffers take much before the gateway's begins to fill.
    for _ in range(5000):
        if engine.aborted:
            break
        engine.emit_soon(*b"x" * 8192)
    assert engine.aborted == [engine.added[0].id]
    rest = read_until(connection, b'"error"')
    assert b"[DONE]" not in rest
    connection.close()


def test_a_slow_reader_gets_merged_chunks(serve: Serve) -> None:
    engine = ThreadedFakeEngine(ready=engine_ready(model_card(max_model_len=1 << 30), 1 << 29))
    served = serve(engine, gateway=GatewayConfig(max_stream_buffer_bytes=1 << 26))
    connection = open_stream(served, stream=True, max_tokens=1 << 29)
    served.wait_until(lambda: bool(engine.added))
    num_events = 600
    for _ in range(num_events):
        engine.emit_soon(*b"x" * 8192)
    engine.emit_soon(ord("y"), finish_reason=FinishReason.LENGTH)
    received = read_until(connection, b"[DONE]")
    assert received.count(b"x") >= num_events * 8192
    assert received.count(b'"text"') < num_events
    connection.close()


def test_drain_lets_streams_finish_and_refuses_new_ones(serve: Serve) -> None:
    engine = ThreadedFakeEngine()
    served = serve(engine)
    connection = open_stream(served, stream=True)
    served.wait_until(lambda: bool(engine.added))
    engine.emit_soon(ord("a"))
    draining = asyncio.run_coroutine_threadsafe(served.gateway.drain(60.0), engine.loop)
    served.wait_until(lambda: served.gateway.is_draining)
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) > 0
    for path in ("/health", "/ready"):
        answer = httpx.get(served.url + path)
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
    engine.emit_soon(ord("b"), finish_reason=FinishReason.STOP)
    assert draining.result(60)
    assert b'"text":"b"' in read_until(connection, b"[DONE]")
    connection.close()


def test_several_requests_share_a_connection(serve: Serve) -> None:
    served = serve(FakeEngine(script_text("fine")))
    with httpx.Client(base_url=served.url) as client:
        answers = [client.post("/v1/completions", json={"prompt": "x"}) for _ in range(3)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["fine"] * 3
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3
