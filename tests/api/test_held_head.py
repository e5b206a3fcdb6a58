"""An answer's head leaves with the beginning of its body, and never gets lost."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.api.http.exchange import HeldHead, UnframedBody

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.is_closed
        self.packets.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_head_and_first_piece_are_one_packet() -> None:
    wire = Wire()
    held = HeldHead(wire)
    held.write(HEAD)
    assert wire.packets == []
    held.write(b"one")
    held.write(b"two")
    assert wire.packets == [HEAD + b"one", b"two"]


def test_an_empty_body_lets_the_head_out() -> None:
    wire = Wire()
    held = HeldHead(wire)
    held.write(HEAD)
    held.write(b"")
    assert wire.packets == [HEAD]


def test_closing_lets_the_head_out() -> None:
    wire = Wire()
    held = HeldHead(wire)
    held.write(HEAD)
    assert not held.is_closing()
    held.close()
    assert wire.packets == [HEAD]
    assert held.is_closing()


def test_closing_after_an_answer_writes_nothing_more() -> None:
    wire = Wire()
    held = HeldHead(wire)
    held.write(HEAD)
    held.write(b"body")
    held.close()
    assert wire.packets == [HEAD + b"body"]


def test_an_answer_to_http_1_0_has_no_chunks() -> None:
    wire = Wire()
    plain = UnframedBody(wire)
    plain.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    plain.write(b"5\r\na\r\n5c\r\n")
    plain.write(b"1\r\nx\r\n0\r\n\r\n")
    assert b"".join(wire.packets) == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\na\r\n5cx"


def test_an_answer_with_a_length_stays_as_it_is() -> None:
    wire = Wire()
    plain = UnframedBody(wire)
    plain.write(HEAD)
    plain.write(b"5\r\nhello\r\n")
    assert b"".join(wire.packets) == HEAD + b"5\r\nhello\r\n"
