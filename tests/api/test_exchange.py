"""What an application sends becomes HTTP/1.1, and what would break the framing is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from penstock.api.http.exchange import Exchange
from tests.api.test_held_head import Wire


def exchange(wire: Wire, *, keep_alive: bool = True, whole_body: bytes | None = None) -> Exchange:
    return Exchange(
        {"type": "http", "method": "POST"},  # type: ignore[typeddict-item]
        wire,
        FlowControl(wire),
        [(b"date", b"today")],
        lambda: None,
        keep_alive=keep_alive,
        whole_body=whole_body,
    )


def start(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def sent(*messages: dict[str, Any], keep_alive: bool = True) -> tuple[bytes, Wire]:
    wire = Wire()
    cycle = exchange(wire, keep_alive=keep_alive)
    for message in messages:
        await cycle.send(message)  # type: ignore[arg-type]
    return b"".join(wire.packets), wire


async def test_a_body_of_known_length() -> None:
    data, wire = await sent(start((b"content-length", b"2")), body(b"ab"))
    assert data == b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nab"
    assert not wire.is_closed


async def test_a_stream_is_chunked() -> None:
    data, _ = await sent(start(), body(b"ab", more=True), body(b"", more=True), body(b"c"))
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ntransfer-encoding: chunked\r\n\r\n"
    assert data == head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


@pytest.mark.parametrize("headers", [(), ((b"connection", b"close"),)])
async def test_the_last_answer_of_a_connection_says_so(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    data, wire = await sent(start(*headers), body(b""), keep_alive=bool(headers))
    assert data.count(b"connection: close\r\n") == 1
    assert wire.is_closed


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\rb"])
async def test_a_line_break_in_a_header_is_refused(value: bytes) -> None:
    with pytest.raises(RuntimeError, match="line break"):
        await sent(start((b"warning", value)))


@pytest.mark.parametrize("data", [b"a", b"abc"])
async def test_a_wrong_length_is_refused(data: bytes) -> None:
    with pytest.raises(RuntimeError, match="another length"):
        await sent(start((b"content-length", b"2")), body(data))


async def test_messages_out_of_order_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not expected"):
        await sent(body(b"a"))
    with pytest.raises(RuntimeError, match="not expected"):
        await sent(start(), body(b"a"), body(b"b"))


async def test_nothing_is_written_to_a_connection_that_has_ended() -> None:
    """uvloop raises an error then, and any client could fill the log with it."""
    wire = Wire()
    cycle = exchange(wire)
    await cycle.send(start())  # type: ignore[arg-type]
    wire.close()
    await cycle.send(body(b"a"))  # type: ignore[arg-type]
    assert wire.packets == []


async def test_a_whole_answer_may_come_as_one_message() -> None:
    data, _ = await sent(start((b"content-length", b"2")) | {"body": b"ab"})
    assert data == b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nab"


async def test_a_whole_body_is_read_at_once_and_then_the_departure_is_awaited() -> None:
    cycle = exchange(Wire(), whole_body=b"ab")
    assert await cycle.receive() == {"type": "http.request", "body": b"ab", "more_body": False}
    departure = asyncio.create_task(cycle.receive())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not departure.done()
    cycle.disconnected = True
    cycle.message_event.set()
    assert await departure == {"type": "http.disconnect"}


async def test_a_client_that_left_sends_no_body() -> None:
    cycle = exchange(Wire(), whole_body=b"ab")
    cycle.disconnected = True
    assert await cycle.receive() == {"type": "http.disconnect"}
