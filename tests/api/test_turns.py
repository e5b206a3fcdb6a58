"""Thousands of tiny requests or chunks in one read of a socket: other connections have their turn between them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.sync.client import connect

from penstock.api.http.connections import MAX_FRESH_PARTS, MAX_TURN_PARTS, MIN_PIECE_BYTES, TURN_BYTES, Turns
from penstock.api.http.protocol import BoundedHttpProtocol
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


def masked(opcode: int, content: bytes) -> bytes:
    """A whole frame of a WebSocket, of at most 125 bytes, masked with zeros."""
    return bytes([0x80 | opcode, 0x80 | len(content)]) + bytes(4) + content


@pytest.mark.parametrize("frame", [masked(9, b""), masked(10, b""), masked(1, b'{"ping": 1}')])
def test_other_connections_have_turns_between_the_frames_of_a_websocket(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a few frames are parsed, and at most a few messages wait, at any time."""
    parsed: list[int] = []
    waiting: list[int] = []
    handle = WebSocketsSansIOProtocol.handle_events

    def note(self: WebSocketsSansIOProtocol) -> None:
        parsed.append(len(self.conn.events))
        handle(self)
        waiting.append(self.queue.qsize())

    monkeypatch.setattr(WebSocketsSansIOProtocol, "handle_events", note)
    num_frames = 4 * TURN_BYTES // len(frame)
    with (
        bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served,
        # The pongs to its own pings would come behind the flood.
        connect(
            f"ws://127.0.0.1:{served.port}/v1/stream", compression=None, max_queue=None, ping_interval=None
        ) as client,
    ):
        client.socket.sendall(frame * num_frames + masked(1, b'{"ping": "last"}'))
        served.wait_until(lambda: sum(parsed) >= num_frames)
        answers = iter(lambda: client.recv(timeout=60), "never")
        assert any('"last"' in str(answer) for answer in answers)
    assert max(parsed) <= TURN_BYTES // len(frame) + 1
    assert max(waiting) <= MIN_PIECE_BYTES // len(frame) + 1


def test_a_large_message_of_a_websocket_arrives_whole() -> None:
    with (
        bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served,
        connect(f"ws://127.0.0.1:{served.port}/v1/stream", compression=None, max_size=None) as client,
    ):
        text = "x" * (3 << 20)
        client.send('{"ping": "' + text + '"}')
        assert text in str(client.recv(timeout=60))
        client.send('{"ping": 2}')
        assert "2" in str(client.recv(timeout=60))


async def test_a_turn_has_one_bound_for_all_connections() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    visits: list[int] = []

    def go_on(connection: int) -> None:
        visits.append(connection)
        turns.spend(loop, MAX_TURN_PARTS // 2)
        if len(visits) < 30:
            turns.wait(loop, partial(go_on, connection))

    for connection in range(10):
        turns.wait(loop, partial(go_on, connection))
    seen = []
    while len(visits) < 30:
        await asyncio.sleep(0)
        seen.append(len(visits))
        assert turns.has_room, "for a connection without a backlog"
    assert max(after - before for before, after in pairwise(seen)) <= 3
    assert visits == [*range(10)] * 3, "one after the other"


async def test_connections_without_a_backlog_share_a_turn_too() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    turns.spend(loop, MAX_FRESH_PARTS + 1)
    assert not turns.has_room
    await asyncio.sleep(0)
    assert turns.has_room


async def test_a_connection_that_fails_keeps_no_other_one_waiting() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    done = asyncio.Event()

    def fail() -> None:
        raise ValueError("broken")

    turns.wait(loop, fail)
    turns.wait(loop, done.set)
    await asyncio.wait_for(done.wait(), 60)
    assert len(failures) == 1


CHUNKS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"1\r\nx\r\n" * 4000
)


@pytest.mark.parametrize("sent", [HEALTH * 500, CHUNKS])
def test_many_connections_with_tiny_parts_are_parsed_in_turns(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many connections there are, a turn parses little, and a request without a backlog is answered."""
    in_turns: list[int] = [0]
    begin, spend = Turns._begin, Turns.spend

    def note_begin(self: Turns, loop: asyncio.AbstractEventLoop) -> None:
        in_turns.append(0)
        begin(self, loop)

    def note_spend(self: Turns, loop: asyncio.AbstractEventLoop, num_parts: int) -> None:
        in_turns[-1] += num_parts
        spend(self, loop, num_parts)

    monkeypatch.setattr(Turns, "_begin", note_begin)
    monkeypatch.setattr(Turns, "spend", note_spend)
    with bounded_server(FakeEngine(), ServerConfig()) as served, ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=60))
            connection.sendall(sent)
        last = HEALTH.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        assert exchange(served, last, b"connection: close").startswith(b"HTTP/1.1 200")
        served.wait_until(lambda: len(in_turns) > 20)
    assert max(in_turns) <= MAX_FRESH_PARTS + TURN_BYTES // 6
