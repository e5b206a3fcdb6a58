"""Fair parsing: bounds on the bytes of one connection that are parsed before other connections have their turn.

One read of a socket may hold thousands of tiny requests, chunks or frames, and each costs far more than its bytes.
A client may open hundreds of connections, so a turn of the event loop has one bound for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

TURN_BYTES = 16 << 10  # parsed at once
MIN_PIECE_BYTES = 1 << 10  # parsed at once if the parts are small
MAX_PIECE_PARTS = 8  # a piece with more parts than this is followed by a small piece
MAX_TURN_PARTS = 64  # requests, pieces of bodies or frames, after which other connections have their turn
MAX_FRESH_PARTS = 256  # parts of connections without a backlog in one turn
PIPELINED_REQUEST_PARTS = 8  # the cost of answering a request, in parts


class Turns:
    """Lets connections with a backlog proceed one after the other, with one limit on the parts that all of them parse
    in a turn of the event loop. A connection without a backlog proceeds at once while the turn has room."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_parts = 0  # since the turn began
        self._begins_soon = False

    @property
    def has_room(self) -> bool:
        return self._num_parts <= MAX_FRESH_PARTS

    def spend(self, loop: asyncio.AbstractEventLoop, num_parts: int) -> None:
        """Count parts that a connection has parsed."""
        self._num_parts += num_parts
        if self._num_parts > MAX_TURN_PARTS:
            self._begin_soon(loop)

    def wait(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is the connection's turn. `go_on` reports the parts that it parses to `spend`."""
        self._waiting.append(go_on)
        self._begin_soon(loop)

    def _begin_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._begins_soon:
            self._begins_soon = True
            loop.call_soon(self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begins_soon = False
        self._num_parts = 0
        try:
            while self._waiting and self._num_parts <= MAX_TURN_PARTS:
                self._waiting.popleft()()
        finally:  # after an error too: the other connections must not wait forever
            if self._waiting:
                self._begin_soon(loop)


class HeldFlow(FlowControl):
    """Flow control that can be held: a held connection reads nothing, even if uvicorn resumes reading, until the
    bytes that were read are parsed."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self, *, resume: bool) -> None:
        """End the hold. `resume` says whether there is no other reason to pause."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
