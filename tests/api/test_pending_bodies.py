"""Bodies and messages that begin to arrive and never end: they hold no more memory than the bounds allow."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket

import httpx
import pytest
from websockets.sync.client import connect

from penstock.api.http import parsing
from penstock.api.http.bodies import KEPT_FACTOR, PendingBodies
from penstock.core.errors import Overloaded, RateLimited
from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import BoundedServed, bounded_server
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import FakeEngine, script_text, until

BODY_BYTES = 1 << 20
CONFIG = ServerConfig(max_body_bytes=BODY_BYTES, max_pending_body_bytes=8 * BODY_BYTES)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES
TEXT_FRAME_WITHOUT_END = b"\x01\xff" + (BODY_BYTES - 1).to_bytes(8, "big") + bytes(4)


def dial(served: BoundedServed) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=60)


def status_of(connection: socket.socket) -> tuple[int, str]:
    head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_workspace_holds_a_quarter_and_all_workspaces_the_whole() -> None:
    pending = PendingBodies(1000, 10)
    pending.add("a", 250)
    with pytest.raises(RateLimited):
        pending.add("a", 1)
    for name in "bcd":
        pending.add(name, 250)
    with pytest.raises(Overloaded):
        pending.add("e", 1)
    pending.remove("a", 250)
    pending.add("e", 250)
    assert pending.num_bytes == 1000


def test_a_single_body_always_fits() -> None:
    pending = PendingBodies(1000, 5000)
    pending.add("a", 5000)
    with pytest.raises(RateLimited):
        pending.add("a", 1)


def test_bodies_that_do_not_end_are_refused_beyond_a_share_and_let_go_with_their_connections() -> None:
    with bounded_server(FakeEngine(script_text("ok")), CONFIG) as served:
        pending = served.limits.pending_bodies
        held = [dial(served) for _ in range(2)]
        for connection in held:
            connection.sendall(HEAD + bytes(BODY_BYTES - 1))
        served.wait_until(lambda: pending.num_bytes == 2 * (BODY_BYTES - 1))
        with dial(served) as one_more:
            one_more.sendall(HEAD + bytes(BODY_BYTES // 2))
            status, sentence = status_of(one_more)
        assert (status, "workspace" in sentence) == (429, True)
        for connection in held:
            connection.close()
        served.wait_until(lambda: pending.num_bytes == 0)
        body = b'{"prompt": "%b"}' % (b" " * (BODY_BYTES - 14))
        with dial(served) as later:
            later.sendall(HEAD + body)
            assert later.recv(1 << 16).startswith(b"HTTP/1.1 ")
        served.wait_until(lambda: pending.num_bytes == 0)


async def test_inflated_bodies_that_wait_for_their_turn_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = asyncio.Event()

    async def wait_for_turn(*_: object) -> None:
        await turn.wait()

    monkeypatch.setattr(parsing, "check_num_values_in_turns", wait_for_turn)
    body = gzip.compress(b'{"prompt": "hi", "ignored": "%b"}' % bytes(BODY_BYTES - 100).replace(b"\0", b"a"))
    assert len(body) < BODY_BYTES // 100
    limits = {"max_body_bytes": BODY_BYTES, "max_pending_body_bytes": 8 * BODY_BYTES}
    async with direct_client(FakeEngine(script_text("ok")), **limits) as client:

        async def post() -> int:
            answer = await client.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
            return answer.status_code

        posts = [asyncio.create_task(post()) for _ in range(3)]
        done, held = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [429]
        turn.set()
        assert await asyncio.gather(*held) == [200, 200]
        assert await post() == 200, "nothing counts any more"


async def test_a_large_body_counts_until_its_request_ends() -> None:
    """What a request says is in memory for as long as its answer waits, also where the engine needs little of it."""
    engine = FakeEngine()
    body = b'{"prompt": "hi", "ignored": "%b"}' % (b"a" * (BODY_BYTES - 100))
    async with direct_client(engine, max_body_bytes=BODY_BYTES, max_pending_body_bytes=1024) as client:

        async def begin() -> asyncio.Task[httpx.Response]:
            num_before = len(engine.added)
            task = asyncio.create_task(client.post("/v1/completions", content=body))
            await until(lambda: task.done() or len(engine.added) > num_before)
            return task

        begun = [await begin() for _ in range(KEPT_FACTOR - 1)]
        assert not any(task.done() for task in begun)
        assert (await (await begin())).status_code == 429
        assert (await client.get("/v1/models")).status_code == 200
        begun[0].cancel()
        await asyncio.wait(begun[:1])
        begun.append(await begin())
        assert not begun[-1].done(), "there is room again"
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)


def test_a_body_must_be_whole_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_BODY_S", 0.2)
    with bounded_server(FakeEngine(script_text("ok")), CONFIG) as served, dial(served) as connection:
        connection.sendall(HEAD + b" ")
        status, sentence = status_of(connection)
        served.wait_until(lambda: served.limits.pending_bodies.num_bytes == 0)
    assert (status, "in time" in sentence or "within" in sentence) == (408, True)


def test_messages_that_do_not_end_count_as_bodies_do() -> None:
    with bounded_server(FakeEngine(script_text("ok")), CONFIG) as served:
        pending = served.limits.pending_bodies
        url = f"ws://127.0.0.1:{served.port}/v1/stream"
        with connect(url, compression=None) as first, connect(url, compression=None) as second:
            for client in (first, second):
                client.socket.sendall(TEXT_FRAME_WITHOUT_END + bytes(BODY_BYTES - 2))
            served.wait_until(lambda: pending.num_bytes > 2 * (BODY_BYTES - 100))
            with connect(url, compression=None) as third:
                third.socket.sendall(TEXT_FRAME_WITHOUT_END + bytes(BODY_BYTES - 2))
                served.wait_until(lambda: served.connections.num_open == 2)
            for client in (first, second):
                client.socket.shutdown(socket.SHUT_RDWR)
            served.wait_until(lambda: pending.num_bytes == 0)


def test_the_fragments_of_a_message_count_until_it_is_whole() -> None:
    with bounded_server(FakeEngine(script_text("ok")), CONFIG) as served:
        pending = served.limits.pending_bodies
        with connect(f"ws://127.0.0.1:{served.port}/v1/stream", compression=None) as client:
            client.socket.sendall(b"\x01\x81" + bytes(4) + b"x")
            client.socket.sendall((b"\x00\x81" + bytes(4) + b"x") * 1000)
            served.wait_until(lambda: pending.num_bytes > 50_000)
            client.socket.sendall(b"\x80\x81" + bytes(4) + b"x")
            served.wait_until(lambda: pending.num_bytes == 0)
            assert "error" in client.recv(timeout=60)
