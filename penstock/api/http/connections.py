"""What all connections of a server share: their limits, their counts, and the timers of their clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.api.http.bodies import PendingBodies
from penstock.api.http.turns import Turns
from penstock.core.gateway_config import ServerConfig
from penstock.gateway.metrics.table import metrics

HELD_UP_S = 1.0  # a timer that is later than this tells that the process stood still


class ClientTimer:
    """A time limit for a client, counted in steps. A step in which this process stood still (a frozen machine, say)
    counts for its own length only, and the last one is repeated, once: what the client has sent meanwhile is not read
    yet."""

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
        stood_still = self._loop.time() - self._due_s > HELD_UP_S
        if stood_still and not self._left_s and not self._is_repeated:
            self._is_repeated, self._left_s = True, HELD_UP_S
        if self._left_s > 0.0:
            self._start_step()
        else:
            self._on_timeout()


class ClientNoise(logging.Filter):
    """Drops uvicorn's complaints about what clients send: any client could fill the logs with them. They are
    counted instead."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("Invalid HTTP", "Invalid UTF-8", "Unsupported upgrade"))


class ConnectionMetrics(Collector):
    def __init__(self) -> None:
        self.num_open = 0
        self.num_refused = 0
        self.num_timed_out = 0
        self.num_malformed = 0
        self.num_stalled = 0

    def collect(self) -> Iterator[Metric]:
        yield from metrics(
            (
                ("connections_open", self.num_open),
                ("connections_refused", self.num_refused),
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
    metrics: ConnectionMetrics = field(default_factory=ConnectionMetrics)
    turns: Turns = field(default_factory=Turns)
    is_leaving: bool = False  # each connection then ends after its next answer
    # Called with the number of open connections when it changes.
    on_count: Callable[[int], None] | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        return cls(config, PendingBodies(config.max_pending_body_bytes, config.max_body_bytes))

    def count(self, change: int) -> int:
        """Change the number of open connections, and return it."""
        num_open = self.metrics.num_open = self.metrics.num_open + change
        if self.on_count is not None:
            self.on_count(num_open)
        return num_open


class StallTimer:
    """Drops a connection whose client lets our bytes wait for too long. Closing would wait for those bytes."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._timer: ClientTimer | None = None

    def start(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        def drop() -> None:
            self._limits.metrics.num_stalled += 1
            transport.abort()

        self.stop()
        self._timer = ClientTimer(loop, self._limits.config.write_timeout_s, drop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
