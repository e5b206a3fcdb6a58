"""/v1/stream over real sockets, with a real client library."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.utils import ClientDisconnected
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from penstock.api.http import parsing, websocket_protocol
from penstock.api.http.websocket_protocol import BoundedWebSocketProtocol
from penstock.api.websocket import endpoint
from penstock.core.errors import AuthenticationFailed
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.request import FinishReason, Request
from penstock.gateway.gateway import Gateway
from penstock.gateway.tenants.authenticator import Authenticator
from tests.api.bounded_server import BoundedServed, ThreadedEngine, bounded_server
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.guards.read_settings import guard_settings


@contextmanager
def socket_to(served: BoundedServed, **options: Any) -> Iterator[ClientConnection]:
    with connect(f"ws://127.0.0.1:{served.port}/v1/stream", compression=None, **options) as socket:
        yield socket


def ask(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def hear(socket: ClientConnection) -> dict[str, Any]:
    heard: dict[str, Any] = json.loads(socket.recv(timeout=60))
    return heard


def hear_all(socket: ClientConnection) -> tuple[str, dict[str, Any]]:
    """The text of an answer and its last message."""
    text = ""
    while True:
        message = hear(socket)
        if "token" not in message:
            return text, message
        text += message["token"]


def close_code(socket: ClientConnection) -> int | None:
    """Read until the server closes, and say with which code."""
    try:
        while True:
            socket.recv(timeout=60)
    except ConnectionClosed as error:
        return error.rcvd.code if error.rcvd is not None else None


def test_the_simple_protocol() -> None:
    with (
        bounded_server(FakeEngine(script_text("hello", num_cached_tokens=1))) as served,
        socket_to(served) as socket,
    ):
        ask(socket, prompt="hi", max_tokens=10)
        assert hear(socket) == {"token": "h"}
        text, done = hear_all(socket)
        assert text == "ello"
        assert done["done"] is True
        assert done["finish_reason"] == "stop"
        assert done["usage"]["prompt_tokens"] == 2
        assert done["usage"]["completion_tokens"] == 6
        assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        ask(socket, messages=[{"role": "user", "content": "again"}])
        assert hear_all(socket)[0] == "hello"


def test_many_requests_share_a_connection() -> None:
    def script(request: Request) -> Any:
        return script_text("=" + bytes(request.prompt_token_ids).decode())(request)

    with bounded_server(FakeEngine(script)) as served, socket_to(served) as socket:
        for number in range(20):
            ask(socket, id=number, prompt=f"p{number}", max_tokens=10)
        texts = dict.fromkeys(range(20), "")
        open_ids = set(range(20))
        while open_ids:
            message = hear(socket)
            if message.get("done"):
                open_ids.remove(message["id"])
            else:
                texts[message["id"]] += message["token"]
    assert texts == {number: f"=p{number}" for number in range(20)}


def test_several_answers_are_numbered() -> None:
    with bounded_server(FakeEngine(script_text("ab"))) as served, socket_to(served) as socket:
        ask(socket, id="x", prompt="hi", n=2, max_tokens=5)
        texts = {0: "", 1: ""}
        while not (message := hear(socket)).get("done"):
            assert message["id"] == "x"
            texts[message["index"]] += message["token"]
        assert texts == {0: "ab", 1: "ab"}
        assert message["finish_reason"] == ["stop", "stop"]


def test_cancelling_frees_the_engine_and_says_what_was_used() -> None:
    engine = ThreadedEngine()
    with bounded_server(engine) as served, socket_to(served) as socket:
        ask(socket, id="a", prompt="hi", max_tokens=50)
        served.wait_until(lambda: len(engine.added) == 1)
        engine.emit_soon(b"abc")
        assert hear(socket) == {"id": "a", "token": "abc"}
        ask(socket, cancel="a")
        ended = hear(socket)
        assert (ended["id"], ended["done"], ended["cancelled"]) == ("a", True, True)
        assert ended["usage"]["completion_tokens"] == 3
        assert len(engine.aborted) == 1
        ask(socket, cancel="a")
        assert hear(socket)["error"]["code"] == "not_found"
        assert served.gateway.num_live == 0


def test_a_connection_that_ends_takes_its_requests_along() -> None:
    engine = ThreadedEngine()
    with bounded_server(engine) as served:
        with socket_to(served) as socket:
            ask(socket, id=1, prompt="hi", max_tokens=50)
            ask(socket, id=2, prompt="hi", max_tokens=50)
            served.wait_until(lambda: len(engine.added) == 2)
        served.wait_until(lambda: len(engine.aborted) == 2)
        served.wait_until(lambda: served.connections.num_open == 0)


def test_pings_at_both_levels() -> None:
    with bounded_server(FakeEngine()) as served, socket_to(served) as socket:
        ask(socket, ping={"at": 5})
        assert hear(socket) == {"pong": {"at": 5}}
        assert socket.ping().wait(60)


def test_errors_name_their_request_and_the_connection_goes_on() -> None:
    with bounded_server(FakeEngine(script_text("ok"))) as served, socket_to(served) as socket:
        for message, code, status in (
            ({"id": "a", "prompt": "hi", "max_tokens": 0}, "invalid_request_error", 400),
            ({"id": "b", "prompt": "x" * 300}, "context_length_exceeded", 400),
            ({"id": "c", "model": "other", "prompt": "hi"}, "model_not_found", 404),
            ({"id": "d"}, "invalid_request_error", 400),
            ({"id": "e", "prompt": "a", "messages": []}, "invalid_request_error", 400),
            ({"id": "f", "prompt": "a", "logprobs": 1}, "invalid_request_error", 400),
            ({"id": "g", "prompt": "a", "top_kk": 1}, "invalid_request_error", 400),
        ):
            ask(socket, **message)
            heard = hear(socket)
            assert (heard["id"], heard["error"]["code"], heard["error"]["status"]) == (
                message["id"],
                code,
                status,
            )
        ask(socket, id="z", prompt="hi", max_tokens=5)
        assert hear_all(socket)[0] == "ok"


@pytest.mark.parametrize(
    "junk",
    ["", "nonsense", "[]", "{", '{"id": 1.5}', '{"prompt": ' + "[" * 50_000, '{"id": ""}', '"\\ud800"'],
)
def test_junk_is_answered_with_an_error(junk: str) -> None:
    with bounded_server(FakeEngine()) as served, socket_to(served) as socket:
        socket.send(junk)
        assert hear(socket)["error"]["type"] == "invalid_request_error"


def test_binary_messages_are_texts_too() -> None:
    with bounded_server(FakeEngine(script_text("ok"))) as served, socket_to(served) as socket:
        socket.send(b'{"prompt": "hi"}')
        assert hear_all(socket)[0] == "ok"
        socket.send(b"\xff\xfe")
        assert hear(socket)["error"]["code"] == "invalid_request_error"


def test_texts_reach_the_application_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decode 32 MB into a text and back would keep others waiting."""
    seen: list[str] = []
    put = websocket_protocol.WebSocketsSansIOProtocol.send_receive_event_to_app

    def noted(protocol: Any) -> None:
        seen.append(protocol.curr_msg_data_type)
        put(protocol)

    monkeypatch.setattr(websocket_protocol.WebSocketsSansIOProtocol, "send_receive_event_to_app", noted)
    with bounded_server(FakeEngine(script_text("fine"))) as served, socket_to(served) as socket:
        socket.send(json.dumps({"id": "ü", "prompt": "é"}, ensure_ascii=False))
        assert hear(socket)["id"] == "ü"
    assert set(seen) == {"bytes"}


def test_endless_junk_ends_the_connection() -> None:
    with bounded_server(FakeEngine()) as served, socket_to(served) as socket:
        for _ in range(100):
            socket.send("junk")
        assert close_code(socket) == 1008


def test_a_message_that_is_too_large_ends_the_connection() -> None:
    with (
        bounded_server(FakeEngine(), ServerConfig(max_body_bytes=1024)) as served,
        socket_to(served) as socket,
    ):
        socket.send("x" * 5000)
        assert close_code(socket) == 1009


@pytest.mark.parametrize(
    ("path", "message"),
    [("/v1/stream", {"prompt": "hi"}), ("/v1/responses", {"type": "response.create", "input": "hi"})],
)
def test_others_are_answered_while_a_large_message_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, path: str, message: dict[str, str]
) -> None:
    has_turn = threading.Event()

    async def wait_for_turn(*_: object) -> None:
        while not has_turn.is_set():
            await asyncio.sleep(0.001)

    monkeypatch.setattr(parsing, "check_num_values_in_turns", wait_for_turn)
    large = json.dumps({**message, "ignored": "a" * parsing.UNCOUNTED_BYTES})
    with (
        bounded_server(FakeEngine(script_text("ok")), ServerConfig()) as served,
        connect(f"ws://127.0.0.1:{served.port}{path}", compression=None) as socket,
        socket_to(served) as other,
    ):
        socket.send(large)
        served.wait_until(lambda: served.limits.pending_bodies.num_bytes > 0)
        ask(other, ping=1)
        assert hear(other) == {"pong": 1}
        has_turn.set()
        assert "error" not in hear(socket)
        served.wait_until(lambda: served.limits.pending_bodies.num_bytes == 0)


def test_the_same_id_twice_and_too_many_at_once() -> None:
    engine = ThreadedEngine()
    config = ServerConfig(max_websocket_requests=2)
    with bounded_server(engine, config) as served, socket_to(served) as socket:
        ask(socket, id=1, prompt="hi")
        ask(socket, id=1, prompt="hi")
        assert hear(socket)["error"]["code"] == "conflict"
        ask(socket, id=2, prompt="hi")
        ask(socket, id=3, prompt="hi")
        heard = hear(socket)
        assert (heard["id"], heard["error"]["status"]) == (3, 429)
        served.wait_until(lambda: len(engine.added) == 2)


@contextmanager
def asking_socket(served: BoundedServed) -> Iterator[ClientConnection]:
    """A connection with one request that runs. On a busy machine, the first connections may be closed as idle before
    the server reads their request."""
    while True:
        with socket_to(served) as socket:
            with suppress(ConnectionClosed):
                ask(socket, id=1, prompt="hi")
            served.wait_until(lambda: bool(served.engine.streams) or served.connections.num_open == 0)
            if served.engine.streams:
                yield socket
                return


def test_an_idle_connection_is_closed_but_not_while_something_runs() -> None:
    engine = ThreadedEngine()
    config = ServerConfig(websocket_idle_timeout_s=0.1)
    with bounded_server(engine, config) as served, asking_socket(served) as socket:
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.4)
        engine.emit_soon(b"x", FinishReason.STOP)
        assert hear(socket)["token"] == "x"
        assert hear(socket)["done"]
        assert close_code(socket) == 4408


def test_a_full_house_is_refused_clearly_and_opens_again() -> None:
    with bounded_server(FakeEngine(), ServerConfig(max_websockets=1)) as served:
        with socket_to(served), pytest.raises(InvalidStatus) as caught, socket_to(served):
            pass
        response = caught.value.response
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.body is not None
        assert "WebSockets" in json.loads(response.body)["error"]["message"]
        served.wait_until(lambda: b"penstock_websockets_open 0.0" in served.gateway.render_own_metrics())
        with socket_to(served) as socket:
            ask(socket, ping=1)
            assert hear(socket) == {"pong": 1}


async def test_an_answer_after_the_end_of_a_connection_is_no_error_of_ours() -> None:
    """The protocol ends a connection with broken frames, or without pongs. Bytes that the client does not read keep
    it from being lost meanwhile. An error would write a traceback to the log for each of them."""
    protocol = BoundedWebSocketProtocol.__new__(BoundedWebSocketProtocol)
    protocol.writable = asyncio.Event()
    protocol.writable.set()
    protocol.handshake_complete = protocol.close_sent = True
    protocol.initial_response = None
    protocol.queue = asyncio.Queue()
    protocol.disconnected = False
    for message in ({"type": "websocket.send", "text": "{}"}, {"type": "websocket.close", "code": 1000}):
        with pytest.raises(ClientDisconnected):
            await protocol.send(message)  # type: ignore[arg-type]


def test_a_key_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with bounded_server(FakeEngine(script_text("ok")), ServerConfig(api_key="the-key")) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as caught, socket_to(served, additional_headers=headers):
                pass
            assert caught.value.response.status_code == 401
        assert not caplog.records  # whoever has no key must not fill the log
        headers = {"Authorization": "Bearer the-key"}
        with socket_to(served, additional_headers=headers, origin="https://elsewhere.example") as socket:
            ask(socket, prompt="hi")
            assert hear_all(socket)[0] == "ok"


def test_a_revoked_key_ends_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise AuthenticationFailed("The API key was revoked.")

    with bounded_server(FakeEngine(script_text("ok"))) as served, socket_to(served) as socket:
        ask(socket, id=1, prompt="hi")
        assert hear_all(socket)[0] == "ok"
        monkeypatch.setattr(Authenticator, "identify", refuse)
        ask(socket, id=2, prompt="hi")
        heard = hear(socket)
        assert (heard["id"], heard["error"]["status"]) == (2, 401)
        ask(socket, ping=3)  # which would keep the connection open for ever
        assert hear(socket) == {"pong": 3}
        with pytest.raises(ConnectionClosed) as closed:
            hear(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        (None, None, True),
        ("http://127.0.0.1:{port}", None, True),
        ("http://localhost:{port}", "localhost:{port}", True),
        ("https://evil.example", None, False),
        ("http://evil.example:{port}", "evil.example:{port}", False),
        ("http://127.0.0.1:1", None, False),
        ("null", None, False),
        ("http://[", None, False),
    ],
)
def test_pages_of_other_sites_may_not_use_an_open_server(
    origin: str | None, host: str | None, is_allowed: bool
) -> None:
    with bounded_server(FakeEngine()) as served:
        headers = {
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        if origin is not None:
            headers["origin"] = origin.format(port=served.port)
        if host is not None:
            headers["host"] = host.format(port=served.port)
        with httpx.stream("GET", f"{served.url}/v1/stream", headers=headers) as response:
            assert response.status_code == (101 if is_allowed else 403)


def test_a_slow_reader_is_closed_and_the_engine_never_waits() -> None:
    """Its texts are merged first; past the buffer the connection ends with a code."""
    engine = ThreadedEngine(ready=engine_ready(model_card(max_model_len=1 << 22), max_output_tokens=1 << 21))
    small = GatewayConfig(max_stream_buffer_bytes=64 << 10)
    with (
        bounded_server(engine, gateway_config=small) as served,
        socket_to(served, max_queue=1, ping_interval=None, close_timeout=0.1) as socket,
    ):
        ask(socket, id=1, prompt="hi", max_tokens=1 << 20)
        served.wait_until(lambda: len(engine.added) == 1)
        while engine.streams:
            engine.emit_soon(b"x" * 4000)
        assert served.gateway.num_live == 0
        assert close_code(socket) == 4409


def test_a_reader_that_never_reads_is_dropped() -> None:
    engine = ThreadedEngine(ready=engine_ready(model_card(max_model_len=1 << 22), max_output_tokens=1 << 21))
    with (
        bounded_server(
            engine,
            ServerConfig(write_timeout_s=0.2),
            gateway_config=GatewayConfig(max_stream_buffer_bytes=64 << 10),
        ) as served,
        socket_to(served, max_queue=1, ping_interval=None, close_timeout=0.1) as socket,
    ):
        ask(socket, id=1, prompt="hi", max_tokens=1 << 20)
        served.wait_until(lambda: len(engine.added) == 1)
        while engine.streams:
            engine.emit_soon(b"x" * 4000)
        served.wait_until(lambda: served.connections.num_stalled == 1)
        served.wait_until(lambda: served.connections.num_open == 0)


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(
        st.one_of(
            st.text(max_size=40),
            st.binary(max_size=40),
            st.dictionaries(
                st.sampled_from(["id", "prompt", "messages", "cancel", "ping", "n", "max_tokens", "stop"]),
                st.one_of(
                    st.none(), st.integers(-5, 5), st.text(max_size=5), st.lists(st.integers(), max_size=3)
                ),
            ).map(json.dumps),
        ),
        max_size=8,
    )
)
def test_fuzz_never_breaks_a_server(fuzz_served: BoundedServed, messages: list[str | bytes]) -> None:
    with socket_to(fuzz_served) as socket:
        for message in messages:
            socket.send(message)
        ask(socket, ping="still there?")
        while hear(socket) != {"pong": "still there?"}:
            pass


@pytest.fixture(scope="module")
def fuzz_served() -> Iterator[BoundedServed]:
    with bounded_server(FakeEngine(script_text("ok"))) as served:
        yield served


def test_guards_cover_the_socket() -> None:
    rules = [{"guard": "blocklist", "terms": ["nightfall"]}]
    with bounded_server(FakeEngine(script_text("the nightfall plan"))) as served:
        served.gateway.guards.apply(
            guard_settings({"policies": {"p": {"rules": rules}}, "default_policy": "p"})
        )
        with socket_to(served) as socket:
            ask(socket, id=1, prompt="hi")
            text, done = hear_all(socket)
            assert (text, done["finish_reason"]) == ("the ", "content_filter")
            ask(socket, id=2, prompt="nightfall")
            assert hear(socket)["error"]["code"] == "content_policy_violation"


def test_a_page_sends_its_key_as_a_subprotocol() -> None:
    with bounded_server(FakeEngine(script_text("fine")), ServerConfig(api_key="sk-page")) as served:
        offered = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.sk-page")]
        with socket_to(served, subprotocols=offered) as socket:
            assert socket.subprotocol == "realtime", "no key is repeated"
            ask(socket, id=1, prompt="hi", max_tokens=9)
            assert hear_all(socket)[0] == "fine"
        for wrong in ("openai-insecure-api-key.sk-other", "openai-insecure-api-key.", "realtime"):
            with (
                pytest.raises(InvalidStatus) as refused,
                socket_to(served, subprotocols=[Subprotocol(wrong)]),
            ):
                pass
            assert refused.value.response.status_code == 401
            assert b"sk-other" not in refused.value.response.body


def test_an_unknown_path_is_not_found() -> None:
    with bounded_server(FakeEngine(script_text("fine"))) as served:
        url = f"ws://127.0.0.1:{served.port}/v1/nonsense"
        with pytest.raises(InvalidStatus) as refused, connect(url):
            pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["code"] == "not_found"


@pytest.mark.parametrize("step", [(endpoint, "translated"), (Gateway, "submit")])
def test_a_message_that_a_step_finds_too_deep_is_refused(
    monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str]
) -> None:
    async def give_up(*_: Any) -> None:
        raise RecursionError

    with bounded_server(FakeEngine(script_text("fine"))) as served, socket_to(served) as socket:
        with monkeypatch.context() as patch:
            patch.setattr(*step, give_up)
            ask(socket, id=1, prompt="hi")
            refused = hear(socket)
        assert (refused["id"], refused["error"]["status"]) == (1, 400)
        assert "nested too deeply" in refused["error"]["message"]
        ask(socket, id=2, prompt="hi")
        assert hear_all(socket)[0] == "fine"
