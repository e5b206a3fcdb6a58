"""/v1/responses over a WebSocket, with `responses.connect` of the real `openai` SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.resources.responses.responses import ResponsesConnection
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from penstock.core.errors import EngineUnavailable
from penstock.core.gateway_config import ServerConfig
from penstock.core.request import Request
from tests.api.conftest import Serve
from tests.api.scripted import TOOL_TEMPLATE, prompt_of, scripted
from tests.gateway.fake_engine import CHAT_TEMPLATE, FakeEngine

ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}


def events_of(connection: ResponsesConnection) -> list[Any]:
    """The events of one answer."""
    events: list[Any] = []
    while not events or events[-1].type not in ENDS:
        events.append(connection.recv())
    return events


def test_answers_come_as_events(serve: Serve) -> None:
    served = serve(scripted("Hi!"))
    sdk = served.sdk()
    with sdk.responses.connect() as connection:
        for store in (True, False):
            connection.response.create(model="bytes", input="Hello", store=store)
            events = events_of(connection)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[0].type == "response.created"
            final = events[-1].response
            assert final.output_text == "Hi!"
            if store:
                assert sdk.responses.retrieve(final.id).output_text == "Hi!"
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(final.id)


def test_a_response_that_is_not_stored_goes_on_where_it_was_made(serve: Serve) -> None:
    served = serve(scripted(lambda request: f"answer {len(served.engine.added)}"))
    sdk = served.sdk()
    with sdk.responses.connect() as connection:
        connection.response.create(model="bytes", input="zero", store=False, generate=False)
        warm = events_of(connection)[-1].response
        assert (warm.status, warm.output, warm.usage.total_tokens) == ("completed", [], 0)
        assert served.engine.added == []
        previous = warm.id
        for text in ("one", "two"):
            connection.response.create(model="bytes", input=text, store=False, previous_response_id=previous)
            previous = events_of(connection)[-1].response.id
        connection.response.create(model="bytes", input="three", previous_response_id=previous)
        stored = events_of(connection)[-1].response
    whole = (
        "<|user|>zero<|end|><|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|>"
        "<|assistant|>answer 2<|end|><|user|>three<|end|><|assistant|>"
    )
    assert prompt_of(served.engine.added[-1]) == whole
    sdk.responses.create(model="bytes", input="four", previous_response_id=stored.id)
    assert prompt_of(served.engine.added[-1]).startswith(whole), "a stored response has its whole past"
    with sdk.responses.connect() as other:
        other.response.create(model="bytes", input="x", previous_response_id=previous)
        (error,) = events_of(other)
        assert (error.type, error.status, error.error.param) == ("error", 404, "previous_response_id")


def test_lanes_and_tools(serve: Serve) -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    sdk = serve(scripted(call, template=TOOL_TEMPLATE)).sdk()
    tool: Any = {"type": "function", "name": "find", "parameters": {}, "strict": False}
    with sdk.responses.connect() as connection:
        for lane in ("a", "b", "a"):
            connection.response.create(model="bytes", input="x", tools=[tool], stream_id=lane)
        ends = []
        while len(ends) < 3:
            event: Any = connection.recv()
            assert event.stream_id in ("a", "b")
            if event.type in ENDS:
                ends.append((event.stream_id, event.response.output[0].type))
    assert sorted(ends) == [("a", "function_call"), ("a", "function_call"), ("b", "function_call")]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "response.create", "model": "bytes"}, "input"),
        ({"type": "response.create", "input": "x", "background": True}, "background"),
        ({"type": "response.create", "input": 5}, "input"),
        (
            {"type": "response.create", "input": "x", "generate": False, "tools": [{"type": "function"}]},
            "tools",
        ),
        ({"type": "response.create", "input": "x", "model": "never"}, "model"),
        ({"type": "response.inject", "input": []}, "type"),
        ({"type": "response.steer", "input": []}, None),
        ({}, None),
        ([], None),
        ({"type": "response.create", "model": "bytes", "input": "x" * 90_000}, "input"),
        (
            {"type": "response.create", "model": "bytes", "input": "x", "max_output_tokens": 0},
            "max_output_tokens",
        ),
    ],
)
def test_messages_that_make_no_sense(serve: Serve, message: Any, param: str | None) -> None:
    served = serve(scripted("ok"))
    with connect(f"ws://127.0.0.1:{served.port}/v1/responses", compression=None) as socket:
        socket.send(json.dumps(message))
        answer = json.loads(socket.recv(timeout=60))
        assert answer["type"] == "error"
        assert answer["error"]["param"] == param
        assert answer["status"] in (400, 404)
        socket.send(json.dumps({"type": "response.create", "input": "x"}))
        assert json.loads(socket.recv(timeout=60))["type"] == "response.created", "the connection lives on"


def test_a_failure_in_the_middle(serve: Serve) -> None:
    served = serve(scripted("ab"))
    plain = served.engine.script
    assert plain is not None
    served.engine.script = lambda request: [*plain(request)[:1], EngineUnavailable("gone")]
    with served.sdk().responses.connect() as connection:
        connection.response.create(model="bytes", input="x")
        assert events_of(connection)[-1].type == "response.failed"


def test_a_client_that_leaves_frees_what_it_asked_for(serve: Serve) -> None:
    served = serve(FakeEngine())
    with served.sdk().responses.connect() as connection:
        connection.response.create(model="bytes", input="x")
        served.wait_until(lambda: bool(served.engine.streams))
    served.wait_until(lambda: bool(served.engine.aborted))
    served.wait_until(lambda: not served.gateway.num_live)


def test_keys_are_asked_for_and_requests_are_bounded(serve: Serve) -> None:
    served = serve(FakeEngine(), server=ServerConfig(api_key="secret", max_websocket_requests=2))
    url = f"ws://127.0.0.1:{served.port}/v1/responses"
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    assert refused.value.response.status_code == 401
    with served.sdk("secret").responses.connect() as connection:
        for _ in range(3):
            connection.response.create(model="bytes", input="x")
        (error,) = events_of(connection)
        assert (error.type, error.status) == ("error", 429)


def paused(
    answer: Callable[[Request], str], template: str = TOOL_TEMPLATE
) -> tuple[FakeEngine, Callable[[], None]]:
    """An engine that stops after the first token of the first request, and what lets the engine go on."""
    engine = scripted(answer, template=template)
    play, rest = engine._play, []
    loops: list[asyncio.AbstractEventLoop] = []

    def stop_once(request_id: str, news: list[Any]) -> None:
        if len(engine.added) == 1 and not loops and len(news) < len(answer(engine.added[0])):
            loops.append(asyncio.get_running_loop())
            rest.append((request_id, news))
        else:
            play(request_id, news)

    engine._play = stop_once  # type: ignore[method-assign]
    return engine, lambda: loops[0].call_soon_threadsafe(play, *rest[0]) and None


def until(connection: ResponsesConnection, *kinds: str) -> Any:
    event: Any = connection.recv()
    while event.type not in kinds:
        event = connection.recv()
    return event


@pytest.mark.parametrize("store", [True, False])
def test_a_response_is_steered(serve: Serve, store: bool) -> None:
    engine, go_on = paused(lambda request: f"answer {len(engine.added)}", CHAT_TEMPLATE)
    with serve(engine).sdk().responses.connect() as connection:
        connection.response.create(model="bytes", input="one", store=store, stream_id="lane")
        first = until(connection, "response.created").response.id
        for text in ("two", "three"):
            connection.response.steer(previous_response_id=first, input=text)
            accepted = until(connection, "response.steer.accepted")
            assert accepted.steer.previous_response_id == first
            assert accepted.stream_id == "lane"
        go_on()
        assert until(connection, "response.completed").response.id == first
        second = until(connection, "response.created").response
        assert second.previous_response_id == first
        assert until(connection, "response.completed").response.output_text == "answer 2"
        connection.response.steer(previous_response_id=second.id, input="late")
        failed = until(connection, "response.steer.failed")
        assert (failed.error.code, failed.steer.input) == ("response_already_completed", "late")
    assert prompt_of(engine.added[-1]) == (
        "<|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|><|user|>three<|end|><|assistant|>"
    )


def test_steering_waits_for_results_of_tools(serve: Serve) -> None:
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    engine, go_on = paused(lambda request: call if len(engine.added) == 1 else "done")
    tool: Any = {"type": "function", "name": "find", "parameters": {}, "strict": False}
    with serve(engine).sdk().responses.connect() as connection:
        connection.response.create(model="bytes", input="one", tools=[tool])
        first = until(connection, "response.created").response.id
        connection.response.steer(previous_response_id=first, input="two")
        until(connection, "response.steer.accepted")
        go_on()
        pending = until(connection, "response.steer.pending")
        (stub,) = pending.required_input
        assert (stub.type, stub.name) == ("function_call_output", "find")
        output: Any = {"type": "function_call_output", "call_id": stub.call_id, "output": "found"}
        connection.response.create(model="bytes", input=[output], tools=[tool], previous_response_id=first)
        assert until(connection, "response.completed").response.output_text == "done"
    text = prompt_of(engine.added[-1])
    assert text.index("two") < text.index("found")


@pytest.mark.parametrize(
    ("input", "code"),
    [
        ([{"role": "assistant", "content": "x"}], "invalid_input"),
        ([], "invalid_input"),
        ("x", "response_not_found"),
    ],
    ids=["another role", "nothing", "an unknown response"],
)
def test_steering_that_is_refused(serve: Serve, input: Any, code: str) -> None:
    with serve(scripted("ok")).sdk().responses.connect() as connection:
        connection.response.steer(previous_response_id="resp_x", input=input)
        failed: Any = connection.recv()
        assert (failed.type, failed.error.code) == ("response.steer.failed", code)
        assert failed.steer.previous_response_id == "resp_x"


def test_what_connections_keep_is_bounded(serve: Serve) -> None:
    """One message always fits. What does not fit beside others is refused, or forgotten when its response has
    ended."""
    engine, go_on = paused(lambda request: "answer", CHAT_TEMPLATE)
    served = serve(engine, server=ServerConfig(max_pending_body_bytes=1024, max_body_bytes=64 << 10))
    sdk = served.sdk()
    large = "x" * (60 << 10)  # of which four fit

    def warmed(connection: ResponsesConnection) -> str:
        connection.response.create(model="bytes", input=large, store=False, generate=False)
        end = events_of(connection)[-1]
        return end.response.id if end.type == "response.completed" else ""

    def goes_on(connection: ResponsesConnection, previous: str) -> bool:
        connection.response.create(
            model="bytes", input="y", store=False, generate=False, previous_response_id=previous
        )
        return bool(events_of(connection)[-1].type == "response.completed")

    with sdk.responses.connect() as first, sdk.responses.connect() as second:
        last = warmed(second)
        for _ in range(4):
            assert goes_on(first, warmed(first))  # forgets what came before
        assert goes_on(second, last), "another connection forgets nothing of this one"
        with sdk.responses.connect() as third:
            assert not warmed(third), "the others have all the room"
    with sdk.responses.connect() as connection:  # what the others kept has gone with them
        served.wait_until(lambda: bool(warmed(connection)))
    with sdk.responses.connect() as connection:
        connection.response.create(model="bytes", input="one")
        response_id = until(connection, "response.created").response.id
        for _ in range(5):  # all but the last one wait for their turn
            connection.response.create(model="bytes", input=large, generate=False)
        assert until(connection, "error").error.code == "rate_limit_exceeded"
        connection.response.steer(previous_response_id=response_id, input=large)
        assert until(connection, "error").error.code == "rate_limit_exceeded"
        go_on()
        for _ in range(5):
            until(connection, "response.completed")
        assert goes_on(connection, warmed(connection))
