"""Heads that a proxy in front of the server might read in another way than the server."""

from __future__ import annotations

import json
import socket

import pytest

from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.gateway.fake_engine import FakeEngine, script_text

LINE = b"POST /v1/completions HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"
BODY = b'{"prompt": "hi", "max_tokens": 4}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def answer_to(served: BoundedServed, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(sent)
        received = bytearray()
        while data := connection.recv(1 << 16):
            received += data
    return bytes(received)


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (LINE + HOST + HOST + LENGTH, "more than one header 'host'"),
        (LINE + HOST + b"Host: elsewhere\r\n" + LENGTH, "more than one header 'host'"),
        (LINE + LENGTH, "no header 'host'"),
        (LINE + b"Host: a b\r\n" + LENGTH, "does not hold a host"),
        (LINE + b"Host: a/admin\r\n" + LENGTH, "does not hold a host"),
        (LINE + b"Host: user@a\r\n" + LENGTH, "does not hold a host"),
        (LINE.replace(b"/v1", b"http://a/v1") + HOST + LENGTH, "one host in its first line"),
        (LINE.replace(b"/v1", b"http://u@localhost/v1") + HOST + LENGTH, "one host in its first line"),
        (LINE + HOST + b"Transfer-Encoding: gzip, chunked\r\n", "only supported transfer coding"),
        (
            LINE.replace(b"1.1", b"1.0") + HOST + b"Transfer-Encoding: chunked\r\n",
            "only supported transfer coding",
        ),
        (LINE.replace(b"1.1", b"2.0") + HOST + LENGTH, "HTTP/1.1"),
        (LINE + HOST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n" + LENGTH, "'authorization'"),
        (LINE + HOST + b"X-Api-Key: a\r\nX-Api-Key: b\r\n" + LENGTH, "'x-api-key'"),
    ],
)
def test_a_head_with_two_readings_is_refused(head: bytes, sentence: str) -> None:
    body = CHUNKS if b"Transfer-Encoding" in head else BODY
    before = LINE + HOST + LENGTH + b"\r\n" + BODY
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        first = answer_to(served, head + b"\r\n" + body)
        malformed = served.connections.num_malformed
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            connection.sendall(before)
            assert b"200 OK" in connection.recv(1 << 16)
            connection.sendall(head + b"\r\n" + body)
            later = connection.recv(1 << 16)
    for answer in (first, later):
        shown, _, error = answer.partition(b"\r\n\r\n")
        assert shown.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in shown
        assert sentence in json.loads(error)["error"]["message"]
    assert malformed == 1


@pytest.mark.parametrize(
    "head",
    [
        LINE + HOST + LENGTH,
        LINE + b"Host:\r\n" + LENGTH,
        LINE + b"Host: [::1]:8000\r\n" + LENGTH,
        LINE + b"Host: my_host.example:80\r\n" + LENGTH,
        LINE.replace(b"/v1", b"http://LOCALHOST/v1") + HOST + LENGTH,
        LINE.replace(b"1.1", b"1.0") + LENGTH,
        LINE + HOST + b"Transfer-Encoding: Chunked\r\n",
    ],
)
def test_plain_heads_are_taken(head: bytes) -> None:
    body = CHUNKS if b"Transfer-Encoding" in head else BODY
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        answer = answer_to(served, head + b"Connection: close\r\n\r\n" + body)
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 403"))  # an open server has no name but its address


@pytest.mark.parametrize("line", [LINE.replace(b"completions", b"nowhere"), b"PUT /v1/nowhere HTTP/1.1\r\n"])
def test_a_body_that_was_announced_and_not_asked_for_ends_the_connection(line: bytes) -> None:
    """The client may leave the body out, and what it sends next must not be read as the body."""
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served:
        answer = answer_to(served, line + HOST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n")
        asked = answer_to(
            served, LINE + HOST + b"Expect: 100-continue\r\nConnection: close\r\n" + LENGTH + b"\r\n" + BODY
        )
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert b"HTTP/1.1 200" in asked
