"""Accepts connections on a socket that several processes share, so that all processes hold about as many, and bounds
the TLS handshakes that have not ended.

The kernel wakes all processes for a new connection, and the process that is awake takes whatever has arrived: 32
connections that come at once would all be served by one core. A process that holds more connections than another
therefore waits for a moment before a new connection, and takes the connection if no other process has.

No protocol knows of a connection before its handshake has ended: without a bound here, clients that begin none would
take all files of the process.

A process without free files leaves new connections waiting, says so, and tries again. The event loop's own servers
reset them and say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SLACK = 2  # connections that a process may hold beyond another before it leaves new ones to the other
PATIENCE_S = 0.002  # for another process to take a connection
# When no other process took a connection this many times, the others are busy or stopped. Connections are then taken
# at once for a while.
MAX_VAIN_WAITS = 5
IMPATIENCE_S = 0.1
RETRY_S = 1.0  # when the system has no file or memory left for a connection
_COUNT_BYTES = 8
_COUNT_OF_NOBODY = 1 << 32  # a process that is alone never holds more than another


class ConnectionCounts:
    """The numbers of connections that the processes hold, in a file that all of them map. Each process writes its own
    number only."""

    def __init__(self, path: Path, num_processes: int, number: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, num_processes * _COUNT_BYTES)  # a new file is filled with zeros
            self._counts = memoryview(mmap.mmap(descriptor, num_processes * _COUNT_BYTES)).cast("q")
        finally:
            os.close(descriptor)
        self._number = number
        self.publish(0)

    def publish(self, num_open: int) -> None:
        self._counts[self._number] = num_open

    @property
    def own(self) -> int:
        return self._counts[self._number]

    @property
    def fewest(self) -> int:
        """Return the number of connections of the other process that holds the fewest."""
        others = [*self._counts[: self._number], *self._counts[self._number + 1 :]]
        return min(others, default=_COUNT_OF_NOBODY)


class EvenListener:
    """Accepts connections from `listener` in the running event loop, until `close`, which leaves the socket open for
    its owner. Without `counts` the socket is not shared. When as many handshakes have begun as `num_free` says that
    there are free places, the oldest makes room for the next."""

    def __init__(
        self,
        listener: socket.socket,
        counts: ConnectionCounts | None,
        make_protocol: Callable[[], asyncio.Protocol],
        ssl_context: ssl.SSLContext | None = None,
        *,
        num_free: Callable[[], float] = lambda: math.inf,
        handshake_timeout_s: float = 20.0,
    ) -> None:
        self._listener = listener
        self._counts = counts
        self._make_protocol = make_protocol
        self._tls: dict[str, Any] = {}
        if ssl_context is not None:
            self._tls = {"ssl": ssl_context, "ssl_handshake_timeout": handshake_timeout_s}
        self._num_free = num_free
        self._loop = asyncio.get_running_loop()
        self._starting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._impatient_until_s = 0.0
        self._waited_until_s = -math.inf
        self._fewest_then = 0  # when the last wait began
        self._num_vain_waits = 0
        self._has_failed = False  # whether the last connection could not be accepted
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._arrived)

    def _stop_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._listen)

    def _arrived(self) -> None:
        """Take one connection, or leave it to another process. Called again while connections wait."""
        now = self._loop.time()
        has_waited = now < self._waited_until_s + PATIENCE_S  # and the connection is still there
        if not has_waited and now >= self._impatient_until_s and self._holds_more():
            self._waited_until_s = now + PATIENCE_S
            self._fewest_then = self._fewest
            self._stop_for(PATIENCE_S)
            return
        if has_waited:
            self._note_failed_wait(now)
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.error("new connections wait, because none can be accepted: %s", error.strerror)
            self._stop_for(RETRY_S)
            return
        if self._has_failed:
            self._has_failed = False
            logger.warning("connections are accepted again")
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._starting and len(self._starting) >= self._num_free():
            oldest = next(iter(self._starting))
            del self._starting[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._connect(connection))
        self._starting[task] = None
        task.add_done_callback(lambda _: self._starting.pop(task, None))

    def _holds_more(self) -> bool:
        return (
            self._counts is not None and self._counts.own + len(self._starting) > self._counts.fewest + SLACK
        )

    @property
    def _fewest(self) -> int:
        return 0 if self._counts is None else self._counts.fewest

    def _note_failed_wait(self, now: float) -> None:
        """Count a wait in which no other process took the connection, and the process with the fewest connections
        took no other one."""
        self._waited_until_s = -math.inf
        self._num_vain_waits = self._num_vain_waits + 1 if self._fewest == self._fewest_then else 0
        if self._num_vain_waits == MAX_VAIN_WAITS:
            self._num_vain_waits = 0
            self._impatient_until_s = now + IMPATIENCE_S

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._tls)
        except OSError:  # the client is gone, or its TLS handshake failed
            connection.close()
        except asyncio.CancelledError:  # it made room
            connection.close()
            raise
