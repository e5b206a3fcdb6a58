"""Limits and counts that all connections of a server share, and the timers of single connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.api.http.bodies import PendingBodies
from penstock.api.http.places import Places
from penstock.api.http.turns import Turns
from penstock.core.gateway_config import ServerConfig
from penstock.core.shares import Shares
from penstock.gateway.metrics.table import metrics

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


class ConnectionMetrics(Collector):
    def __init__(self) -> None:
        self.num_open = 0
        self.num_refused = 0
        self.num_displaced = 0
        self.num_timed_out = 0
        self.num_malformed = 0
        self.num_stalled = 0

    def collect(self) -> Iterator[Metric]:
        yield from metrics(
            (
                ("connections_open", self.num_open),
                ("connections_refused", self.num_refused),
                ("connections_displaced", self.num_displaced),
                ("connections_timed_out", self.num_timed_out),
                ("connections_malformed", self.num_malformed),
                ("connections_stalled", self.num_stalled),
            )
        )


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
        self._waiting: dict[str, dict[StallTimer, int]] = {}  # the one that waits the longest first

    def add(self, holder: str, connection: StallTimer, num_bytes: int) -> None:
        """Count the bytes that wait on a connection. Aborts connections of the holder that read nothing if its
        connections hold too many bytes, and the one that has waited the longest if all of them read."""
        waiting = self._waiting.setdefault(holder, {})
        waiting[connection] = num_bytes
        self.shares.add(holder, num_bytes)
        for each in list(waiting):
            if len(waiting) == 1 or not self._is_full_for(holder):
                return
            num_left = each.num_left
            if each is connection or waiting[each] - num_left >= MIN_READ_BYTES:
                self.shares.add(holder, num_left - waiting.pop(each))
                waiting[each] = num_left
            else:
                each.abort()
        if len(waiting) > 1 and self._is_full_for(holder):
            next(iter(waiting)).abort()

    def remove(self, holder: str, connection: StallTimer) -> None:
        waiting = self._waiting[holder]
        self.shares.add(holder, -waiting.pop(connection))
        if not waiting:
            del self._waiting[holder]

    def _is_full_for(self, holder: str) -> bool:
        return self.shares.used > self.shares.capacity or self.shares.is_full_for(holder)


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
        """End the timer for good, and forget the connection."""
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
