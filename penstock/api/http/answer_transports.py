"""Transports for single answers, between uvicorn's request cycle and the connection."""

from __future__ import annotations

import asyncio
from typing import Any


class HeldHead(asyncio.Transport):
    """Holds the head of an answer until the first piece of the body arrives, as ASGI asks, and sends both in one
    packet. For a short answer, a second packet would cost as much as all other work."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head = b""
        self._is_head_out = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_head_out:
            self._transport.write(data)
        elif not self._head:
            self._head = bytes(data)
        else:
            self._is_head_out = True
            self._transport.write(self._head + data)

    def close(self) -> None:
        if not self._is_head_out and self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class UnframedBody(HeldHead):
    """Removes the chunk framing of an answer to an HTTP/1.0 client. Such a client does not know chunks: the answer
    ends when the connection closes. uvicorn frames every body without a length, one or more whole chunks in a
    write."""

    _FRAMING = b"transfer-encoding: chunked\r\n"

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_framed: bool | None = None  # None before the head

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        data = bytes(data)
        if self._is_framed is None:
            self._is_framed = self._FRAMING in data
            data = data.replace(self._FRAMING, b"", 1)
        elif self._is_framed:
            data = self._unframed(data)
        super().write(data)

    @staticmethod
    def _unframed(data: bytes) -> bytes:
        parts = []
        while data:
            size, _, data = data.partition(b"\r\n")
            end = int(size, 16)
            parts.append(data[:end])
            data = data[end + 2 :]
        return b"".join(parts)
