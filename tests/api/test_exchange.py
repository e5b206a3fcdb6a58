"""What an application sends becomes HTTP/1.1, and what would break the framing is refused."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from penstock.api.http.exchange import Exchange
from tests.api.test_held_head import Wire


def exchange(wire: Wire, *, keep_alive: bool = True) -> Exchange:
    logger = logging.getLogger(__name__)
    return Exchange(
        scope={"type": "http", "method": "POST"},  # type: ignore[typeddict-item]
        transport=wire,
        flow=FlowControl(wire),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[(b"date", b"today")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
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
