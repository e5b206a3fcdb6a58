"""Offers to go on in another protocol: h2c is ignored and the request answered; HTTP/2 at once is refused cleanly."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.api.test_hostile_clients import dial, read_all, serves
from tests.gateway.fake_engine import FakeEngine, script_text

BODY = json.dumps({"prompt": "hi", "max_tokens": 4}).encode()
# As the JDK's HttpClient and curl --http2 send it.
OFFER = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CURL = shutil.which("curl")
HAS_HTTP2 = CURL is not None and b"HTTP2" in subprocess.run([CURL, "--version"], capture_output=True).stdout


@pytest.fixture(scope="module")
def served() -> Iterator[BoundedServed]:
    with bounded_server(FakeEngine(script_text("fine"))) as server:
        yield server


def read_answer(connection: socket.socket) -> dict[str, object]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), received
    assert b"upgrade" not in head.lower()
    (length,) = (int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(1 << 16)
    answer: dict[str, object] = json.loads(body)
    return answer


@pytest.mark.parametrize(
    "pieces",
    [
        [OFFER + LENGTH + b"\r\n" + BODY],
        [OFFER + LENGTH + b"\r\n", BODY],
        [OFFER[:50], OFFER[50:] + LENGTH, b"\r\n" + BODY[:5], BODY[5:]],
        [OFFER + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"],
        [OFFER.replace(b"h2c", b"TLS/1.0") + LENGTH + b"\r\n" + BODY],
    ],
)
def test_an_offer_is_ignored_and_the_body_is_read(served: BoundedServed, pieces: list[bytes]) -> None:
    with dial(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):  # the connection goes on
            for piece in pieces:
                connection.sendall(piece)
            assert read_answer(connection)["object"] == "text_completion"


def test_two_offers_in_one_piece(served: BoundedServed) -> None:
    with dial(served) as connection:
        connection.sendall((OFFER + LENGTH + b"\r\n" + BODY) * 2)
        received = b""
        while received.count(b'"text_completion"') < 2:
            received += connection.recv(1 << 16)
        assert received.count(b"HTTP/1.1 200 ") == 2


def test_bounds_hold_for_offers_too() -> None:
    with bounded_server(FakeEngine(), ServerConfig(max_header_bytes=2048, body_timeout_s=0.2)) as served:
        with dial(served) as connection:
            connection.sendall(OFFER + b"X-Large: " + b"x" * 3000 + b"\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 431 ")
        with dial(served) as connection:
            connection.sendall(OFFER + LENGTH + b"\r\n" + BODY[:3])
            assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_connect_is_refused(served: BoundedServed) -> None:
    with dial(served) as connection:
        connection.sendall(
            b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n"
        )
        assert not read_all(connection).startswith(b"HTTP/1.1 2")
    assert serves(served)


def test_http2_from_the_start_is_told_to_use_http_1(served: BoundedServed) -> None:
    with dial(served) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        settings, goaway = bytes.fromhex("000000040000000000"), bytes.fromhex("00000807")
        answer = read_all(connection)
    assert answer.startswith(settings + goaway)
    assert answer[-4:] == bytes.fromhex("0000000d"), "HTTP_1_1_REQUIRED"
    assert serves(served)


@pytest.mark.skipif(not HAS_HTTP2, reason="curl has no HTTP/2 here")
@pytest.mark.parametrize("option", ["--http2", "--http2-prior-knowledge"])
def test_curl(served: BoundedServed, option: str) -> None:
    command = ["curl", "-sS", "--max-time", "60", option, f"{served.url}/v1/completions", "-d", BODY.decode()]
    done = subprocess.run(command, capture_output=True, timeout=600)
    if option == "--http2":
        assert json.loads(done.stdout)["object"] == "text_completion"
    else:
        assert done.returncode != 0 or json.loads(done.stdout)["object"] == "text_completion"
        assert done.returncode != 28, "curl does not wait for its time limit"


WEBSOCKET = (
    b" /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


def test_a_post_that_offers_a_websocket_is_a_post(served: BoundedServed) -> None:
    offer = b"POST" + WEBSOCKET.replace(b"/v1/stream", b"/v1/completions")
    with dial(served) as connection:
        for _ in range(2):
            connection.sendall(offer + LENGTH + b"\r\n" + BODY)
            assert read_answer(connection)["object"] == "text_completion"


@pytest.mark.parametrize(
    "head",
    [
        b"GET" + WEBSOCKET + LENGTH,
        b"GET" + WEBSOCKET + b"Transfer-Encoding: chunked\r\n",
    ],
)
def test_a_handshake_that_is_none_is_refused_and_not_kept_waiting(served: BoundedServed, head: bytes) -> None:
    with dial(served) as connection:
        connection.sendall(head + b"\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    served.wait_until(lambda: served.connections.num_open == 0)
