"""A head that was parsed before is recognized only where the parser would read the same request."""

from __future__ import annotations

import socket

import pytest

from penstock.api.http.heads import KnownHead
from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import bounded_server
from tests.gateway.fake_engine import FakeEngine, script_text

START = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEADERS = [(b"host", b"localhost"), (b"content-length", b"2"), (b"x-more", b"1")]
HEAD = START + b"Content-Length: 2\r\nX-More: 1\r\n\r\n"


def known(data: bytes = HEAD + b"{}", headers: list[tuple[bytes, bytes]] = HEADERS) -> KnownHead | None:
    return KnownHead.of(data, b"/v1/completions", headers)


@pytest.mark.parametrize("length", [1, 2, 100])
def test_the_same_head_with_another_length_is_known(length: int) -> None:
    head, body = known(), b"x" * length
    assert head is not None
    found = head.request(HEAD.replace(b": 2", b": %d" % length) + body)
    assert found is not None
    assert dict(found[0]) == dict(HEADERS) | {b"content-length": b"%d" % length}
    assert found[1] == body


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"{",
        HEAD + b"{} ",
        HEAD + b"{}" + HEAD + b"{}",
        HEAD[:-2],
        HEAD[:-20],
        HEAD.replace(b": 2", b": +2") + b"{}",
        HEAD.replace(b": 2", b": 2 ") + b"{}",
        HEAD.replace(b": 2", b": ") + b"{}",
        HEAD.replace(b": 2", b": 0"),
        HEAD.replace(b": 2", b": " + b"0" * 20 + b"2") + b"{}",
        HEAD.replace(b"X-More: 1", b"X-More: 2") + b"{}",
        HEAD.replace(b"localhost", b"elsewhere") + b"{}",
        HEAD.replace(b"X-More: 1\r\n", b"X-More: 1\r\nX-Other: 1\r\n") + b"{}",
        HEAD.replace(b"\r\n\r\n", b"\n\r\n") + b"{}",
    ],
)
def test_anything_else_is_left_to_the_parser(data: bytes) -> None:
    head = known()
    assert head is not None
    assert head.request(data) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"upgrade", b"h2c"),
        (b"trailer", b"x"),
        (b"connection", b"close"),
        (b"host", b"localhost"),
    ],
)
def test_a_head_that_asks_for_more_is_not_kept(name: bytes, value: bytes) -> None:
    line = b"%b: %b\r\n" % (name, value)
    assert known(START + line + b"Content-Length: 2\r\n\r\n{}", [*HEADERS, (name, value)]) is None


def test_several_requests_at_once_are_no_known_head() -> None:
    assert known(2 * (HEAD + b"{}")) is None


def test_bytes_that_look_like_the_length_are_not_taken_for_it() -> None:
    length_in_the_target = HEAD.replace(b"/v1/completions", b"/v1/completions?strength: 2")
    assert known(length_in_the_target + b"{}") is None
    other = (b"x-length", b"2")
    before = START + b"X-Length: 2\r\nContent-Length: 2\r\n\r\n{}"
    assert known(before, [*HEADERS[:2], other]) is None


def test_requests_of_one_connection_are_answered_alike() -> None:
    bodies = [b'{"prompt": "%b", "max_tokens": 4}' % (b"a" * size) for size in (1, 1, 90, 1)]
    requests = [HEAD.replace(b": 2", b": %d" % len(body)) + body for body in bodies]
    requests.append(requests[0].replace(b"X-More: 1", b"Connection: close"))
    with (
        bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection,
    ):
        answers = []
        for request in requests:
            connection.sendall(request)
            answers.append(connection.recv(1 << 16))
        assert connection.recv(1) == b""
    assert [answer.partition(b"\r\n")[0] for answer in answers] == [b"HTTP/1.1 200 OK"] * len(requests)
    assert len({answer.partition(b'"choices"')[2] for answer in answers[:2]}) == 1
