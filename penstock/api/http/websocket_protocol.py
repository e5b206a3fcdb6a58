"""Bounds for WebSockets, as `protocol.py` has them for requests.

Frames are parsed in turns with other connections. Bytes of messages that have not arrived in full are counted.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from starlette.types import Scope
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request

from penstock.api.http.connections import (
    MAX_TURN_PARTS,
    MIN_PIECE_BYTES,
    TAKE_PLACE,
    TURN_BYTES,
    ConnectionLimits,
    Place,
    StallTimer,
)
from penstock.api.http.context import state_of
from penstock.api.http.errors import error_body
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.identity import OPEN_PRINCIPAL


def last_answer(error: PenstockError) -> bytes:
    """Return the whole answer that refuses a request below ASGI, and after which the connection ends."""
    body = error_body(error)
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return STATUS_LINE[error.status] + head + body


FRAME_BYTES = 100  # that a fragment of a message costs beside its content


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    limits: ClassVar[ConnectionLimits]
    _place: Place

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._stall = StallTimer(self.limits)
        self._unread = memoryview(b"")  # what has arrived and is not parsed yet
        self._reads_on_soon = False
        self._num_frames = 0  # since the turn began
        self._piece_bytes = MIN_PIECE_BYTES
        self._num_pending = 0  # bytes of a message that is not whole
        self._num_in_frames = 0  # of them, in the frames that are whole
        self._workspace_id = ""  # whose bytes they are

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.limits.count(+1)
        super().connection_made(transport)
        self._place = Place(self.limits.places, self.transport)
        self._place.rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.count(-1)
        self._place.leave()
        self._unread = memoryview(b"")
        self._stall.stop()
        self._note_pending(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_fresh = not self._unread and len(data) <= TURN_BYTES and self.limits.turns.has_room
        self._unread = memoryview(bytes(self._unread) + data) if self._unread else memoryview(data)
        if is_fresh:
            self._read_on()
        else:
            self._pause()
            self._read_on_soon()

    def _read_on(self) -> None:
        """Parse what has arrived, piece by piece, as long as the application takes the messages and the client takes
        the answers to its pings. After a piece of many frames, other connections have their turn."""
        self._reads_on_soon = False
        self._num_frames = 0
        while self._unread and self._may_read:
            size = self._piece_bytes
            piece, self._unread = bytes(self._unread[:size]), self._unread[size:]
            super().data_received(piece)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                self._refuse_handshake()
            # Large frames are read in large pieces.
            self._piece_bytes = MIN_PIECE_BYTES if self._num_frames else min(2 * size, TURN_BYTES)
            try:
                self._note_pending(self._num_in_frames + len(self.conn.reader.buffer))
            except PenstockError:
                self._note_pending(0)
                self.transport.abort()  # a client that sends a message without an end reads no closing message
            if self.transport.is_closing():
                self._unread = memoryview(b"")
            elif self._num_frames > MAX_TURN_PARTS and self._unread:
                self._read_on_soon()
        self.limits.turns.spend(self.loop, self._num_frames)
        if self.transport.is_closing():
            self._stall.start_at_close(self.loop, self.transport)
        if self._unread:
            self._pause()
        elif self.read_paused and self._may_read and not self._unread and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def _refuse_handshake(self) -> None:
        """Answer a request that is no handshake, such as one with a body. Uvicorn would keep it waiting for ever."""
        self.limits.metrics.num_malformed += 1
        error = InvalidRequest(
            "The request is no valid WebSocket handshake.", hint="It is a GET without a body."
        )
        self.transport.write(last_answer(error))
        self.transport.close()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    @property
    def _may_read(self) -> bool:
        is_taken = self.queue.empty() or self.close_sent or not self.handshake_initiated
        return is_taken and self.writable.is_set() and not self._reads_on_soon

    def _read_on_soon(self) -> None:
        if not self._reads_on_soon:
            self._reads_on_soon = True
            self.limits.turns.wait(self.loop, self._read_on)

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.queue.empty() and (self._unread or self.read_paused):
            self._read_on_soon()
        return message

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["extensions"][TAKE_PLACE] = {"take": self._place.take}

    def handle_events(self) -> None:
        num_frames = len(self.conn.events)
        super().handle_events()
        self._num_frames += num_frames

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        self._num_in_frames = 0 if event.fin else self._num_in_frames + len(event.data) + FRAME_BYTES

    def handle_text(self, event: Frame) -> None:
        super().handle_text(event)
        self._num_in_frames = 0 if event.fin else len(event.data) + FRAME_BYTES

    def handle_bytes(self, event: Frame) -> None:
        super().handle_bytes(event)
        self._num_in_frames = 0 if event.fin else len(event.data) + FRAME_BYTES

    def send_receive_event_to_app(self) -> None:
        """Hand a text on as the bytes in which it came: to decode 32 MB into a text and back would keep others
        waiting for a tenth of a second. Bytes that are not UTF-8 are refused when the JSON is read."""
        self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()

    def _note_pending(self, num_bytes: int) -> None:
        """Count the part of a message that has arrived, as bodies of requests are counted."""
        more = num_bytes - self._num_pending
        if more > 0:
            if not self._num_pending:
                principal = state_of(cast(Scope, self.scope)).principal or OPEN_PRINCIPAL
                self._workspace_id = principal.workspace_id
            self.limits.pending_bodies.add(self._workspace_id, more)
        elif more < 0:
            self.limits.pending_bodies.remove(self._workspace_id, -more)
        self._num_pending = num_bytes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.start(self.loop, self.transport, self._place.holder)

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()
        if self._unread:
            self._read_on_soon()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        is_open = self.handshake_complete and self.initial_response is None
        if self.close_sent and is_open:
            # The connection ended while the client was answered, which is no error of ours for the log.
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self._stall.start_at_close(self.loop, self.transport)
        if self.initial_response is not None and self.close_sent:
            # A refusal ends the handshake as well; uvicorn would log each one as an error of ours.
            self.handshake_complete = True

    def keepalive_timeout(self) -> None:
        """A client that does not answer pings will not read a closing message either."""
        super().keepalive_timeout()
        self.transport.abort()
