"""Limits and counts that all connections of a server share, their places, the timers of single connections, and fair
parsing.

A connection on which no known caller's request is answered rests, and makes room for a new connection; the others are
in use by workspaces, each of which leaves places to others.

Fair parsing bounds the bytes of one connection that are parsed before other connections have their turn. One read of
a socket may hold thousands of tiny requests, chunks or frames, and each costs far more than its bytes. A client may
open hundreds of connections, so a turn of the event loop has one bound for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

from penstock.api.http.bodies import PendingBodies
from penstock.core.errors import RateLimited
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.shares import Shares
from penstock.gateway.metrics.table import Figures, figures_of

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


MIN_READ_BYTES = 16 << 10  # that a client must read in each `write_timeout_s` while bytes wait for it
HELD_UP_S = 1.0  # a timer that fires later than this shows that the process was suspended


class ClientTimer:
    """A time limit for a client, counted in short steps. A step during which this process was suspended (on a frozen
    machine, say) counts with its own length only. The last step is then repeated once, because the bytes that the
    client has sent meanwhile are not read yet."""

    __slots__ = ("_due_s", "_handle", "_is_repeated", "_left_s", "_loop", "_on_timeout")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, on_timeout: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._left_s = seconds
        self._on_timeout = on_timeout
        self._is_repeated = False  # the last step
        self._start_step()

    def cancel(self) -> None:
        self._handle.cancel()

    def _start_step(self) -> None:
        step_s = min(HELD_UP_S, self._left_s)
        self._due_s = self._loop.time() + step_s
        self._left_s -= step_s
        self._handle = self._loop.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        was_suspended = self._loop.time() - self._due_s > HELD_UP_S
        if was_suspended and not self._left_s and not self._is_repeated:
            self._is_repeated, self._left_s = True, HELD_UP_S
        if self._left_s > 0.0:
            self._start_step()
        else:
            self._on_timeout()


class ClientNoise(logging.Filter):
    """Drops uvicorn's warnings about malformed requests, with which any client could fill the logs. Metrics count
    these requests instead."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("Invalid HTTP", "Invalid UTF-8", "Unsupported upgrade"))


@dataclass
class ConnectionMetrics:
    num_open: int = 0
    num_refused: int = 0
    num_displaced: int = 0
    num_timed_out: int = 0
    num_malformed: int = 0
    num_stalled: int = 0

    def figures(self) -> Figures:
        return figures_of(self, "connections")


@dataclass(slots=True)
class ConnectionLimits:
    """The limits that the protocols enforce. All connections of a server share them."""

    config: ServerConfig
    pending_bodies: PendingBodies
    places: Places
    unread: UnreadAnswers
    metrics: ConnectionMetrics = field(default_factory=ConnectionMetrics)
    turns: Turns = field(default_factory=Turns)
    is_leaving: bool = False  # while draining, each connection ends after its next answer
    # Called with the number of open connections when it changes.
    on_count: Callable[[int], None] | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        bodies = PendingBodies(config.max_pending_body_bytes, config.max_body_bytes)
        return cls(config, bodies, Places(config.max_connections), UnreadAnswers(config.max_unread_bytes))

    def admit(self) -> bool:
        """Count a new connection, and return whether there is a place for it. One that rests gives its place away."""
        if self.count(+1) <= self.config.max_connections:
            return True
        if self.places.make_room():
            self.metrics.num_displaced += 1
            return True
        self.metrics.num_refused += 1
        return False

    def count(self, change: int) -> int:
        """Change the number of open connections, and return it."""
        num_open = self.metrics.num_open = self.metrics.num_open + change
        if self.on_count is not None:
            self.on_count(num_open)
        return num_open


class UnreadAnswers:
    """The bytes that wait for clients to read them, on connections that have more than a few, by workspace. Each
    workspace leaves room to others. A single answer always fits: only its connection may hold more."""

    def __init__(self, max_bytes: int) -> None:
        self.shares = Shares(max_bytes)
        self._waiting: dict[str, dict[StallTimer, int]] = {}  # the timer that waits the longest comes first

    def add(self, holder: str, connection: StallTimer, num_bytes: int) -> None:
        """Count the bytes that wait on a connection. Aborts connections of the holder that read nothing if its
        connections hold too many bytes, and the one that has waited the longest if all of them read."""
        waiting = self._waiting.setdefault(holder, {})
        waiting[connection] = num_bytes
        self.shares.add(holder, num_bytes)
        for each in list(waiting):
            if len(waiting) == 1 or not self.shares.is_over_for(holder):
                return
            num_left = each.num_left
            if each is connection or waiting[each] - num_left >= MIN_READ_BYTES:
                self.shares.add(holder, num_left - waiting.pop(each))
                waiting[each] = num_left
            else:
                each.abort()
        if len(waiting) > 1 and self.shares.is_over_for(holder):
            next(iter(waiting)).abort()

    def remove(self, holder: str, connection: StallTimer) -> None:
        waiting = self._waiting[holder]
        self.shares.add(holder, -waiting.pop(connection))
        if not waiting:
            del self._waiting[holder]


class StallTimer:
    """Aborts a connection whose client reads too little of the bytes that wait for it. A plain close would wait for
    the client."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._timer: ClientTimer | None = None
        self._transport: asyncio.Transport | None = None  # while the bytes on it are counted
        self._holder = ""

    @property
    def num_left(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def start(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, holder: str = "") -> None:
        """Expect the client to read an answer to a workspace, the holder. Nothing but pings may be written until
        `stop`."""
        self.stop()
        self._transport, self._holder = transport, holder
        num_waiting = self.num_left

        def look() -> None:
            if num_waiting - self.num_left >= MIN_READ_BYTES:
                self.start(loop, transport, holder)
            elif self.num_left:
                self.abort()

        self._timer = ClientTimer(loop, self._limits.config.write_timeout_s, look)
        self._limits.unread.add(holder, self, num_waiting)

    def start_at_close(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """Bound the time that a closing connection waits for its client."""
        if self._timer is None and transport.get_write_buffer_size():
            self.start(loop, transport)

    def abort(self) -> None:
        transport = self._transport
        self.stop()
        if transport is not None:
            self._limits.metrics.num_stalled += 1
            transport.abort()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport = None
            self._limits.unread.remove(self._holder, self)


class IdleTimer:
    """Closes a connection that no request has used for `limit_s`. One timer serves all requests of a connection: a
    timer for each answer would cost more than writing the answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, close: Callable[[], None]) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._close = close
        self._since_s: float | None = None  # when the last answer ended, until something arrives
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._since_s is not None

    def start(self) -> None:
        self._since_s = self._loop.time()
        if self._handle is None:
            self._look_after(self._limit_s)

    def stop(self) -> None:
        """End the idle time. The timer itself may continue: it then finds that the connection is in use."""
        self._since_s = None

    def cancel(self) -> None:
        """End the timer forever, and drop the connection."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._close = _nothing

    def _look_after(self, seconds: float) -> None:
        self._handle = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._handle = None
        if self._since_s is None:
            return  # the end of the next answer starts the timer again
        left_s = self._since_s + self._limit_s - self._loop.time()
        if left_s > 0:
            self._look_after(left_s)
        elif left_s < -HELD_UP_S:  # the process was suspended: a request may have arrived meanwhile
            self.start()
        else:
            self._close()


def _nothing() -> None:
    pass


TAKE_PLACE = "penstock.take_place"  # the ASGI extension by which the caller of a request takes the place
RETRY_AFTER_S = 5.0
MAX_LOOKS = 16  # for a connection that has nothing to send


class Places:
    def __init__(self, max_connections: int) -> None:
        self.shares = Shares(max_connections)
        self.resting: dict[Place, None] = {}  # the place that rests the longest comes first

    def make_room(self) -> bool:
        """End the connection that has rested the longest, and return whether there was one. Connections that have
        nothing to send go first."""
        first = next(iter(self.resting), None)
        if first is None:
            return False
        looked_at = (place for place, _ in zip(self.resting, range(MAX_LOOKS), strict=False))
        place = next((each for each in looked_at if each.is_silent), first)
        del self.resting[place]
        place.abort()
        return True


class Place:
    """The place of one connection. It rests until a known caller's request is answered."""

    __slots__ = ("_holder", "_places", "_transport")

    def __init__(self, places: Places, transport: asyncio.Transport) -> None:
        self._places = places
        self._transport = transport
        self._holder: str | None = None  # the workspace that uses it

    @property
    def holder(self) -> str:
        """Return the workspace that uses the connection; empty where none does."""
        return self._holder or ""

    @property
    def is_silent(self) -> bool:
        return not self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()

    def take(self, principal: Principal) -> None:
        """Rest no longer: the request of a known caller is answered. Raises RateLimited for a workspace that has its
        share of the places. The owner of a server without keys has no tenant to share with."""
        holder, shares = principal.workspace_id, self._places.shares
        if principal is not OPEN_PRINCIPAL and holder != self._holder:
            if shares.is_full_for(holder):
                raise RateLimited(
                    f"This workspace uses {shares.of(holder)} connections, and the rest is kept for others.",
                    retry_after_s=RETRY_AFTER_S,
                )
            if self._holder is not None:
                self._let_go()
            self._holder = holder
            shares.add(holder)
        self._places.resting.pop(self, None)

    def rest(self) -> None:
        """Rest from now on: the connection is new, has a new request, or a request was answered."""
        if self._holder is not None:
            self._let_go()
        resting = self._places.resting
        resting.pop(self, None)
        resting[self] = None

    def leave(self) -> None:
        """The connection has ended."""
        self._let_go()
        self._places.resting.pop(self, None)

    def _let_go(self) -> None:
        if self._holder is not None:
            self._places.shares.add(self._holder, -1)
            self._holder = None


def take_place(scope: Scope, principal: Principal) -> None:
    """Let the caller of a request take the place of its connection. Raises RateLimited where the caller has too many.
    Calls from inside of the server have no connection."""
    found = (scope.get("extensions") or {}).get(TAKE_PLACE)
    if found is not None:
        found["take"](principal)
