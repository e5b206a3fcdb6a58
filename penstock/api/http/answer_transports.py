"""What single answers are written to, between uvicorn's cycle of a request and the connection."""

from __future__ import annotations

import asyncio
from typing import Any


class HeldHead(asyncio.Transport):
    """What one answer is written to. Its head waits for the first piece of its body, as ASGI wants it, and the two
    leave in one packet: a second one would cost a short answer as much as the rest of it."""

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
    """What an answer to an HTTP/1.0 client is written to: such a client knows no chunks, and the end of the
    connection ends its answer. uvicorn frames every body without a length, one or more whole chunks in a write."""

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
