"""Bounds that uvicorn lacks against hostile clients: time limits for heads, bodies and reading, and size limits for
heads and for the number of connections.

Sits below ASGI, because a request that never becomes complete never reaches an application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.api.http.answer_transports import HeldHead, UnframedBody
from penstock.api.http.connections import HELD_UP_S, ClientTimer, ConnectionLimits, StallTimer
from penstock.api.http.context import ON_DEPARTURE
from penstock.api.http.errors import error_body
from penstock.api.http.exchange import Exchange
from penstock.api.http.heads import SINGLE_HEADERS, check_head, is_plain_target
from penstock.api.http.turns import (
    MAX_PIECE_PARTS,
    MAX_TURN_PARTS,
    MIN_PIECE_BYTES,
    PIPELINED_REQUEST_PARTS,
    TURN_BYTES,
    HeldFlow,
)
from penstock.api.http.websocket_protocol import BoundedWebSocketProtocol
from penstock.core.errors import HeadTooLarge, InvalidRequest, Overloaded, PenstockError, RequestTimeout
from penstock.core.gateway_config import ServerConfig

MIN_BODY_BYTES = 16 << 10  # that must arrive in each `body_timeout_s`
MAX_DISCARDED_BYTES = 64 << 20
MAX_FRAMING_BYTES = 1 << 20  # of chunks and trailers; small chunks may have more, in proportion to the body
MAX_FRAMING_FACTOR = 16
MAX_HEADERS = 100
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
# An empty SETTINGS frame, and GOAWAY with the code HTTP_1_1_REQUIRED (RFC 9113).
HTTP2_REFUSAL = bytes.fromhex("000000 04 00 00000000000008 07 00 00000000 00000000 0000000d")


class BoundedHttpProtocol(HttpToolsProtocol):
    limits: ClassVar[ConnectionLimits]
    flow: HeldFlow

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._stall = StallTimer(self.limits)
        self._unread = memoryview(b"")  # what has arrived and is not parsed yet
        self._num_parts = 0  # requests and pieces of bodies since the turn began
        self._piece_bytes = MIN_PIECE_BYTES
        self._timer: ClientTimer | None = None
        self._singles: dict[bytes, bytes] = {}  # the headers of which a request may have one, by name
        self._awaits_body = False
        self._awaits_head = True  # a new connection is there for a reason
        self._began_in_this_chunk = False
        self._num_chunk_bytes = 0
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._num_discarded_bytes = 0
        self._num_content_bytes = 0  # of the whole body
        self._num_framed_bytes = 0  # of the whole body as it came, with its framing
        self._idle_since: float | None = None  # when the last answer ended, until something arrives
        self._worker: asyncio.Task[None] | None = None  # answers the requests of this connection
        self._work: tuple[RequestResponseCycle, ASGI3Application] | None = None  # that the worker takes next
        self._worker_waits: asyncio.Future[None] | None = None
        self._on_departure: Callable[[], None] | None = None  # of the request that is being answered
        self._extensions: dict[str, dict[object, object]] = {ON_DEPARTURE: {"watch": self.watch_departure}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        if self.limits.count(+1) > self.limits.config.max_connections:
            self.limits.metrics.num_refused += 1
            self._refuse(Overloaded("This server has as many connections as it can hold.", retry_after_s=5.0))
            return
        self._arm(self.limits.config.header_timeout_s, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.count(-1)
        self._unread = memoryview(b"")
        self._disarm()
        self._stall.stop()
        super().connection_lost(exc)
        self._dismiss()
        if self._on_departure is not None:
            self._on_departure()

    def watch_departure(self, on_departure: Callable[[], None] | None) -> None:
        """Call `on_departure` when the client goes away. One request of a connection is answered at a time."""
        self._on_departure = on_departure
        if on_departure is not None:
            self.flow.resume_reading()  # a large body may have paused it, and only reading shows a departure
            if self.transport.is_closing():
                self.loop.call_soon(on_departure)

    def data_received(self, data: bytes) -> None:
        turns = self.limits.turns
        self._num_parts = 0
        if self._unread or len(data) > TURN_BYTES or not turns.has_room:
            self._unread = memoryview(bytes(self._unread) + data)
            if self.flow.is_held:
                return
            if turns.has_room:
                self._read_on()
            else:
                self._read_on_soon()
        else:
            self._read(data)
            turns.spend(self.loop, self._num_parts)

    def _read_on_soon(self) -> None:
        self.flow.hold()
        self.limits.turns.wait(self.loop, self._read_on)

    def _read_on(self) -> None:
        """Parse what has arrived, piece by piece. After many requests or chunks, other connections have their turn.
        After requests that did not wait for the answers before theirs, those answers do."""
        if self.transport.is_closing():
            self._unread = memoryview(b"")
            return
        self.flow.hold()
        self._num_parts = 0
        while self._unread and not self.pipeline and self._num_parts <= MAX_TURN_PARTS:
            size, num_before = self._piece_bytes, self._num_parts
            piece, self._unread = bytes(self._unread[:size]), self._unread[size:]
            self._read(piece)
            has_small_parts = self._num_parts - num_before > MAX_PIECE_PARTS
            self._piece_bytes = MIN_PIECE_BYTES if has_small_parts else min(2 * size, TURN_BYTES)
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                self._unread = memoryview(b"")
        self.limits.turns.spend(self.loop, self._num_parts)
        if self._unread and not self.pipeline:
            self._read_on_soon()
        elif not self._unread:
            is_full = self.cycle is not None and len(self.cycle.body) > HIGH_WATER_LIMIT
            self.flow.let_go(resume=not (is_full or self.pipeline))

    def _read(self, data: bytes) -> None:
        """A request that arrives in one piece, as most do, costs no timer."""
        if self.transport.is_closing():
            return
        if data.startswith(HTTP2_PREFACE) and self.scope is None:
            self._refuse_http2()
            return
        self._began_in_this_chunk = False
        self._num_chunk_bytes = len(data)
        self._feed(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._awaits_body:
            self._num_framed_bytes += len(data)
            self._check_framing()
            if self._timer is None and not self.transport.is_closing():
                self._arm(self.limits.config.body_timeout_s, self._body_timed_out)
        elif self._awaits_head or self._is_idle_without_timer:
            if self._timer is None:
                self._arm(self.limits.config.header_timeout_s, self._head_timed_out)
            # What came with the end of an earlier request is not counted: no chunk is larger than a read buffer.
            if not self._began_in_this_chunk:
                self._num_head_bytes += len(data)
                self._check_head_size(self._num_head_bytes)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, InvalidRequest):  # raised by a method that the parser called
                self._refuse_malformed(error.__context__)
            else:
                self.send_400_response(str(error))
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self._offers_upgrade:
                self._go_on_without_upgrade(data[upgrade.args[0] :])

    @property
    def _offers_upgrade(self) -> bool:
        """Whether a request offers an upgrade to a protocol that is not supported, such as HTTP/2 over plain TCP."""
        return bool(self.parser.should_upgrade()) and self._get_upgrade() not in (None, b"websocket")

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the request again as if it did not offer to change the protocol. An offer may be ignored (RFC 9110),
        but the parser leaves out the body of a request that makes one."""
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_HEADERS)
            if name not in UPGRADE_HEADERS and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._feed(b"".join(head) + b"\r\n" + rest)

    def _refuse_http2(self) -> None:
        """Tell a client that begins with HTTP/2, in HTTP/2, to use HTTP/1.1 instead."""
        self._disarm()
        self.limits.metrics.num_malformed += 1
        self.transport.write(HTTP2_REFUSAL)
        self.transport.close()

    @property
    def _is_idle_without_timer(self) -> bool:
        """Line breaks between requests end the idle time, and begin nothing."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and self._idle_since is None

    # One task and one timer for all requests of a connection: either costs more than what a request does with it.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._work = cycle, app
        if not self._wake_worker():  # there is none, or it has not yet let go of the request before
            self._worker = self.loop.create_task(self._answer_requests())
            self._worker.add_done_callback(self.tasks.discard)
            self.tasks.add(self._worker)

    async def _answer_requests(self) -> None:
        me = asyncio.current_task()
        while self._work is not None and self._worker is me:
            (cycle, app), self._work = self._work, None
            await cycle.run_asgi(app)
            if self._worker is not me or self.transport.is_closing():
                return
            self._worker_waits = self.loop.create_future()
            await self._worker_waits

    def _wake_worker(self) -> bool:
        """Whether a worker waited. One that was cancelled meanwhile does not."""
        waits, self._worker_waits = self._worker_waits, None
        if waits is None or waits.done():
            return False
        waits.set_result(None)
        return True

    def _dismiss(self) -> None:
        """End a worker that waits, and the timer. A worker that is busy ends by itself."""
        self._wake_worker()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        work = self.pipeline.pop() if self.pipeline else None
        if self._unread and not self.pipeline:
            self._read_on_soon()
        if work is not None:
            self.limits.turns.wait(self.loop, partial(self._start_pipelined, *work))
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_for_idleness_after(self.timeout_keep_alive)

    def _start_pipelined(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Answer a request that arrived before the answer to the one in front of it was sent."""
        if not self.transport.is_closing():
            self.limits.turns.spend(self.loop, PIPELINED_REQUEST_PARTS)
            self._start_asgi_task(cycle, app)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def _look_for_idleness_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None or self.transport.is_closing():
            return  # the end of the next answer starts the timer again
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_for_idleness_after(left_s)
        elif left_s < -HELD_UP_S:  # this process stood still: a request may have come meanwhile
            self._idle_since = self.loop.time()
            self._look_for_idleness_after(self.timeout_keep_alive)
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_parts += 1
        self._awaits_head = True
        self._began_in_this_chunk = True
        self._num_head_bytes = 0
        self._singles.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits_body:
            return  # a trailer, which must not pass for a header: proxies check headers only
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        if name in SINGLE_HEADERS:
            if name in self._singles:
                raise InvalidRequest(f"The request has more than one header {name.decode()!r}.")
            self._singles[name] = value
        headers = self.headers
        headers.append((name, value))
        if len(headers) > MAX_HEADERS:
            self._check_head_size(self.limits.config.max_header_bytes + 1)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:
            return  # the request is read once more
        self._awaits_head = False
        self._disarm()
        # The head of most requests comes in one chunk, with all else that the chunk holds.
        if not self._began_in_this_chunk or self._num_chunk_bytes > self.limits.config.max_header_bytes:
            self._check_head_size(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
            if self.transport.is_closing():
                return
        http_version = self.parser.get_http_version()
        check_head(http_version, self.url, self._singles)
        self._awaits_body = True
        self._num_body_bytes = 0
        self._num_discarded_bytes = 0
        self._num_content_bytes = 0
        self._num_framed_bytes = 0
        self.scope["extensions"] = self._extensions
        is_post = self.parser.get_method() == b"POST"
        if is_post and http_version == "1.1" and is_plain_target(self.url):
            self._begin_exchange()
        else:
            super().on_headers_complete()
            self._wrap_transport(http_version, is_post=is_post)
        if self.limits.is_leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def _wrap_transport(self, http_version: str, *, is_post: bool) -> None:
        """Answers to other methods than POST may have no body that the head could wait for."""
        if self.cycle is None:
            return
        if http_version == "1.0":
            self.cycle.waiting_for_100_continue = False  # which HTTP/1.0 does not have
            self.cycle.transport = UnframedBody(self.transport)
        elif is_post and not self.expect_100_continue:
            self.cycle.transport = HeldHead(self.transport)

    def _begin_exchange(self) -> None:
        """Handle the head of a plain request, as uvicorn does, without the checks for special cases."""
        scope = self.scope
        path, _, query = self.url.partition(b"?")
        scope["method"] = "POST"
        scope["path"], scope["raw_path"], scope["query_string"] = path.decode("ascii"), path, query
        before = self.cycle
        self.cycle = Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # the client did not wait for the answer to the request before
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        self._num_body_bytes += len(body)
        self._num_content_bytes += len(body)
        if self.cycle is not None and self.cycle.response_complete:
            # The rest of a refused body is read and forgotten, so that its sender comes to read the refusal.
            self._num_discarded_bytes += len(body)
            if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._awaits_body = False
        self._disarm()
        if self.cycle is not None:
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._disarm()
        self._dismiss()
        self.limits.count(-1)  # its new protocol counts it from here on
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start(self.loop, self.transport)

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse_malformed(InvalidRequest("What arrived is not valid HTTP."))

    def _refuse_malformed(self, error: PenstockError) -> None:
        self.limits.metrics.num_malformed += 1
        self._refuse(error)

    def _arm(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        self._disarm()
        self._timer = ClientTimer(self.loop, timeout_s, on_timeout)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_timed_out(self) -> None:
        if self.flow.read_paused:  # the rest of the head may be here, behind requests that are being answered
            self._arm(self.limits.config.header_timeout_s, self._head_timed_out)
            return
        self._time_out("The request's headers did not arrive in time.")

    def _body_timed_out(self) -> None:
        """A slow application is not the client's fault; a client that sends drop by drop is."""
        is_paused = self.flow.read_paused
        is_flowing = self._num_body_bytes >= MIN_BODY_BYTES
        if is_paused or is_flowing:
            self._num_body_bytes = 0
            self._arm(self.limits.config.body_timeout_s, self._body_timed_out)
            return
        self._time_out("The request's body did not arrive in time.")

    def _time_out(self, message: str) -> None:
        self.limits.metrics.num_timed_out += 1
        self._refuse(RequestTimeout(message))

    def _check_head_size(self, num_bytes: int) -> None:
        limit = self.limits.config.max_header_bytes
        if num_bytes > limit and not self.transport.is_closing():
            self.limits.metrics.num_malformed += 1
            self._refuse(
                HeadTooLarge(
                    f"The request's head is larger than {limit} bytes, or has more than {MAX_HEADERS} headers."
                )
            )

    def _check_framing(self) -> None:
        """End a connection whose client sends endless trailers or chunk extensions, which the parser collects."""
        most = MAX_FRAMING_BYTES + MAX_FRAMING_FACTOR * self._num_content_bytes
        if self._num_framed_bytes - self._num_content_bytes > most and not self.transport.is_closing():
            self.limits.metrics.num_malformed += 1
            self._refuse(InvalidRequest("The body of the request has too much framing around it."))

    def _refuse(self, error: PenstockError) -> None:
        """Answer where nothing has been answered yet, and close."""
        self._disarm()
        # An answer that came before the end of its request's body is an answer: a second one would be taken for the
        # answer to something else.
        is_answered = (
            self.cycle is not None
            and self.cycle.response_started
            and (self._awaits_body or not self.cycle.response_complete)
        )
        if not is_answered:
            body = error_body(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def bounded_protocols(
    config: ServerConfig,
) -> tuple[type[BoundedHttpProtocol], type[BoundedWebSocketProtocol], ConnectionLimits]:
    """Protocol classes for uvicorn, which makes the instances itself and so must find the limits on the class."""
    limits = ConnectionLimits.of(config)
    http = type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
    websocket = type("BoundedWebSocketProtocol", (BoundedWebSocketProtocol,), {"limits": limits})
    return http, websocket, limits
