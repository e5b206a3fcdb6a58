"""One request and its answer below ASGI: the fast path for plain POST requests.

It does the work of uvicorn's own cycle at a fraction of the cost: uvicorn matches patterns against every header of
every answer, which costs as much as the look-up of the caller's key and limits together.
"""

from __future__ import annotations

from itertools import chain

from uvicorn._types import ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

MAX_COPIED_BYTES = 64 << 10  # a larger body is not copied behind the head


class Exchange(RequestResponseCycle):
    """A cycle whose application writes the names of headers in lower case, and leaves the framing of bodies to the
    server. Not for HEAD, nor for statuses without a body. The head leaves with the first piece of the body, in one
    packet: a second packet would double the cost of a short answer."""

    _head = b""  # until it is sent

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.transport.is_closing():
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message)
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._write(message)
        else:
            raise RuntimeError(f"An ASGI message of type {message['type']!r} was not expected now.")

    def _start(self, message: HTTPResponseStartEvent) -> None:
        headers = [*self.default_headers, *message.get("headers", ())]
        num_lines = len(headers) + 1
        lines = b"%b: %b\r\n" * len(headers) % tuple(chain.from_iterable(headers))
        head = STATUS_LINE[message["status"]] + lines
        if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines:
            raise RuntimeError("A header of an answer has a line break.")
        self.response_started = True
        self.waiting_for_100_continue = False
        by_name = dict(headers)
        length = by_name.get(b"content-length")
        self.chunked_encoding = length is None
        if length is None:
            head += b"transfer-encoding: chunked\r\n"
        else:
            self.expected_content_length = int(length)
        if by_name.get(b"connection", b"").lower() == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            head += b"connection: close\r\n"
        self._head = head + b"\r\n"

    def _write(self, message: HTTPResponseBodyEvent) -> None:
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        head, self._head = self._head, b""
        if self.chunked_encoding:
            framed = b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head
            self.transport.write(framed + b"0\r\n\r\n" if is_last else framed)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (is_last and self.expected_content_length):
                raise RuntimeError("The body of an answer has another length than its head says.")
            if len(body) > MAX_COPIED_BYTES:
                self.transport.write(head)
                self.transport.write(body)
            else:
                self.transport.write(head + body)
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
