"""Servers whose answers could be cut at other places than they meant, or taken for the answers to other requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop

from penstock.cluster.external import connection
from penstock.cluster.external import server as external_server
from penstock.cluster.external.connection import AnswerBroken
from penstock.cluster.external.http import HttpClient
from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import EngineUnavailable
from tests.cluster.external.test_http import OK, ScriptedServer, ask, client_of
from tests.cluster.external.test_pool import ask as ask_pool
from tests.loop_time import pass_time, settle

POISON = OK.replace(b"hi", b"no")
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"2\r\nhi\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        # Interim answers have no body: one that has would stand before the body of the answer.
        (b"HTTP/1.1 110 X\r\ncontent-length: 2\r\n\r\nXX" + OK, "a body that no answer has"),
        (b"HTTP/1.1 110 X\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED + OK, "a body that no answer has"),
        (b"HTTP/1.1 103 X\r\ncontent-length: 2\r\n\r\nXX" + OK, "a body that no answer has"),
        (b"HTTP/1.1 050 X\r\n\r\n" + OK, "a body that no answer has"),
        (b"HTTP/1.1 101 X\r\n\r\n" + OK, "not HTTP"),
        # One coding, once.
        (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED, "encoding"),
        (HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKED, "encoding"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED, "encoding"),
        (HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED, "encoding"),
        (HEAD + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED, "encoding"),
        (HEAD + b"transfer-encoding : chunked\r\n\r\n" + CHUNKED, "not HTTP"),
        (HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKED, "not HTTP"),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi", "encoding"),
        # One length, in digits.
        (HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length: 2, 2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length: +2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length: 0x2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length: 1_0\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length: 18446744073709551618\r\n\r\nhi", "not HTTP"),
        (HEAD + b"content-length : 2\r\n\r\nhi", "not HTTP"),
        # Chunks.
        (HEAD + b"transfer-encoding: chunked\r\n\r\n+" + CHUNKED, "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0x" + CHUNKED, "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0_" + CHUNKED, "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2 \r\nhi\r\n0\r\n\r\n", "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1000000000000000" + CHUNKED, "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2;x=\nhi\r\n0\r\n\r\n", "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\nhi\r\n0\r\n\r\n", "not HTTP"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\ncontent-length: 9\r\n\r\n", "not HTTP"),
        # Lines.
        (HEAD + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"x: a\rcontent-length: 5\r\ncontent-length: 2\r\n\r\nhi", "not HTTP"),
        (HEAD + b"x: a\0b\r\ncontent-length: 2\r\n\r\nhi", "not HTTP"),
        (OK.replace(b"\r\n", b"\n"), "not HTTP"),
    ],
)
async def test_answers_that_could_be_read_in_two_ways(answer: bytes, problem: str) -> None:
    server = ScriptedServer(answer, OK)
    async with client_of(server) as client:
        with pytest.raises(AnswerBroken, match=problem):
            await ask(client)
        assert await ask(client) == (200, b"hi"), "over a connection of its own"
    assert server.num_connections == 2


@pytest.mark.parametrize("behind", [POISON, b"x", b"\x16\x03"])
@pytest.mark.parametrize(
    "head", [b"content-length: 2\r\n\r\nh", b"connection: close\r\ncontent-length: 2\r\n\r\nh"]
)
async def test_what_stands_behind_an_answer_does_not_shorten_it(head: bytes, behind: bytes) -> None:
    """The last piece of the body may come together with bytes that are nobody's."""

    class InTwoPieces(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(HEAD + head)
            await may_end.wait()
            writer.write(b"i" + behind)

    may_end = asyncio.Event()
    pieces: list[bytes] = []

    def take(piece: bytes) -> None:
        pieces.append(piece)
        may_end.set()

    async with client_of(InTwoPieces()) as client:
        answer = await client.send("POST", "/v1/x", b"{}")
        await answer.deliver(take)
        answer.release()
        assert b"".join(pieces) == b"hi"
        assert not answer.is_open


@pytest.mark.parametrize("status", [b"204 No", b"304 No"])
@pytest.mark.parametrize(
    "framing",
    [b"transfer-encoding: chunked", b"content-length: %d" % len(POISON), b"content-length: 0", b"x: y"],
)
async def test_answers_without_a_body_end_their_connection(status: bytes, framing: bytes) -> None:
    """A server that sends a body all the same would have it read as the next answer."""
    server = ScriptedServer(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n", OK)
    async with client_of(server) as client:
        assert (await ask(client))[1] == b""
        assert await ask(client) == (200, b"hi")
    assert server.num_connections == 2


async def test_trailers_change_no_header() -> None:
    trailers = (
        b"transfer-encoding: chunked\r\nretry-after: 3\r\n\r\n2\r\nhi\r\n0\r\nretry-after: 86400\r\n\r\n"
    )
    async with client_of(ScriptedServer(b"HTTP/1.1 429 No\r\n" + trailers)) as client:
        answer = await client.send("POST", "/v1/x", b"{}")
        assert await answer.read_all(10) == b"hi"
        assert answer.headers[b"retry-after"] == b"3"
        answer.release()


class Trickling(ScriptedServer):
    """Sends a byte of a body whenever it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_to_send = asyncio.Semaphore(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(HEAD + b"content-length: 100\r\n\r\n")
        while not writer.is_closing():
            await self.bytes_to_send.acquire()
            writer.write(b" ")


@pytest.mark.parametrize("is_read_whole", [True, False])
async def test_a_body_that_trickles_is_given_up_where_nothing_is_shown_of_it(is_read_whole: bool) -> None:
    server = Trickling()
    async with client_of(server) as client:
        answer = await client.send("POST", "/v1/x", b"{}", silence_s=50.0)
        pieces: list[bytes] = []
        whole, piecewise = answer.read_all(1000), answer.deliver(pieces.append)
        (piecewise if is_read_whole else whole).close()
        reading: asyncio.Task[object] = asyncio.create_task(whole if is_read_whole else piecewise)
        await settle()
        for _ in range(2):
            pass_time(30.0)
            server.bytes_to_send.release()
            await settle()
        assert reading.done() == is_read_whole
        if is_read_whole:
            with pytest.raises(AnswerBroken, match="silent for too long"):
                await reading
        else:
            assert len(pieces) == 3
            reading.cancel()
        answer.release()


class BlockingServer:
    """Whose writes arrive while the client's event loop does nothing."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections: list[socket.socket] = []

    async def accept(self) -> socket.socket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listening)
        connection.setblocking(False)
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        for each in (*self.connections, self._listening):
            each.close()


@asynccontextmanager
async def blocking_server() -> AsyncIterator[tuple[BlockingServer, HttpClient]]:
    server = BlockingServer()
    client = HttpClient(server.url, {})
    try:
        async with asyncio.timeout(240):
            yield server, client
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("pushed", [POISON, b""], ids=["an answer", "the end"])
def test_an_answer_that_waits_unread_is_nobodys(new_loop: object, pushed: bytes) -> None:
    """What a server pushed after an answer may have arrived before the event loop looks again."""

    async def exchange() -> None:
        loop = asyncio.get_running_loop()
        async with blocking_server() as (server, client):
            asking = asyncio.create_task(ask(client))
            connection = await server.accept()
            await loop.sock_recv(connection, 1 << 16)
            await loop.sock_sendall(connection, OK)
            assert await asking == (200, b"hi")
            if pushed:
                connection.setblocking(True)
                connection.sendall(pushed)
            else:
                connection.close()
            asking = asyncio.create_task(ask(client))  # in the same turn of the event loop
            connection = await server.accept()
            await loop.sock_recv(connection, 1 << 16)
            await loop.sock_sendall(connection, OK)
            assert await asking == (200, b"hi")

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        runner.run(exchange())


async def test_a_request_that_was_not_read_is_not_followed_by_another() -> None:
    """A server that answers early may read the rest of a body as the next request."""
    body = b"x" * (32 << 20)
    async with blocking_server() as (server, client):
        asking = asyncio.create_task(ask(client, body))
        connection = await server.accept()
        loop = asyncio.get_running_loop()
        await loop.sock_recv(connection, 100)
        await loop.sock_sendall(connection, OK.replace(b"200 OK", b"413 Too large"))
        assert await asking == (413, b"hi")
        asking = asyncio.create_task(ask(client, b"{}"))
        connection = await server.accept()
        assert (await loop.sock_recv(connection, 1 << 16)).startswith(b"POST /v1/x ")
        await loop.sock_sendall(connection, OK)
        assert await asking == (200, b"hi")


async def test_a_request_that_makes_a_server_hang_up_is_sent_twice_at_most() -> None:
    """Each connection that is kept could have been closed just now, but a request that ends a server is not to be
    tried over all of them."""

    class Fragile(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            while True:
                try:
                    request = await reader.readuntil(b"}")
                except (asyncio.IncompleteReadError, ConnectionError):
                    break
                self.requests.append(request)
                if b"poison" in request:
                    break
                writer.write(OK)
            writer.close()

    server = Fragile()
    async with client_of(server) as client:
        answers = [await client.send("POST", "/v1/x", b"{}") for _ in range(8)]
        for answer in answers:
            assert await answer.read_all(10) == b"hi"
            answer.release()
        with pytest.raises(AnswerBroken):
            await ask(client, b"{poison}")
        assert await ask(client) == (200, b"hi")
    assert sum(b"poison" in request for request in server.requests) == 2


def streaming(*pieces: bytes) -> tuple[ScriptedServer, asyncio.Event]:
    """A server that lists a model, and sends these pieces as the beginning of a stream that does not end."""
    is_left = asyncio.Event()

    class Endless(ScriptedServer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"POST" in head:
                    break
                page = b'{"data": [{"id": "theirs"}]}'
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(page) + page)
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            try:
                for piece in pieces:
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                while await reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
            is_left.set()
            writer.close()

    return Endless(), is_left


@asynccontextmanager
async def pool_before(server: ScriptedServer) -> AsyncIterator[ExternalPool]:
    async with client_of(server):
        pool = ExternalPool([ExternalServer(ExternalServerConfig(url=server.url))])
        await pool.probe()
        try:
            yield pool
        finally:
            await pool.close()


def said(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


@pytest.mark.parametrize("behind", [(), (b"data: {}\n\n",) * 3, (b"data: " + b"x" * 100_000,)])
async def test_a_stream_that_goes_on_after_its_end(
    behind: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event ends the answer; the connection is given up soon after."""
    monkeypatch.setattr(connection, "END_TIMEOUT_S", 0.05)
    server, is_left = streaming(said("hi"), said("", "stop"), b"data: [DONE]\n\n", *behind)
    async with pool_before(server) as pool:
        assert await ask_pool(pool) == "hi"
        await is_left.wait()


@pytest.mark.parametrize("nothing", [b": ping\n\n", b"data: {}\n\n", b"\n"])
async def test_a_stream_that_says_nothing_is_given_up(
    nothing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_server, "MAX_EMPTY_BYTES", 1 << 16)
    server, is_left = streaming(said("hi"), *[nothing * 100] * 20_000)
    async with pool_before(server) as pool:
        with pytest.raises(EngineUnavailable):
            await ask_pool(pool)
        await is_left.wait()


async def test_a_long_stream_may_say_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_server, "MAX_EMPTY_BYTES", 1 << 16)
    pieces = [said("a"), b": ping\n\n" * 4000] * 40
    server, _ = streaming(*pieces, said("", "stop"), b"data: [DONE]\n\n")
    async with pool_before(server) as pool:
        assert await ask_pool(pool) == "a" * 40
