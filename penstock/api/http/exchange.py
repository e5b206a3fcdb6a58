"""Requests and answers of a connection, below ASGI: the fast path for plain POST requests, the task that answers
them, and the transports that the answers pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_logger = logging.getLogger("uvicorn.error")

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
# An empty SETTINGS frame, and GOAWAY with the code HTTP_1_1_REQUIRED (RFC 9113).
HTTP2_REFUSAL = bytes.fromhex("000000 04 00 00000000000008 07 00 00000000 00000000 0000000d")

MAX_COPIED_BYTES = 64 << 10  # a larger body is not copied behind the head


# The ASGI extension of servers that take a whole answer as one message: its start, with the `body`.
WHOLE_ANSWERS = "penstock.whole_answers"
# In the scope, until it is read: the body of a request that has arrived whole.
WHOLE_BODY = "penstock.whole_body"


class _Unwatched:
    """Replaces the event of a cycle while no task waits for the event."""

    def set(self) -> None:
        pass


_UNWATCHED: Any = _Unwatched()


class Exchange(RequestResponseCycle):
    """A cycle whose application writes the names of headers in lower case, and leaves the framing of bodies to the
    server. Not for HEAD, nor for statuses without a body. The head is sent with the first piece of the body, in one
    packet: a second packet would double the cost of a short answer. uvicorn's own cycle matches patterns against
    every header of every answer. That costs as much as the look-up of the caller's key and limits together.

    `whole_body` is the body of a request that has arrived whole."""

    _head = b""  # until it is sent
    chunked_encoding = False
    expected_content_length = 0
    disconnected = False
    response_started = False
    response_complete = False

    def __init__(
        self,
        scope: HTTPScope,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
        *,
        keep_alive: bool,
        whole_body: bytes | None = None,
        expect_100_continue: bool = False,
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.logger = _logger
        self.default_headers = default_headers
        self.on_response = on_response
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expect_100_continue
        self.message_event = asyncio.Event() if whole_body is None else _UNWATCHED
        self.body = bytearray()
        self.more_body = whole_body is None
        if whole_body is not None:
            scope[WHOLE_BODY] = whole_body  # type: ignore[literal-required]

    async def receive(self) -> ASGIReceiveEvent:
        body: bytes | None = self.scope.pop(WHOLE_BODY, None)  # type: ignore[misc]
        if body is not None and not self.disconnected and not self.response_complete:
            return {"type": "http.request", "body": body, "more_body": False}
        if self.message_event is _UNWATCHED:
            self.message_event = asyncio.Event()
        return await super().receive()

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.transport.is_closing():
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message)
            if "body" in message:
                self._write(message)
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._write(message)
        else:
            raise RuntimeError(f"An ASGI message of type {message['type']!r} was not expected now.")

    def _start(self, message: Any) -> None:
        headers = [*self.default_headers, *message.get("headers", ())]
        num_lines = len(headers) + 1
        lines = b"%b: %b\r\n" * len(headers) % tuple(chain.from_iterable(headers))
        head = STATUS_LINE[message["status"]] + lines
        if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines:
            raise RuntimeError("A header of an answer has a line break.")
        self.response_started = True
        if self.waiting_for_100_continue and self.more_body and not self.body:
            # The client may send the body or leave it out, and its next bytes mean either.
            self.keep_alive = False
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

    def _write(self, message: Any) -> None:
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


class RequestWorker:
    """The task that answers the requests of one connection, one after the other. A task of its own for each request
    would cost more than all that a short request does in it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        server_tasks: set[asyncio.Task[None]],
    ) -> None:
        """`server_tasks` are the tasks that the server waits for when it shuts down."""
        self._loop = loop
        self._transport = transport
        self._server_tasks = server_tasks
        self._task: asyncio.Task[None] | None = None
        self._next: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self._cycle: RequestResponseCycle | None = None  # that is being answered
        # Is done when the task shall look for the next request.
        self._idle: asyncio.Future[None] | None = None

    def answer(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._next = cycle, app
        if not self.wake():  # there is no task yet, or the task still ends the previous request
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._server_tasks.discard)
            self._server_tasks.add(self._task)

    def wake(self) -> bool:
        """Wake the task if it is idle, and return whether it was. Without a next request, an idle task ends. A task
        that is busy looks for the next request by itself."""
        idle, self._idle = self._idle, None
        if idle is None or idle.done():  # a cancelled task leaves a future that is done
            return False
        idle.set_result(None)
        return True

    def client_left(self) -> None:
        """Tell the request that is being answered: the protocol knows the newest of pipelined requests only."""
        cycle, self._cycle = self._cycle, None
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.scope.pop(WHOLE_BODY, None)  # type: ignore[misc]
            cycle.message_event.set()

    async def _run(self) -> None:
        current = asyncio.current_task()
        while self._next is not None and self._task is current:
            (cycle, app), self._next = self._next, None
            self._cycle = cycle
            await cycle.run_asgi(app)
            if self._task is not current or self._transport.is_closing():
                return
            self._idle = self._loop.create_future()
            await self._idle


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


def wrap_transport(cycle: RequestResponseCycle, http_version: str, *, is_post: bool) -> None:
    """Wrap the transport of answers that uvicorn sends in more than one packet, or frames for HTTP/1.1. Answers to
    methods other than POST may have no body for the head to wait for."""
    if http_version == "1.0":
        cycle.waiting_for_100_continue = False  # HTTP/1.0 has no such response
        cycle.transport = UnframedBody(cycle.transport)
    elif is_post and not cycle.waiting_for_100_continue:
        cycle.transport = HeldHead(cycle.transport)


MAX_HELD_BYTES = 16 << 10  # of one connection; more leaves at once, and the transport may pause the writer


class LateWrites(asyncio.Transport):
    """A client's connection whose small writes leave at the end of the event loop's turn, so that all requests which
    arrived together are worked on before the first answer leaves. The order of writes is kept, and closing sends what
    is held.

    A write wakes its reader. A reader on the same processor runs at once, and displaces from the caches what the next
    request needs: before an external server, this cost a fifth of the processor time of a request."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self.is_closing = transport.is_closing  # type: ignore[method-assign]  # is asked several times by a request
        self._loop = loop
        self._held: list[bytes | bytearray | memoryview[Any]] = []
        self._num_held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        held = self._held
        self._num_held_bytes += len(data)
        held.append(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.flush()
        elif len(held) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is held. Nothing goes to a connection that closes, as with any transport."""
        held = self._held
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        held.clear()
        self._num_held_bytes = 0

    def unwrap(self) -> asyncio.Transport:
        """Return the transport below, for a protocol that takes over the connection."""
        self.flush()
        return self._transport

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._num_held_bytes = 0
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._num_held_bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
