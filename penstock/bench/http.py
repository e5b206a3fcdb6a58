"""A very small HTTP/1.1 client for event streams, because the load generator shares the machine with the server.

One connection per request, no redirects, no cookies, no compression. `ResponseParser` does no input or output;
`exchange` connects it to a socket.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from penstock.core.errors import UsageError


class ProtocolError(Exception):
    """The server's response is not valid HTTP."""


class ResponseParser:
    """Turns the bytes of one response into the `data:` payloads of its event stream. A status other than 200 is kept
    as `body`.

    The `data:` lines of one event are not joined: no server of this API sends more than one.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.complete = False
        self.body = bytearray()
        self._is_stream = False
        self._head = bytearray()
        self._line = b""  # the unfinished last line of the stream
        self._is_chunked = False
        self._chunks = bytearray()  # chunked framing not taken apart yet
        self._body_left: int | None = None  # bytes still missing of Content-Length

    def feed(self, data: bytes) -> list[bytes]:
        if self.status is None:
            self._head += data
            head, blank, rest = bytes(self._head).partition(b"\r\n\r\n")
            if not blank:
                return []
            self._read_head(head)
            data = rest
        content = self._unchunk(data) if self._is_chunked else self._count(data)
        if not self._is_stream:
            self.body += content
            return []
        *lines, self._line = (self._line + content).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def end_of_input(self) -> None:
        """The server closed the connection, which ends a body that has neither a length nor chunks."""
        if self.status is not None and not self._is_chunked and self._body_left is None:
            self.complete = True

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(b"\r\n")
        try:
            self.status = int(status_line.split(b" ", 2)[1])
        except (IndexError, ValueError):
            raise ProtocolError(f"the answer begins with {status_line[:40]!r}") from None
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
        }
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if b"content-length" in headers and not self._is_chunked:
            self._body_left = int(headers[b"content-length"])

    def _count(self, data: bytes) -> bytes:
        if self._body_left is not None:
            self._body_left -= len(data)
            self.complete = self._body_left <= 0
        return data

    def _unchunk(self, data: bytes) -> bytes:
        self._chunks += data
        content = []
        while not self.complete:
            size_end = self._chunks.find(b"\r\n")
            if size_end < 0:
                break
            try:
                size = int(self._chunks[:size_end].split(b";")[0], 16)
            except ValueError:
                raise ProtocolError("a chunk has no size") from None
            start = size_end + 2
            if len(self._chunks) < start + size + 2:
                break
            content.append(bytes(self._chunks[start : start + size]))
            del self._chunks[: start + size + 2]
            self.complete = size == 0
        return b"".join(content)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The host, port and headers for requests to a server."""

    host: str
    port: int
    path_prefix: str
    is_tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"'{url}' is not an HTTP address.", hint="Write http://127.0.0.1:8000.")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls, api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        lines = [
            f"{method} {self.path_prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


OnPayload = Callable[[bytes, float], None]


class _Exchange(asyncio.Protocol):
    """One request and its response. `on_payload` is called with every payload and its time of arrival."""

    def __init__(self, request: bytes, on_payload: OnPayload, done: asyncio.Future[ResponseParser]) -> None:
        self._request = request
        self._on_payload = on_payload
        self._done = done
        self._parser = ResponseParser()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's have another base class

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            for payload in self._parser.feed(data):
                self._on_payload(payload, now)
        except Exception as error:
            self._finish(error)
            return
        if self._parser.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser.end_of_input()
        self._finish(None if self._parser.complete else exc or ProtocolError("the connection closed early"))

    def _finish(self, error: Exception | None) -> None:
        if not self._done.done():
            if error is None:
                self._done.set_result(self._parser)
            else:
                self._done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


def _ignore(_: bytes, __: float) -> None:
    return


async def exchange(endpoint: Endpoint, request: bytes, on_payload: OnPayload = _ignore) -> tuple[int, bytes]:
    """Send one request. Returns the status and, unless the response was an event stream, its body.

    Raises OSError or ProtocolError when the answer does not arrive whole.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResponseParser] = loop.create_future()
    transport, _ = await loop.create_connection(
        lambda: _Exchange(request, on_payload, done),
        endpoint.host,
        endpoint.port,
        ssl=ssl.create_default_context() if endpoint.is_tls else None,
    )
    try:
        parser = await done
    finally:
        transport.close()
    assert parser.status is not None
    return parser.status, bytes(parser.body)
