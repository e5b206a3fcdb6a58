"""Clients that mean harm: they get a clear answer or a closed door, and everyone else is served meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from penstock.api.http import protocol
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.gateway import Gateway
from tests.api.bounded_server import BoundedServed, HeldTimers, ThreadedEngine, bounded_server
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text

COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def dial(served: BoundedServed) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.settimeout(60)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def serves(served: BoundedServed) -> bool:
    """Sends the whole request as soon as the connection is open: a busy machine must not look like a slow client."""
    body = b'{"prompt": "hi", "max_tokens": 4}'
    with dial(served) as connection:
        connection.sendall(COMPLETION + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return read_all(connection).startswith(b"HTTP/1.1 200")


LIMITED = ServerConfig(header_timeout_s=11.0, body_timeout_s=12.0)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> HeldTimers:
    timers = HeldTimers()
    monkeypatch.setattr(protocol, "ClientTimer", timers.start)
    return timers


def send(served: BoundedServed, connection: socket.socket, data: bytes) -> None:
    """Return when the server has read the data."""
    until = served.num_bytes_read + len(data)
    connection.sendall(data)
    served.wait_until(lambda: served.num_bytes_read >= until)


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
def test_a_stream_to_http_1_0_ends_with_its_connection(more: bytes) -> None:
    """HTTP/1.0 has neither chunks nor interim answers."""
    body = b'{"prompt": "hi", "max_tokens": 4, "stream": true}'
    head = COMPLETION.replace(b"HTTP/1.1", b"HTTP/1.0") + more + b"Content-Length: %d\r\n\r\n" % len(body)
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        connection = dial(served)
        connection.sendall(head + body)
        answer_head, _, events = read_all(connection).partition(b"\r\n\r\n")
    assert answer_head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in answer_head
    assert b"connection: close" in answer_head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", COMPLETION, COMPLETION + b"X-A: b", b"\r\n\r\n"])
def test_a_head_that_never_ends_is_timed_out(sent: bytes, timers: HeldTimers) -> None:
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        connection = dial(served)
        served.wait_until(lambda: bool(timers.armed))
        send(served, connection, sent)
        timers.expire(LIMITED.header_timeout_s)
        assert status_and_code(read_all(connection)) == (408, "request_timeout")
        assert serves(served)
        assert served.connections.num_timed_out == 1


def test_a_head_that_comes_drop_by_drop_is_timed_out(timers: HeldTimers) -> None:
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        connection = dial(served)
        served.wait_until(lambda: bool(timers.armed))
        begun = list(timers.armed)
        for drop in (COMPLETION, b"X-Slow: 1\r\n", b"X-Slow: 1\r\n"):
            send(served, connection, drop)
        assert timers.armed == begun, "no drop gives the client more time"
        timers.expire(LIMITED.header_timeout_s)
        assert status_and_code(read_all(connection)) == (408, "request_timeout")


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\n"]
)
def test_a_body_that_never_ends_is_timed_out(framing: bytes, timers: HeldTimers) -> None:
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        connection = dial(served)
        send(served, connection, COMPLETION + framing + b'{"pro')
        timers.expire(LIMITED.body_timeout_s)
        assert status_and_code(read_all(connection)) == (408, "request_timeout")
        served.wait_until(lambda: served.connections.num_open == 0)
        assert serves(served)


def test_a_request_that_was_refused_before_its_body_ended_is_answered_once(timers: HeldTimers) -> None:
    """A second answer would be taken for that of the next request."""
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        connection = dial(served)
        connection.sendall(COMPLETION.replace(b"completions", b"nowhere") + b"Content-Length: 1000\r\n\r\n{")
        answer = b""
        while b"}" not in answer:
            answer += connection.recv(1 << 16)
        timers.expire(LIMITED.body_timeout_s)
        answer += read_all(connection)
        assert status_and_code(answer)[0] == 404
        assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_may_take_its_time(timers: HeldTimers) -> None:
    """Each period brings enough of it, though the whole takes several."""
    ready = engine_ready(model_card(max_model_len=1 << 20))
    with bounded_server(FakeEngine(script_text("ok"), ready), LIMITED) as served:
        body = json.dumps({"prompt": "x" * 400_000, "max_tokens": 4}).encode()
        connection = dial(served)
        send(served, connection, COMPLETION + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 40_000):
            send(served, connection, body[start : start + 40_000])
            timers.expire(LIMITED.body_timeout_s)
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_keep_alive_connections_survive_the_head_timeout_between_requests(timers: HeldTimers) -> None:
    with (
        bounded_server(FakeEngine(script_text("ok")), LIMITED, timeout_keep_alive=600) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        for _ in range(3):
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
            assert answer.status_code == 200
            timers.expire(LIMITED.header_timeout_s)
        assert (served.connections.num_open, served.connections.num_timed_out) == (1, 0)


def test_one_task_answers_all_requests_of_a_connection() -> None:
    tasks = []

    async def note(request: Request) -> Response:
        tasks.append(asyncio.current_task())
        return Response(b"noted")

    def routes(_: Gateway) -> list[Route]:
        return [Route("/note", note, methods=["POST"])]

    with bounded_server(FakeEngine(), more_routes=routes) as served:
        connection = dial(served)
        call = b"POST /note HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        for _ in range(3):
            connection.sendall(call)
            while b"noted" not in connection.recv(1 << 16):
                pass
        assert len({id(task) for task in tasks}) == 1
        connection.sendall(call * 3)  # without waiting for answers
        received = b""
        while received.count(b"noted") < 3:
            received += connection.recv(1 << 16)
        assert len(tasks) == 6
        connection.close()
        served.wait_until(lambda: all(task.done() for task in tasks))


def test_stray_line_breaks_do_not_hold_a_connection_forever(timers: HeldTimers) -> None:
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        connection = dial(served)
        body = b'{"prompt": "hi"}'
        connection.sendall(COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while b'"usage"' not in connection.recv(1 << 16):
            pass
        send(served, connection, b"\r\n")
        timers.expire(LIMITED.header_timeout_s)
        assert b"408" in read_all(connection)


@pytest.mark.parametrize(
    "head",
    [
        COMPLETION + b"X-Big: " + b"a" * 40_000 + b"\r\n\r\n",
        COMPLETION + b"".join(b"X-%d: a\r\n" % number for number in range(200)) + b"\r\n",
        COMPLETION + b"".join(b"X-%d: %b\r\n" % (number, b"a" * 900) for number in range(80)) + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["one value", "many headers", "many bytes", "path"],
)
def test_header_floods_are_refused(head: bytes) -> None:
    with bounded_server(FakeEngine(script_text("ok"))) as served:
        connection = dial(served)
        connection.sendall(head)
        assert status_and_code(read_all(connection)) == (431, "request_header_fields_too_large")
        assert served.connections.num_malformed == 1
        assert serves(served)


def test_an_endless_head_is_cut_off() -> None:
    """It must not be collected until its end, which never comes."""
    with bounded_server(FakeEngine(script_text("ok"))) as served:
        connection = dial(served)
        sent = 0
        try:
            connection.sendall(COMPLETION + b"X-Big: ")
            while sent < 64 << 20:
                sent += connection.send(b"a" * 65_536)
        except OSError:
            pass
        assert sent < 16 << 20
        assert serves(served)


def test_an_endless_body_is_cut_off() -> None:
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(max_body_bytes=1024)) as served:
        connection = dial(served)
        connection.sendall(COMPLETION + b"Content-Length: 1000000000000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
        connection.settimeout(0.2)  # the server reads no more, or closes
        sent = 0
        try:
            while sent < 256 << 20:
                sent += connection.send(b"a" * 1_000_000)
        except OSError:
            pass
        assert sent < 128 << 20
        assert serves(served)


CHUNKED = COMPLETION + b"Connection: close\r\nTransfer-Encoding: chunked\r\n"


def test_trailers_are_no_headers() -> None:
    """A proxy checks headers, and lets trailers pass."""
    body = b'{"prompt": "hi", "max_tokens": 4}'
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(api_key="right")) as served:
        for trailer, status in ((b"", 200), (b"Authorization: Bearer right\r\n", 401)):
            key = b"" if trailer else b"Authorization: Bearer right\r\n"
            with dial(served) as connection:
                chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer)
                connection.sendall(CHUNKED + key + b"\r\n" + chunks)
                assert read_all(connection).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("framing", [b"0\r\nX-Trailer: ", b"1;extension="], ids=["trailer", "extension"])
def test_endless_framing_is_cut_off(framing: bytes) -> None:
    """The parser keeps all of a trailer until it ends."""
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        with dial(served) as connection, pytest.raises(OSError):  # noqa: PT011, PT012
            connection.sendall(CHUNKED + b"\r\n" + framing)
            for _ in range(1024):
                connection.sendall(b"a" * (1 << 16))
        assert served.connections.num_malformed == 1
        assert serves(served)


def test_what_is_not_http_is_refused_in_our_own_words() -> None:
    with bounded_server(FakeEngine(script_text("ok"))) as served:
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            connection = dial(served)
            connection.sendall(junk)
            assert status_and_code(read_all(connection)) == (400, "invalid_request_error")
        assert serves(served)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "\xc3\x28"}', 400),
        (b"\xff" * 100, 400),
        (b'{"prompt": "a", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
        (b'{"prompt": "' + b"x" * 3_000_000 + b'"}', 413),
    ],
    ids=["bad utf-8", "no utf-8", "deep arrays", "deep objects", "too large"],
)
def test_bad_bodies(body: bytes, status: int) -> None:
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(max_body_bytes=2_000_000)) as served:
        answer = httpx.post(f"{served.url}/v1/completions", content=body)
        assert answer.status_code == status
        assert "Traceback" not in answer.text
        assert serves(served)


def test_connections_beyond_the_limit_are_refused_clearly() -> None:
    engine = ThreadedEngine()
    with bounded_server(engine, ServerConfig(max_connections=3)) as served:
        held = [dial(served) for _ in range(3)]
        for connection in held:
            connection.sendall(COMPLETION + b'Content-Length: 16\r\n\r\n{"prompt": "hi"}')
        served.wait_until(lambda: len(engine.added) == 3)
        assert status_and_code(read_all(dial(served))) == (503, "overloaded")
        assert served.connections.num_refused == 1
        held.pop().close()
        served.wait_until(lambda: served.connections.num_open == 2)
        with dial(served) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 200")
        for connection in held:
            connection.close()


def test_a_stream_that_nobody_reads_is_dropped() -> None:
    ready = engine_ready(model_card(max_model_len=1 << 20), max_output_tokens=1 << 19)
    config = ServerConfig(write_timeout_s=0.2)
    engine = ThreadedEngine(ready=ready)
    small = GatewayConfig(max_stream_buffer_bytes=64 << 10)
    with bounded_server(engine, config, gateway_config=small) as served:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        body = b'{"prompt": "hi", "stream": true, "max_tokens": 300000}'
        connection.sendall(COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        served.wait_until(lambda: bool(engine.streams))
        while engine.streams:
            engine.emit_soon(b"x" * 4000)
        served.wait_until(lambda: served.connections.num_stalled == 1)
        served.wait_until(lambda: served.gateway.num_live == 0 and served.connections.num_open == 0)
        connection.close()


@pytest.mark.parametrize("ends", ["half", "reset"])
def test_all_that_a_hundred_clients_hold_is_free_once_they_are_gone(ends: str) -> None:
    engine = ThreadedEngine()
    with bounded_server(engine, LIMITED) as served:
        clients = [dial(served) for _ in range(100)]
        body = b'{"prompt": ["a", "b"], "n": 2, "stream": true}'
        for client in clients:
            client.sendall(COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        served.wait_until(lambda: len(engine.streams) == 400)
        engine.emit_soon(b"x")  # in the middle of the answers
        for client in clients:
            if ends == "half":
                client.shutdown(socket.SHUT_WR)
            else:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
        served.wait_until(lambda: not engine.streams and not served.gateway.num_live)
        served.wait_until(lambda: served.connections.num_open == 0)
        for client in clients:
            client.close()


def test_hundreds_of_slow_clients_do_not_keep_others_waiting(timers: HeldTimers) -> None:
    with bounded_server(FakeEngine(script_text("ok")), LIMITED) as served:
        slow = [dial(served) for _ in range(300)]
        for connection in slow:
            connection.sendall(COMPLETION)
        assert all(serves(served) for _ in range(5))
        served.wait_until(lambda: len(timers.armed) == len(slow))
        timers.expire(LIMITED.header_timeout_s)
        assert served.connections.num_timed_out == len(slow)
        served.wait_until(lambda: served.connections.num_open == 0)
        for connection in slow:
            connection.close()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[BoundedServed]:
    config = ServerConfig(header_timeout_s=0.02, body_timeout_s=0.02)
    with bounded_server(FakeEngine(script_text("ok")), config) as served:
        yield served


PIECES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        b"Host: localhost\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"ffffffffffffffff\r\n",
        b"0\r\n\r\n",
        b'{"prompt": "a"}',
        b"\x00\xff",
        b"Name\r\n : x\r\n",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PIECES, st.binary(max_size=20)), max_size=12))
def test_bytes_of_every_kind_leave_the_server_standing(fuzzed: BoundedServed, pieces: list[bytes]) -> None:
    with dial(fuzzed) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        except OSError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 500")
    health = b"HTTP/1.1 408"
    for _ in range(50):  # a busy machine may take longer to send headers than this server waits
        with dial(fuzzed) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            health = read_all(connection)
        if not health.startswith(b"HTTP/1.1 408"):
            break
    assert health.startswith(b"HTTP/1.1 200")


async def test_requests_survive_a_crowd_of_idle_sockets() -> None:
    """A small crowd here; tests/e2e opens thousands against the real server process."""
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(max_websockets=150)) as served:
        url = f"ws://127.0.0.1:{served.port}/v1/stream"

        async def open_one() -> Any:
            try:
                return await connect(url, compression=None, ping_interval=None)
            except InvalidStatus as error:
                return error.response.status_code

        opened = await asyncio.gather(*(open_one() for _ in range(200)))
        assert opened.count(503) == 50
        assert await asyncio.to_thread(serves, served)
        for crowd in opened:
            if crowd != 503:
                await crowd.close()


def test_a_leaving_server_takes_requests_and_ends_each_connection_after_its_answer() -> None:
    with bounded_server(FakeEngine(script_text("fine"))) as served:
        with httpx.Client(base_url=served.url) as client:
            assert "connection" not in client.get("/ready").headers
            served.gateway.leave()
            served.limits.is_leaving = True
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert answer.json()["choices"][0]["text"] == "fine"


def test_pipelined_requests_whose_client_leaves_leave_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b'{"prompt": "hi", "max_tokens": 4}'
    engine = ThreadedEngine()
    with bounded_server(engine) as served:
        with dial(served) as connection:
            connection.sendall(2 * (COMPLETION + b"Content-Length: %d\r\n\r\n" % len(body) + body))
            served.wait_until(lambda: bool(engine.streams))
        served.wait_until(lambda: not served.connections.num_open and not served.gateway.num_live)
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
