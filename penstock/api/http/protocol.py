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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.api.http.bodies import MAX_DISCARDED_BYTES, ArrivingBody
from penstock.api.http.connections import (
    MAX_PIECE_PARTS,
    MAX_TURN_PARTS,
    MIN_PIECE_BYTES,
    PIPELINED_REQUEST_PARTS,
    TAKE_PLACE,
    TURN_BYTES,
    ClientTimer,
    ConnectionLimits,
    HeldFlow,
    IdleTimer,
    Place,
    StallTimer,
)
from penstock.api.http.context import ON_DEPARTURE
from penstock.api.http.exchange import (
    HTTP2_PREFACE,
    HTTP2_REFUSAL,
    WHOLE_ANSWERS,
    Exchange,
    LateWrites,
    RequestWorker,
    wrap_transport,
)
from penstock.api.http.heads import (
    MAX_HEADERS,
    ArrivingHead,
    KnownHead,
    head_too_large,
    head_without_upgrade,
    is_plain_target,
)
from penstock.api.http.websocket_protocol import BoundedWebSocketProtocol, last_answer
from penstock.core.errors import InvalidRequest, Overloaded, PenstockError, RequestTimeout
from penstock.core.gateway_config import ServerConfig

MAX_LOOKS_AT_HEADS = 4  # of a connection, in search of one that comes again


class BoundedHttpProtocol(HttpToolsProtocol):
    """A client's HTTP/1 connection, with limits. `limits` is set on subclasses, by `bounded_protocols`."""

    limits: ClassVar[ConnectionLimits]
    flow: HeldFlow
    _worker: RequestWorker
    _idle: IdleTimer
    _writes: LateWrites
    _place: Place

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._stall = StallTimer(self.limits)
        self._unread = memoryview(b"")  # bytes that have arrived and are not parsed yet
        self._num_parts = 0  # requests and pieces of bodies since the turn began
        self._piece_bytes = MIN_PIECE_BYTES
        self._timer: ClientTimer | None = None
        self._awaits_body = False
        self._awaits_head = True  # the first request is expected at once
        self._known_head: KnownHead | None = None  # of the last request that could be read again
        self._num_looks_left = MAX_LOOKS_AT_HEADS
        self._is_parsing = False  # whether the parser is within a request
        self._head = ArrivingHead()
        self._body = ArrivingBody()
        self._on_departure: Callable[[], None] | None = None  # callback of the request that is being answered
        self._exchange_extensions: dict[str, dict[object, object]] = {}
        self._extensions: dict[str, dict[object, object]] = {ON_DEPARTURE: {"watch": self.watch_departure}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport = self._writes = LateWrites(transport, self.loop)
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        self._worker = RequestWorker(self.loop, transport, self.tasks)
        self._idle = IdleTimer(self.loop, self.timeout_keep_alive, self._close)
        is_admitted = self.limits.admit()
        self._place = Place(self.limits.places, transport)
        if not is_admitted:
            self._refuse(Overloaded("This server has as many connections as it can hold.", retry_after_s=5.0))
            return
        self._place.rest()
        self._extensions[TAKE_PLACE] = {"take": self._place.take}
        self._exchange_extensions = self._extensions | {WHOLE_ANSWERS: {}}
        self._arm(self.limits.config.header_timeout_s, self._head_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.count(-1)
        self._place.leave()
        self._unread = memoryview(b"")
        self._disarm()
        self._stall.stop()
        super().connection_lost(exc)
        self._worker.client_left()
        self._worker.wake()
        self._idle.cancel()
        if self._on_departure is not None:
            self._on_departure()
        self._forget_requests()

    def _forget_requests(self) -> None:
        """Drop what refers back to this object: only a full garbage collection, which is rare, frees such cycles."""
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()
        self._extensions = self._exchange_extensions = {}

    def watch_departure(self, on_departure: Callable[[], None] | None) -> None:
        """Call `on_departure` when the client disconnects. One request of a connection is answered at a time."""
        self._on_departure = on_departure
        if on_departure is not None:
            if self.flow.read_paused:  # by a large body: no disconnect would be seen
                self.flow.resume_reading()
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
            if self._is_parsing or not self._take_known(data):
                self._read(data)
            turns.spend(self.loop, self._num_parts)

    def _take_known(self, data: bytes) -> bool:
        """Answer the request that the data is without the parser, which has read the same head before. Returns False
        if the parser has to look."""
        if self._known_head is None or self.transport.is_closing():
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        found = self._known_head.request(data)
        if found is None:
            return False
        self._num_looks_left = MAX_LOOKS_AT_HEADS
        self._num_parts += 1
        self._idle.stop()
        self._disarm()
        self._awaits_head = False
        super().on_message_begin()
        self.headers[:], body = found
        self._begin_exchange(self._known_head.target, keep_alive=not self.limits.is_leaving, whole_body=body)
        return True

    def _read_on_soon(self) -> None:
        self.flow.hold()
        self.limits.turns.wait(self.loop, self._read_on)

    def _read_on(self) -> None:
        """Parse the bytes that have arrived, piece by piece. Parsing stops after many requests or chunks, so that
        other connections have their turn, and while pipelined requests wait for their answers."""
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
            cycle = self.cycle  # an answered request reads no more of its body, and the rest is dropped
            is_full = cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
            self.flow.release(resume=not (is_full or self.pipeline))

    def _read(self, data: bytes) -> None:
        """Parse one piece. Timers start only for a request that is incomplete after it: most requests arrive
        whole."""
        if self.transport.is_closing():
            return
        if data.startswith(HTTP2_PREFACE) and self.scope is None:
            self._refuse_http2()
            return
        is_first = not self._is_parsing  # whether a request can begin with the first byte
        self._head.next_chunk(len(data))
        self._feed(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if is_first and not self._is_parsing and self._num_looks_left and type(self.cycle) is Exchange:
            self._num_looks_left -= 1
            self._known_head = KnownHead.of(data, self.url, self.headers)
        if self._awaits_body:
            self._body.num_framed_bytes += len(data)
            self._check_framing()
            if self._timer is None and not self.transport.is_closing():
                self._arm(self.limits.config.body_timeout_s, self._body_timed_out)
        elif self._awaits_head or self._is_idle_without_timer:
            if self._timer is None:
                self._arm(self.limits.config.header_timeout_s, self._head_timed_out)
            self._check_head_size(self._head.count_chunk())

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

    def _should_upgrade(self) -> bool:
        """Return whether the request begins a WebSocket, which only a GET can."""
        return self.parser.get_method() == b"GET" and super()._should_upgrade()

    @property
    def _offers_upgrade(self) -> bool:
        """Return whether the request offers an upgrade that is ignored, such as to HTTP/2 over plain TCP."""
        is_offer = bool(self.parser.should_upgrade()) and self._get_upgrade() is not None
        return is_offer and not self._should_upgrade()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer to change the protocol. A server may ignore the offer (RFC 9110),
        but the parser skips the body of a request that makes one."""
        head = head_without_upgrade(self.parser.get_method(), self.url, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._feed(head + rest)

    def _refuse_http2(self) -> None:
        """Tell a client that starts with HTTP/2 to use HTTP/1.1, in a frame of HTTP/2."""
        self._disarm()
        self.limits.metrics.num_malformed += 1
        self.transport.write(HTTP2_REFUSAL)
        self._close()

    @property
    def _is_idle_without_timer(self) -> bool:
        """Return whether the connection waits for a request with no timer: line breaks between requests stop the idle
        timer, and start no request."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle and not self._idle.is_running

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._place.rest()
        self._worker.answer(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._place.rest()
            self._stall.start_at_close(self.loop, self.transport)
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        work = self.pipeline.pop() if self.pipeline else None
        if self._unread and not self.pipeline:
            self._read_on_soon()
        if work is not None:
            self.limits.turns.wait(self.loop, partial(self._start_pipelined, *work))
            return
        self._place.rest()
        self._idle.start()

    def _start_pipelined(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Answer a request that arrived before the previous request was answered."""
        if not self.transport.is_closing():
            self.limits.turns.spend(self.loop, PIPELINED_REQUEST_PARTS)
            self._start_asgi_task(cycle, app)

    def _unset_keepalive_if_required(self) -> None:
        self._idle.stop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_parts += 1
        self._awaits_head = self._is_parsing = True
        self._head.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits_body:
            return  # a trailer, which must not pass for a header: proxies check headers only
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self._head.add(name, value)
        headers = self.headers
        headers.append((name, value))
        if len(headers) > MAX_HEADERS:
            self._check_head_size(self.limits.config.max_header_bytes + 1)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:
            return  # `_feed` parses the request again
        self._awaits_head = False
        self._disarm()
        if self._head.may_exceed(self.limits.config.max_header_bytes):
            self._check_head_size(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
            if self.transport.is_closing():
                return
        http_version = self.parser.get_http_version()
        self._head.check(http_version, self.url)
        self._awaits_body = True
        self._body = ArrivingBody()
        self.scope["extensions"] = self._extensions
        is_post = self.parser.get_method() == b"POST"
        if is_post and http_version == "1.1" and is_plain_target(self.url):
            self._begin_exchange(self.url, keep_alive=self.parser.should_keep_alive())
        else:
            super().on_headers_complete()
            if self.cycle is not None:
                wrap_transport(self.cycle, http_version, is_post=is_post)
                if self.expect_100_continue:  # as in `Exchange`, which knows whether the body was asked for
                    self.cycle.keep_alive = False
        if self.limits.is_leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def _begin_exchange(self, target: bytes, *, keep_alive: bool, whole_body: bytes | None = None) -> None:
        """Handle the head of a plain request, as uvicorn does, without the checks for special cases."""
        scope = self.scope
        path, _, query = target.partition(b"?")
        scope["method"] = "POST"
        scope["path"], scope["raw_path"], scope["query_string"] = path.decode("ascii"), path, query
        scope["extensions"] = self._exchange_extensions
        before = self.cycle
        self.cycle = Exchange(
            scope,
            self.transport,
            self.flow,
            self.server_state.default_headers,
            self.on_response_complete,
            keep_alive=keep_alive,
            whole_body=whole_body,
            expect_100_continue=whole_body is None and self.expect_100_continue,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # a pipelined request
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        self._body.num_content_bytes += len(body)
        if self.cycle is not None and self.cycle.response_complete:
            # The rest of a refused body is read and dropped: many clients read the refusal only after they sent all.
            self._body.num_discarded_bytes += len(body)
            if self._body.num_discarded_bytes > MAX_DISCARDED_BYTES:
                self._close()
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._awaits_body = self._is_parsing = False
        self._disarm()
        if self.cycle is not None:
            super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self.transport = self._writes.unwrap()
        self._disarm()
        self._worker.wake()
        self._idle.cancel()
        self.limits.count(-1)  # the WebSocket protocol counts the connection from now on
        self._place.leave()
        super().handle_websocket_upgrade()

    def eof_received(self) -> None:
        """The client has gone: the connection closes with the return of this method, and takes no answer any more."""
        self._worker.client_left()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start(self.loop, self.transport, self._place.holder)

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse_malformed(InvalidRequest("The request is not valid HTTP."))

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
        if self.flow.read_paused:  # the rest of the head may wait behind requests that are being answered
            self._arm(self.limits.config.header_timeout_s, self._head_timed_out)
            return
        self._time_out("The request's headers did not arrive in time.")

    def _body_timed_out(self) -> None:
        """Refuse a client that sends too slowly. A paused connection waits for the application, not for the
        client."""
        is_flowing = self._body.has_grown()
        if is_flowing or self.flow.read_paused:
            self._arm(self.limits.config.body_timeout_s, self._body_timed_out)
            return
        self._time_out("The request's body did not arrive in time.")

    def _time_out(self, message: str) -> None:
        self.limits.metrics.num_timed_out += 1
        self._refuse(RequestTimeout(message))

    def _check_head_size(self, num_bytes: int) -> None:
        limit = self.limits.config.max_header_bytes
        if num_bytes > limit and not self.transport.is_closing():
            self._refuse_malformed(head_too_large(limit))

    def _check_framing(self) -> None:
        """End a connection whose client sends endless trailers or chunk extensions, which the parser collects."""
        if self._body.is_mostly_framing and not self.transport.is_closing():
            self._refuse_malformed(InvalidRequest("The body of the request has too much framing around it."))

    def _refuse(self, error: PenstockError) -> None:
        """Send the error unless an answer has been sent already, and close."""
        self._disarm()
        # A request may be answered before its body has ended: the client would take a second answer for the answer to
        # another request.
        is_answered = (
            self.cycle is not None
            and self.cycle.response_started
            and (self._awaits_body or not self.cycle.response_complete)
        )
        if not is_answered:
            self.transport.write(last_answer(error))
        self._close()

    def _close(self) -> None:
        """Close the connection when the client has read what was written, and soon in any case."""
        self.transport.close()
        self._stall.start_at_close(self.loop, self.transport)


def bounded_protocols(
    config: ServerConfig,
) -> tuple[type[BoundedHttpProtocol], type[BoundedWebSocketProtocol], ConnectionLimits]:
    """Return protocol classes for uvicorn. Uvicorn creates the instances itself, so the limits are class
    attributes."""
    limits = ConnectionLimits.of(config)
    http = type("BoundedHttpProtocol", (BoundedHttpProtocol,), {"limits": limits})
    websocket = type("BoundedWebSocketProtocol", (BoundedWebSocketProtocol,), {"limits": limits})
    return http, websocket, limits
