"""The HTTP client against servers that behave in every way: real sockets, bytes as a test scripts them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from penstock.cluster.external import connection, http
from penstock.cluster.external.connection import HEAD_TIMEOUT_S, AnswerBroken, ConnectFailed
from penstock.cluster.external.http import Address, HttpClient
from penstock.core.errors import ConfigError
from tests.certificates import self_signed
from tests.loop_time import pass_time, settle

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Answers the n-th request with the n-th piece of its script, then closes the connection."""

    def __init__(self, *answers: bytes, closes_after: int = 1000) -> None:
        self.answers = list(answers)
        self.closes_after = closes_after
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_left_by_client = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        for _ in range(self.closes_after):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                self.num_left_by_client += 1
                break
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            self.requests.append(head + await reader.readexactly(length))
            if not self.answers:
                break
            writer.write(self.answers.pop(0))
        writer.close()


@asynccontextmanager
async def client_of(server: ScriptedServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    client = HttpClient(server.url, {"authorization": "Bearer secret"})
    try:
        async with asyncio.timeout(240):
            yield client
    finally:
        await client.close()
        listening.close()


async def ask(client: HttpClient, body: bytes = b"{}") -> tuple[int, bytes]:
    answer = await client.send("POST", "/v1/x", body)
    try:
        return answer.status, await answer.read_all(1 << 20)
    finally:
        answer.release()


async def test_connections_are_used_again() -> None:
    server = ScriptedServer(OK, OK, b"HTTP/1.1 503 No\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n", OK)
    async with client_of(server) as client:
        assert [await ask(client, b'{"a":1}') for _ in range(2)] == [(200, b"hi")] * 2
        assert await ask(client) == (503, b"")
        assert await client.get("/metrics", timeout_s=5, max_bytes=10) == (200, b"hi")
    assert server.num_connections == 1
    assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer secret\r\n" in server.requests[0]
    assert server.requests[0].endswith(b'content-length: 7\r\n\r\n{"a":1}')


def whole(body: bytes, *, length: bytes | None = None, more: bytes = b"") -> bytes:
    length = b"%d" % len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nDate: now\r\nContent-Length: " + length + b"\r\n" + more + b"\r\n" + body


async def test_a_head_that_comes_again_needs_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    complete = connection.Answer.on_headers_complete

    def on_headers_complete(answer: connection.Answer) -> None:
        parsed.append(len(parsed))
        complete(answer)

    monkeypatch.setattr(connection.Answer, "on_headers_complete", on_headers_complete)
    bodies = [b"a" * 9, b"b" * 10, b"c" * 100_000, b"d" * 3]
    async with client_of(ScriptedServer(*map(whole, bodies))) as client:
        for body in bodies:
            answer = await client.send("POST", "/v1/x", b"{}")
            assert answer.headers == {b"date": b"now", b"content-length": b"%d" % len(body)}
            assert await answer.read_all(1 << 20) == body
            answer.release()
    assert len(parsed) in (1, 2)  # the long one may come in several pieces


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (whole(b"hi", more=b"x: y\r\n"), b"hi"),
        (whole(b"hi", length=b"1"), b"h"),
        (whole(b"hi") + whole(b"ho"), b"hi"),
        (whole(b""), b""),
        (whole(b"hi", length=b"3"), None),
        (whole(b"hi", length=b"+2"), None),
        (whole(b"hi", length=b"2\r\nContent-Length: 3"), None),
        (whole(b"2\r\nhi\r\n0\r\n\r\n", length=b"12", more=b"transfer-encoding: chunked\r\n"), None),
    ],
)
async def test_a_head_that_almost_comes_again_is_left_to_the_parser(
    answer: bytes, body: bytes | None
) -> None:
    server = ScriptedServer(whole(b"ok"), answer, OK, closes_after=2)
    async with client_of(server) as client:
        assert await ask(client) == (200, b"ok")
        if body is None:
            with pytest.raises(AnswerBroken):
                await ask(client)
        else:
            assert await ask(client) == (200, body)
        assert await ask(client) == (200, b"hi")


def test_on_the_loop_that_serves() -> None:
    """Whose transports are of other types."""

    async def exchange() -> tuple[int, bytes]:
        async with client_of(ScriptedServer(OK)) as client:
            return await ask(client)

    assert uvloop.run(exchange()) == (200, b"hi")


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\n\r\n", b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 204 Nothing\r\n\r\n", b""),
    ],
)
async def test_kinds_of_answers(answer: bytes, body: bytes) -> None:
    async with client_of(ScriptedServer(answer)) as client:
        assert (await ask(client))[1] == body


async def test_an_answer_may_end_with_its_connection() -> None:
    server = ScriptedServer(b"HTTP/1.1 200 OK\r\n\r\nhi", closes_after=1)
    async with client_of(server) as client:
        assert await ask(client) == (200, b"hi")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switch\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"\r\n", "not HTTP|too large"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, "too large"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", "closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi", "encoding"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000, "too large"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx: " + b"y" * 300_000,
            "no body",
        ),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=" + b"y" * 300_000, "no body"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, "too large"),
        (b"HTTP/1.1 200 OK\r\nconte", "closed"),
        (b"", "closed"),
    ],
)
async def test_answers_that_are_none(answer: bytes, problem: str) -> None:
    server = ScriptedServer(answer, closes_after=1)
    async with client_of(server) as client:
        with pytest.raises(AnswerBroken, match=problem):
            await ask(client)
        server.answers, server.closes_after = [OK], 1000
        assert await ask(client) == (200, b"hi"), "over a connection of its own"
    assert server.num_connections == 2


async def test_a_second_answer_is_nobodys() -> None:
    """What a server sends unasked must not become the answer to the next request."""
    server = ScriptedServer(OK + OK.replace(b"hi", b"no"), OK)
    async with client_of(server) as client:
        assert await ask(client) == (200, b"hi")
        assert await ask(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_what_comes_between_requests_ends_the_connection() -> None:
    class Chatty(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writer = writer
            await super().serve(reader, writer)

    server = Chatty(OK, OK)
    async with client_of(server) as client:
        await ask(client)
        server.writer.write(OK.replace(b"hi", b"no"))
        while not server.num_left_by_client:
            await asyncio.sleep(0.001)
        assert await ask(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_an_answer_before_its_request_was_sent_is_nobodys() -> None:
    """Requests leave at the end of a turn. What came before is no answer to them."""
    server = ScriptedServer(OK, OK)
    async with client_of(server) as client:
        first = await client.send("POST", "/v1/x", b"1")
        assert await first.read_all(10) == b"hi"
        first.release()
        asking = asyncio.ensure_future(ask(client, b"2"))
        asyncio.get_running_loop().call_soon(first.data_received, OK.replace(b"hi", b"no"))
        assert await asking == (200, b"hi")
    assert server.num_connections == 2
    assert [request[-1:] for request in server.requests] == [b"1", b"2"]


async def test_a_kept_connection_that_the_server_closes_costs_no_request() -> None:
    server = ScriptedServer(OK, OK, OK, closes_after=1)
    async with client_of(server) as client:
        for _ in range(3):
            assert await ask(client) == (200, b"hi")
    assert server.num_connections == 3


async def test_silence_ends_an_answer() -> None:
    part = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"
    async with client_of(ScriptedServer(part, part)) as client:
        answer = await client.send("POST", "/", b"{}", silence_s=50.0)
        pass_time(50.0)
        with pytest.raises(AnswerBroken, match="silent"):
            await answer.deliver(lambda piece: None)
        answer.release()
        with pytest.raises(AnswerBroken, match="in time"):
            await client.get("/", timeout_s=0.01, max_bytes=10)


async def test_a_head_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is a sign of life, but no head."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)

    class Trickling(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for byte in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)

    async with client_of(Trickling()) as client:
        with pytest.raises(AnswerBroken, match="silent"):
            await ask(client)


async def test_a_body_may_be_slower_than_a_head() -> None:
    may_end = asyncio.Event()

    class Slow(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-")
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(b"length: 2\r\n\r\nh")
            await may_end.wait()
            writer.write(b"i")

    async with client_of(Slow()) as client:
        answer = await client.send("POST", "/v1/x", b"{}")
        pass_time(1.5 * HEAD_TIMEOUT_S)
        await settle()  # the timer looks, and finds that more silence is allowed
        may_end.set()
        assert await answer.read_all(10) == b"hi"
        answer.release()


async def test_a_connection_that_nobody_uses_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "IDLE_TIMEOUT_S", 0.05)
    server = ScriptedServer(OK, OK)
    async with client_of(server) as client:
        assert await ask(client) == (200, b"hi")
        while not server.num_left_by_client:
            await asyncio.sleep(0.001)
        assert await ask(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_the_silence_of_an_earlier_request_does_not_bound_a_later_one() -> None:
    """A connection has one timer, which looks at what the request of the moment allows."""
    part = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"
    async with client_of(ScriptedServer(OK, part)) as client:
        first = await client.send("POST", "/", b"{}", silence_s=600)
        assert await first.read_all(10) == b"hi"
        first.release()
        second = await client.send("POST", "/", b"{}", silence_s=50.0)
        pass_time(50.0)
        with pytest.raises(AnswerBroken, match="silent"):
            await second.deliver(lambda piece: None)
        second.release()


async def test_cancelling_closes_the_connection() -> None:
    server = ScriptedServer(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
    async with client_of(server) as client:
        asking = asyncio.create_task(ask(client))
        while not server.requests:
            await asyncio.sleep(0.001)
        asking.cancel()
        while not server.num_left_by_client:
            await asyncio.sleep(0.001)


async def test_what_a_reader_raises_is_raised_where_it_waits() -> None:
    def refuse(piece: bytes) -> None:
        raise KeyError(piece)

    async with client_of(ScriptedServer(OK)) as client:
        answer = await client.send("POST", "/", b"{}")
        with pytest.raises(KeyError):
            await answer.deliver(refuse)
        answer.release()
        assert not answer.is_open


async def test_nobody_listens() -> None:
    client = HttpClient("http://127.0.0.1:1", {})
    with pytest.raises(ConnectFailed, match=r"."):
        await client.send("POST", "/", b"{}")
    with pytest.raises(ConnectFailed):
        await HttpClient(f"http://{'x' * 70}.invalid", {}).send("POST", "/", b"{}")


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_IDLE_CONNECTIONS", 2)
    server = ScriptedServer(*[OK] * 4)
    async with client_of(server) as client:
        answers = [await client.send("POST", "/", b"{}") for _ in range(4)]
        for answer in answers:
            await answer.read_all(10)
            answer.release()
        assert [answer.is_open for answer in answers] == [True, True, False, False]


async def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    async with client_of(ScriptedServer(OK), tls) as client:
        with pytest.raises(ConnectFailed, match="certificate"):
            await ask(client)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with client_of(ScriptedServer(OK), tls) as client:
        assert await ask(client) == (200, b"hi")


def test_addresses() -> None:
    address = Address.of("https://me:p%40ss@[::1]:8443/base/")
    assert (address.host, address.port, address.authority, address.path) == (
        "::1",
        8443,
        "[::1]:8443",
        "/base",
    )
    assert address.credentials == "Basic bWU6cEBzcw=="
    assert Address.of("https://host").port == 443
    for url in (
        "http://host:99999",
        "http://host/a b",
        "http://host\r\nx: y",
        "http://",
        "ftp://host",
        "host",
    ):
        with pytest.raises(ConfigError):
            Address.of(url)
    for headers in ({"authorization": "Bearer a\r\nx: y"}, {"api-key: x\r\nhost": "a"}, {"": "a"}):
        with pytest.raises(ConfigError):
            HttpClient("http://host", dict(headers))
