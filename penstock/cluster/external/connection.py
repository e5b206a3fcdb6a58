"""One connection to a server, and the answers that come over it: one exchange at a time.

The parser is llhttp's strict one, as in our own server. Any breach of the rules ends the connection: a second answer,
unexpected bytes, a wrong length. No answer can then be taken for the answer to another request. An answer that
readers could cut at different places ends the connection too, even where the parser has an opinion.

    HttpError
    ├── ConnectFailed    no connection: nothing was sent
    └── AnswerBroken     the answer ended early, was too slow, or is not HTTP
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import NoReturn, Protocol, cast

import httptools

from penstock.cluster.external.known_heads import KnownHead
from penstock.core.machine import notice_loss

SILENCE_TIMEOUT_S = 600.0  # between two pieces of an answer; the wait for the first may be as long
HEAD_TIMEOUT_S = 30.0  # from the first byte of a head to its last
END_TIMEOUT_S = 2.0  # from the last event of a stream to the end of its body
GONE_S = 30  # after which a machine that confirms nothing counts as gone; a busy server may take long to read
IDLE_TIMEOUT_S = 30.0  # of a connection that is kept for the next request
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
_WITHOUT_BODY = frozenset({204, 304})  # what a server sends behind such an answer may be a body all the same


class HttpError(Exception):
    """An exchange failed below the level of HTTP statuses."""


class ConnectFailed(HttpError):
    """There is no connection: nothing was sent."""


class AnswerBroken(HttpError):
    """The answer ended early, was too slow, or is not HTTP."""


class Owner(Protocol):
    """Keeps the connections to a server."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def keep(self, answer: Answer) -> None:
        """Keep a connection for the next request, or close it."""
        ...

    def forget(self, answer: Answer) -> None: ...


class Answer(asyncio.Protocol):
    """A connection, and the answer that comes over it. `HttpClient` makes and keeps them. A caller that gets an
    answer from `post` reads `status` and `headers`, then calls `deliver` or `read_all`, and always calls `release` at
    the end."""

    def __init__(self, client: Owner) -> None:
        self._client = client
        self._loop = client.loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # one for all requests: timers cost more than clocks
        self._heard_at = 0.0  # the last sign of life, or when the connection was kept
        self._silence_s = self._body_silence_s = SILENCE_TIMEOUT_S  # allowed from then on
        self._is_kept = False
        self._is_busy = False
        self.was_reused = False
        self._unsent = b""  # the request, until the event loop's turn ends
        self._unread = select.poll()  # says whether bytes wait that the event loop has not seen
        self._error: HttpError | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._known_head: KnownHead | None = None  # of the last answer that the parser has read in one piece
        self._pieces: list[bytes] = []  # that came before anybody asked for them
        self._sink: Callable[[bytes], None] | None = None
        self._sink_error: Exception | None = None
        self._reset()

    def _reset(self) -> None:
        """Expect an answer. A connection is only kept after an answer that left nothing behind."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._num_unread_bytes = 0  # since the last byte of the body: framing, or what stands behind the body
        self._num_headers = 0
        self._is_head_complete = False
        self._is_complete = False
        self._can_stay = False  # whether the server takes another request over this connection
        self._counts_silence_only = True  # else the time allowed is for all of the rest
        self._ends_at_close = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_begun(self) -> bool:
        """Return whether any byte of the answer is here."""
        return self._head_bytes > 0

    def begin(self, request: bytes, silence_s: float) -> None:
        """Send a request. The answer of the one before must be complete."""
        self.was_reused = self._is_kept
        if self._is_kept:
            self._is_kept = False
            self._reset()
        self._is_busy = True
        self._body_silence_s = silence_s
        self._allow_silence(silence_s)
        self._unsent = request
        self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Send the request at the end of the event loop's turn. Sending wakes the server, which may run on this
        processor at once: all that arrived together is worked on before."""
        request, self._unsent = self._unsent, b""
        if not request or self._transport is None or self._transport.is_closing():
            return
        if self.was_reused and self._unread.poll(0):
            self._fail("it sent more than was asked for")  # or it closed the connection
            return
        self._transport.write(request)

    async def wait_head(self) -> None:
        """Raises AnswerBroken."""
        while not self._is_head_complete:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def deliver(self, sink: Callable[[bytes], None]) -> None:
        """Hand over the body, piece by piece, as soon as each arrives. `sink` must not wait; what it raises ends the
        answer, and is raised here. Raises AnswerBroken."""
        self._sink = sink
        self._hand_over()
        while not (self._is_complete or self._sink_error or self._error):
            await self._wait()
        if self._sink_error is not None:
            raise self._sink_error
        if not self._is_complete:
            assert self._error is not None
            raise self._error

    def end_soon(self) -> None:
        """Give the server a moment to end a body of which the reader has all that it wants."""
        if not self._is_complete:
            self._counts_silence_only = False
            self._allow_silence(END_TIMEOUT_S)

    def take_body(self, max_bytes: int) -> bytes | None:
        """Return the whole body if it has come in one piece, as short answers do. Else `read_all` waits for it."""
        if self._is_complete and len(self._pieces) == 1 and len(self._pieces[0]) <= max_bytes:
            return self._pieces.pop()
        return None

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises AnswerBroken, also for a body of more than `max_bytes`, or one that takes as
        long, from its head on, as the server may be silent: nothing is shown before the end."""
        self._counts_silence_only = False
        pieces: list[bytes] = []
        num_bytes = 0

        def take(piece: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise AnswerBroken("its answer is too large")
            pieces.append(piece)

        await self.deliver(take)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _hand_over(self) -> None:
        """Give what has come to the sink, once there is one."""
        if self._sink is None or not self._pieces or self._sink_error is not None:
            return
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        try:
            self._sink(data)
        except Exception as error:  # the reader's own, which it is told where it waits
            self._sink_error = error
            self._wake()

    def release(self) -> None:
        """Keep the connection for the next request if the answer is complete. Otherwise close the connection, so that
        the server learns that no client waits."""
        if not self._is_busy:
            return
        self._is_busy = False
        self._sink = None
        is_whole = self._is_complete and not self._pieces and self._error is None and self._sink_error is None
        if is_whole and self._can_stay and self._has_sent_all():
            self._is_kept = True
            self._allow_silence(IDLE_TIMEOUT_S)
            self._client.keep(self)
        else:
            self.close()

    def _has_sent_all(self) -> bool:
        """Return whether the connection is open and the server took the whole request. A server that answers before
        it has read a request may read the rest as the next one."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def close(self) -> None:
        self._client.forget(self)
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _wait(self) -> asyncio.Future[None]:
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = AnswerBroken(message)
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    def _allow_silence(self, silence_s: float) -> None:
        """Allow `silence_s` from now on, and let the timer look soon enough."""
        self._heard_at = self._loop.time()
        self._silence_s = silence_s
        looks_too_late = self._timer is not None and self._timer.when() > self._heard_at + silence_s
        if self._timer is None or looks_too_late:
            self._stop_timer()
            self._timer = self._loop.call_later(min(silence_s, IDLE_TIMEOUT_S), self._check_silence)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_silence(self) -> None:
        self._timer = None
        left_s = self._heard_at + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(min(left_s, IDLE_TIMEOUT_S), self._check_silence)
        elif self._is_kept:
            self.close()
        else:
            self._fail("it was silent for too long")

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their type
        connected = transport.get_extra_info("socket")
        notice_loss(connected, GONE_S)
        self._unread.register(connected.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy or self._is_complete or self._unsent:
            self._fail("it sent more than was asked for")
            self._client.forget(self)
            return
        if not self._head_bytes and self._take_known(data):
            self._wake()
            return
        if not self._is_head_complete:
            self._head_bytes += len(data)
        elif self._counts_silence_only:
            self._heard_at = self._loop.time()
        self._num_unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("its answer is not HTTP")
            if self._is_complete:  # what stands behind an answer does not shorten it
                self._hand_over()
            return
        if not self._is_head_complete:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("the head of its answer is too large")
            elif self._head_bytes == len(data):  # the first piece: more must follow soon
                self._allow_silence(HEAD_TIMEOUT_S)
            return
        if self._num_unread_bytes > MAX_HEAD_BYTES and not self._is_complete:
            self._fail("it sends too much that is no body")
            return
        if self._pieces and self._sink is not None:
            self._hand_over()
        if self._is_complete or self._sink is None:
            self._wake()
        if self._can_stay and self._head_bytes == len(data) and self._num_headers == len(self.headers):
            self._known_head = KnownHead.of(data, self.status, self.headers)

    def _take_known(self, data: bytes) -> bool:
        """Take the whole answer that the data is without the parser, which has read the same head before. Returns
        False if the parser has to look."""
        known = self._known_head
        body = None if known is None else known.body(data)
        if known is None or body is None:
            return False
        self.status, self.headers = known.status, {**known.headers, b"content-length": b"%d" % len(body)}
        self._head_bytes = len(data)
        self._pieces.append(body)
        self._is_head_complete = self._is_complete = self._can_stay = True
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        self._stop_timer()
        if self._is_head_complete and self._ends_at_close and error is None and self._error is None:
            self._is_complete = True
        elif not self._is_complete and self._error is None:
            self._error = AnswerBroken("it closed the connection" if error is None else str(error))
        self._wake()

    # Methods that the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("too many headers")
        if self._is_head_complete:  # a trailer, which is ignored
            return
        name = name.lower()
        self.headers[name] = self.headers[name] + b", " + value if name in self.headers else value

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self.headers
        has_length, coding = b"content-length" in headers, headers.get(b"transfer-encoding")
        if status < 200:  # an interim answer: another head follows
            if status < 100 or has_length or coding is not None:
                self._refuse("its answer begins with a body that no answer has")
            headers.clear()
            return
        if coding is not None and coding.lower() != b"chunked":
            self._refuse("its answer has an encoding that was not requested")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._refuse("its answer has an encoding that was not requested")
        self.status = status
        self._is_head_complete = True
        self._heard_at, self._silence_s = self._loop.time(), self._body_silence_s
        self._ends_at_close = not has_length and coding is None

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        self._pieces.append(body)

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second answer")

    def on_message_complete(self) -> None:
        if self._is_head_complete:
            self._is_complete = True
            is_framed = not self._ends_at_close and self.status not in _WITHOUT_BODY
            self._can_stay = is_framed and self._parser.should_keep_alive()

    def _refuse(self, message: str) -> NoReturn:
        """End the connection from within the parser."""
        self._error = self._error or AnswerBroken(message)
        raise ValueError(message)
