"""How much of what connections have sent is parsed before others have their turn.

One read of a socket may hold thousands of tiny requests, chunks or frames, and each costs far more than its bytes.
A client may open hundreds of connections, so a turn of the event loop has one bound for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

TURN_BYTES = 16 << 10  # parsed at once
MIN_PIECE_BYTES = 1 << 10  # parsed at once where the parts are small
MAX_PIECE_PARTS = 8  # of which a large piece may consist
MAX_TURN_PARTS = 64  # requests, pieces of bodies or frames, after which others have their turn
MAX_FRESH_PARTS = 256  # in a turn, of connections that have no backlog
PIPELINED_REQUEST_PARTS = 8  # what the answer to a request costs, beside parsing one part


class Turns:
    """Lets the connections with a backlog go on one after the other: for so many parts in a turn of the event loop,
    however many connections there are. A connection without a backlog goes on at once while the turn has room."""

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
        """Call `go_on` when it is the connection's turn. It spends what it parses."""
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
        finally:  # a connection that fails keeps no other one waiting
            if self._waiting:
                self._begin_soon(loop)


class HeldFlow(FlowControl):
    """Pauses reading until it is let go, whoever resumes it meanwhile: what was read must be parsed first."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def let_go(self, *, resume: bool) -> None:
        """`resume` says whether there was no other reason to pause."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
