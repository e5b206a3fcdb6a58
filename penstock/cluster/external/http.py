"""A small HTTP/1.1 client for one server: connections that are kept alive, one exchange at a time on each.

Knows no JSON and no events. The parser is llhttp's strict one, as in our own server. What does not fit the rules (a
second answer, bytes that nobody asked for, a length that is not kept) ends the connection, so that no answer can be
taken for the answer to another request. Used from one event loop.

    HttpError
    ├── ConnectFailed    no connection: nothing was sent
    └── AnswerBroken     the answer ended early, was too slow, or is not HTTP
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

import certifi
import httptools

from penstock.core.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 600.0  # between two pieces of an answer; the wait for the first may be as long
HEAD_TIMEOUT_S = 30.0  # from the first byte of a head to its last
IDLE_TIMEOUT_S = 30.0  # of a connection that is kept for the next request
MAX_IDLE_CONNECTIONS = 64
MAX_KEPT_HEADS = 64
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200


class HttpError(Exception):
    """An exchange failed below the level of HTTP statuses."""


class ConnectFailed(HttpError):
    """There is no connection: nothing was sent."""


class AnswerBroken(HttpError):
    """The answer ended early, was too slow, or is not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, from its URL."""

    host: str
    port: int
    is_tls: bool
    authority: str  # for the header Host
    path: str  # before the paths of requests
    credentials: str | None  # of the URL, as basic authentication
    names_port: bool = True  # whether the URL does

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises ConfigError for a URL without a host, or with characters that could end a line of HTTP."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or not _is_plain(url):
            raise ConfigError(f"The external server {url!r} has no URL that begins with http:// or https://.")
        is_tls = parts.scheme == "https"
        credentials = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            credentials = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return cls(
            host=host,
            port=port or (443 if is_tls else 80),
            is_tls=is_tls,
            authority=parts.netloc.rpartition("@")[2],
            path=parts.path.rstrip("/"),
            credentials=credentials,
            names_port=port is not None,
        )


def _is_plain(text: str) -> bool:
    """Say whether a text can stand in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


class Answer(asyncio.Protocol):
    """A connection, and the answer that comes over it. `HttpClient` makes and keeps them. Whoever gets one from
    `post` looks at `status` and `headers`, then calls `deliver` or `read_all`, and `release` at the end, however it
    ended."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._loop = client.loop
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # one for all requests: timers cost more than clocks
        self._heard_at = 0.0  # the last sign of life, or when the connection was kept
        self._silence_s = self._body_silence_s = SILENCE_TIMEOUT_S  # allowed from then on
        self._is_kept = False
        self._is_busy = False
        self._unsent = b""  # the request, until the event loop's turn ends
        self._error: HttpError | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.was_reused = False
        self._head_bytes = 0
        self._num_unread_bytes = 0  # since the last byte of the body: framing, or what stands behind the body
        self._num_headers = 0
        self._is_head_complete = False
        self._is_complete = False
        self._can_stay = False  # whether the server takes another request over this connection
        self._ends_at_close = False
        self._pieces: list[bytes] = []  # that came before anybody asked for them
        self._sink: Callable[[bytes], None] | None = None
        self._sink_error: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_begun(self) -> bool:
        """Say whether any byte of the answer is here."""
        return self._head_bytes > 0

    def begin(self, request: bytes, silence_s: float) -> None:
        """Send a request. The answer of the one before must be complete."""
        assert self._transport is not None
        self.was_reused = self._is_kept
        if self._is_kept:
            self._is_kept = False
            self._reset()
            self.was_reused = True
        self._is_busy = True
        self._body_silence_s = silence_s
        self._allow_silence(silence_s)
        self._unsent = request
        self._loop.call_soon(self._send)

    def _send(self) -> None:
        """Send the request at the end of the event loop's turn. Sending wakes the server, which may run on this
        processor at once: all that arrived together is worked on before."""
        request, self._unsent = self._unsent, b""
        if request and self._transport is not None and not self._transport.is_closing():
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

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the whole body. Raises AnswerBroken, also for a body of more than `max_bytes`."""
        if self._is_complete and len(self._pieces) == 1 and len(self._pieces[0]) <= max_bytes:
            return self._pieces.pop()  # as short answers come
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
        """Keep the connection for the next request, if this one has come to its end; else close it, by which the
        server learns that nobody waits any more."""
        if not self._is_busy:
            return
        self._is_busy = False
        self._sink = None
        is_whole = self._is_complete and not self._pieces and self._error is None and self._sink_error is None
        if is_whole and self._can_stay and self.is_open:
            self._is_kept = True
            self._allow_silence(IDLE_TIMEOUT_S)
            self._client.keep(self)
        else:
            self.close()

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

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their type

    def data_received(self, data: bytes) -> None:
        if not self._is_busy or self._is_complete or self._unsent:
            self._fail("it sent more than was asked for")
            self._client.forget(self)
            return
        if self._is_head_complete:
            self._heard_at = self._loop.time()
        else:
            self._head_bytes += len(data)
        self._num_unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("its answer is not HTTP")
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

    def connection_lost(self, error: Exception | None) -> None:
        self._client.forget(self)
        self._stop_timer()
        if self._is_head_complete and self._ends_at_close and error is None and self._error is None:
            self._is_complete = True
        elif not self._is_complete and self._error is None:
            self._error = AnswerBroken("it closed the connection" if error is None else str(error))
        self._wake()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError("too many headers")
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer: another head follows
            self.headers.clear()
            return
        self.status = status
        self._is_head_complete = True
        self._heard_at, self._silence_s = self._loop.time(), self._body_silence_s
        headers = self.headers
        self._ends_at_close = b"content-length" not in headers and b"transfer-encoding" not in headers

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        self._pieces.append(body)

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("a second answer")

    def on_message_complete(self) -> None:
        if self._is_head_complete:
            self._is_complete = True
            self._can_stay = not self._ends_at_close and self._parser.should_keep_alive()


class HttpClient:
    """Sends requests to one server. `headers` go with every request. `connect_to` is an address of the URL's host, if
    not any will do, and `connect_port` a port of its own. `trusts` is a file with the only authority that may vouch
    for the server. Call `close` at the end."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        connect_to: str = "",
        connect_port: int | None = None,
        trusts: Path | None = None,
    ) -> None:
        self.address = Address.of(url)
        self._connect_to = connect_to or self.address.host
        self._connect_port = connect_port or self.address.port
        lines = {"host": self.address.authority, "accept-encoding": "identity", "user-agent": "penstock"}
        if self.address.credentials is not None:
            lines["authorization"] = self.address.credentials
        lines |= headers
        for name, value in lines.items():
            is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
            if not (is_name and value.isascii() and value.isprintable()):
                raise ConfigError(
                    f"The header {name!r} for {self.address.authority} has forbidden characters."
                )
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._heads: dict[tuple[str, str, str | None], bytes] = {}
        self._tls = _trusting(trusts) if self.address.is_tls else None
        self._idle: list[Answer] = []
        self._open: set[Answer] = set()
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def get(self, path: str, *, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
        """Return the status and the body, of at most `max_bytes`. Raises HttpError."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.send("GET", path)
                try:
                    return answer.status, await answer.read_all(max_bytes)
                finally:
                    answer.release()
        except TimeoutError as error:
            raise AnswerBroken("it did not answer in time") from error

    def post(
        self, path: str, body: bytes, *, silence_s: float = SILENCE_TIMEOUT_S
    ) -> Coroutine[Any, Any, Answer]:
        """Send a JSON body, and wait for the head of the answer. The caller releases the answer. Raises HttpError."""
        return self.send("POST", path, body, silence_s=silence_s)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        content_type: str = "application/json",
        silence_s: float = SILENCE_TIMEOUT_S,
    ) -> Coroutine[Any, Any, Answer]:
        """As `post`, with any method and content type."""
        if body is None:
            return self._send(self._head_of(method, path) + b"\r\n", silence_s)
        request = b"%bcontent-length: %d\r\n\r\n%b" % (
            self._head_of(method, path, content_type),
            len(body),
            body,
        )
        return self._send(request, silence_s)

    def _head_of(self, method: str, path: str, content_type: str | None = None) -> bytes:
        """Return the lines of a head that depend on no body. Most requests to a server have the same."""
        key = method, path, content_type
        head = self._heads.get(key)
        if head is None:
            typed = "" if content_type is None else f"content-type: {content_type}\r\n"
            line = f"{method} {self.address.path}{path} HTTP/1.1\r\n"
            head = line.encode("ascii") + self._head + typed.encode("ascii")
            if len(self._heads) >= MAX_KEPT_HEADS:
                self._heads.clear()
            self._heads[key] = head
        return head

    async def close(self) -> None:
        self._is_closed = True
        for answer in tuple(self._open):
            answer.close()

    def keep(self, answer: Answer) -> None:
        if self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            answer.close()
        else:
            self._idle.append(answer)

    def forget(self, answer: Answer) -> None:
        if answer in self._open:
            self._open.discard(answer)
            if answer in self._idle:
                self._idle.remove(answer)

    async def _send(self, request: bytes, silence_s: float = SILENCE_TIMEOUT_S) -> Answer:
        while True:
            answer = self._kept() or await self._connect()
            answer.begin(request, silence_s)
            try:
                await answer.wait_head()
            except AnswerBroken:
                was_stale = answer.was_reused and not answer.has_begun
                answer.release()
                # A server may close a connection that it kept just when it is used again. Nothing was answered, and
                # the next connection is another one.
                if self._is_closed or not was_stale:
                    raise
            except BaseException:
                answer.release()
                raise
            else:
                return answer

    def _kept(self) -> Answer | None:
        """Return the connection that was used last, because those before it may be left to end."""
        while self._idle:
            answer = self._idle.pop()
            if answer.is_open:
                return answer
        return None

    async def _connect(self) -> Answer:
        address = self.address
        answer = Answer(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.loop.create_connection(
                    lambda: answer,
                    self._connect_to,
                    self._connect_port,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else address.host,
                )
        except TimeoutError as error:
            raise ConnectFailed("no connection in time") from error
        except (OSError, UnicodeError) as error:  # the latter for a name that can be none
            raise ConnectFailed(_plainly(error)) from error
        self._open.add(answer)
        return answer


def _plainly(error: OSError | UnicodeError) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _trusting(only: Path | None) -> ssl.SSLContext:
    """Trusts `only` this authority, or the certificates of the system (`SSL_CERT_FILE` counts) and those of the usual
    authorities."""
    if only is not None:
        return ssl.create_default_context(cafile=str(only))
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
