"""Thousands of tiny requests or chunks in one read of a socket: other connections have their turn between them."""

from __future__ import annotations

import socket
import threading

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.http.protocol import BoundedHttpProtocol
from penstock.api.http.turns import TURN_BYTES
from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.gateway.fake_engine import FakeEngine, script_text

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 4}'
COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


def exchange(served: BoundedServed, sent: bytes, until: bytes) -> bytes:
    """Send while reading, until the answer ends with `until`."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        received = bytearray()
        while until not in received[-400:] and (data := connection.recv(1 << 16)):
            received += data
        sender.join()
    return bytes(received)


@pytest.mark.parametrize("request_", [HEALTH, COMPLETION])
def test_requests_that_do_not_wait_are_read_as_they_are_answered(
    request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waiting: list[int] = []
    begin = BoundedHttpProtocol.on_message_begin

    def note(self: BoundedHttpProtocol) -> None:
        num_waiting.append(len(self.pipeline))
        begin(self)

    monkeypatch.setattr(BoundedHttpProtocol, "on_message_begin", note)
    num_requests = 10 * TURN_BYTES // len(request_)
    last = request_.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        answers = exchange(served, request_ * num_requests + last, b"connection: close")
    assert answers.count(b"HTTP/1.1 200 OK") == num_requests + 1
    assert max(num_waiting) <= TURN_BYTES // len(request_) + 1


def test_tiny_chunks_reach_the_application_in_small_portions() -> None:
    portions: list[int] = []

    async def take(request: Request) -> Response:
        async for portion in request.stream():
            portions.append(len(portion))
        return Response(b"taken")

    num_chunks = 100_000
    head = b"POST /take HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    routes = [Route("/take", take, methods=["POST"])]
    with bounded_server(FakeEngine(), ServerConfig(), more_routes=lambda _: routes) as served:
        answer = exchange(served, head + b"1\r\nx\r\n" * num_chunks + b"0\r\n\r\n", b"taken")
    assert answer.startswith(b"HTTP/1.1 200")
    assert sum(portions) == num_chunks
    assert max(portions) <= 2 * TURN_BYTES // 6


def test_a_large_body_arrives_whole() -> None:
    async def take(request: Request) -> Response:
        body = await request.body()
        return Response(b"whole" if body == bytes(range(256)) * 40_000 else b"not whole")

    routes = [Route("/take", take, methods=["POST"])]
    body = bytes(range(256)) * 40_000
    head = b"POST /take HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with bounded_server(FakeEngine(), ServerConfig(), more_routes=lambda _: routes) as served:
        assert exchange(served, head + body, b"whole").endswith(b"\r\n\r\nwhole")
