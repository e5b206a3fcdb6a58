"""Connections and WebSockets that workspaces share."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Principal
from penstock.gateway.tenants.authenticator import Authenticator
from tests.api.bounded_server import BoundedServed, ThreadedEngine, bounded_server
from tests.api.test_hostile_clients import COMPLETION, dial, read_all, serves, status_and_code
from tests.gateway.fake_engine import FakeEngine, script_text


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is the name of its workspace."""

    async def identify(authenticator: Authenticator, credential: str | None) -> Principal:
        return Principal(workspace_id=credential or "", key_id="key")

    monkeypatch.setattr(Authenticator, "identify", identify)


def ask(served: BoundedServed, key: str) -> socket.socket:
    connection = dial(served)
    body = b'{"prompt": "hi", "max_tokens": 4}'
    head = b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(body))
    connection.sendall(COMPLETION + head + body)
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(1 << 16).split()[1])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/compl",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "a request that was answered", "half a body that was refused"],
)
def test_connections_on_which_nothing_is_answered_make_room(sent: bytes) -> None:
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(max_connections=3)) as served:
        held = [dial(served) for _ in range(3)]
        for connection in held:
            connection.sendall(sent)
            if b"\r\n\r\n" in sent:
                assert status_of(connection) in (200, 404)
        served.wait_until(lambda: served.connections.num_open == 3)
        assert serves(served)
        assert read_all(held[0]) == b"", "it was idle the longest"
        assert served.connections.num_displaced == 1
        assert served.connections.num_refused == 0


@pytest.mark.usefixtures("workspaces")
def test_a_workspace_leaves_connections_to_others() -> None:
    engine = ThreadedEngine()
    with bounded_server(engine, ServerConfig(max_connections=8)) as served:
        greedy = [ask(served, "greedy") for _ in range(6)]
        served.wait_until(lambda: len(engine.added) == 6)
        refused = ask(served, "greedy")
        assert status_of(refused) == 429
        late = ask(served, "late")
        served.wait_until(lambda: len(engine.added) == 7)
        for connection in greedy[:3]:
            connection.close()
        served.wait_until(lambda: served.gateway.num_live == 4)
        again = ask(served, "greedy")
        served.wait_until(lambda: len(engine.added) == 8)
        for connection in (*greedy, late, again, refused):
            connection.close()
        served.wait_until(lambda: served.connections.num_open == 0)
        assert served.limits.places.shares.used == 0
        assert not served.limits.places.resting


@pytest.mark.usefixtures("workspaces")
def test_a_connection_of_many_workspaces_counts_for_the_last_one() -> None:
    """As a proxy keeps them."""
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(max_connections=2)) as served:
        with dial(served) as connection:
            for key in (b"one", b"two", b"two", b"one"):
                head = b"Authorization: Bearer %b\r\nContent-Length: 16\r\n\r\n" % key
                connection.sendall(COMPLETION + head + b'{"prompt": "hi"}')
                assert status_of(connection) == 200
        served.wait_until(lambda: served.connections.num_open == 0)
        assert served.limits.places.shares.used == 0


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("limit", ["max_websockets", "max_connections"])
def test_a_workspace_leaves_websockets_to_others(limit: str) -> None:
    with bounded_server(FakeEngine(), ServerConfig(**{limit: 8})) as served, ExitStack() as stack:

        def open_one(key: str) -> ClientConnection:
            url = f"ws://127.0.0.1:{served.port}/v1/stream"
            headers = {"Authorization": f"Bearer {key}"}
            return stack.enter_context(connect(url, compression=None, additional_headers=headers))

        opened = [open_one("greedy") for _ in range(6)]
        with pytest.raises(InvalidStatus) as caught:
            open_one("greedy")
        assert caught.value.response.status_code == 429
        assert b"kept for others" in (caught.value.response.body or b"")
        opened.append(open_one("late"))
        opened[0].close()
        opened[1].close()
        served.wait_until(lambda: served.connections.num_open == 5)
        opened.append(open_one("greedy"))
        opened[-1].send(json.dumps({"ping": 1}))
        assert json.loads(opened[-1].recv(timeout=60)) == {"pong": 1}
        for each in opened:
            each.close()
        served.wait_until(lambda: served.connections.num_open == 0)
        assert served.limits.places.shares.used == 0


def test_refused_connections_make_no_room() -> None:
    engine = ThreadedEngine()
    with bounded_server(engine, ServerConfig(max_connections=1)) as served:
        held = ask(served, "any")
        served.wait_until(lambda: len(engine.added) == 1)
        for _ in range(3):
            assert status_and_code(read_all(dial(served))) == (503, "overloaded")
        assert served.connections.num_displaced == 0
        held.close()


@pytest.mark.usefixtures("workspaces")
def test_who_needs_no_key_holds_neither_places_nor_bodies_of_workspaces() -> None:
    config = ServerConfig(max_connections=2, max_pending_body_bytes=1 << 20)
    head = b"POST /console/sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with bounded_server(FakeEngine(script_text("ok")), config) as served:
        large = dial(served)
        large.sendall(head % (1 << 20))
        assert status_and_code(read_all(large)) == (413, "request_too_large")
        slow = [dial(served) for _ in range(2)]
        for connection in slow:
            connection.sendall(head % 60_000 + b" " * 10_000)
        served.wait_until(lambda: served.limits.pending_bodies.num_bytes == 20_000)
        one = ask(served, "one")
        assert status_of(one) == 200
        served.wait_until(lambda: served.limits.pending_bodies.num_bytes == 10_000)
        assert read_all(slow[0]) == b""
        for connection in (*slow, one):
            connection.close()
