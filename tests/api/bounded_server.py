"""A server as `penstock serve` configures it, with a fake engine, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route

from penstock.api.app import create_app
from penstock.api.http.access_log import RequestLog
from penstock.api.http.connections import ConnectionLimits, ConnectionMetrics
from penstock.api.http.protocol import bounded_protocols
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.core.request import FinishReason
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from penstock.gateway.telemetry import RequestObserver
from tests.api.conftest import Served
from tests.gateway.fake_engine import FakeEngine
from tests.servers import listening_in_thread


class ThreadedEngine(FakeEngine):
    """Lets a test on another thread emit tokens."""

    loop: asyncio.AbstractEventLoop

    def add(self, *arguments: Any, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        super().add(*arguments, **options)

    def emit_soon(self, text: bytes, finish_reason: FinishReason | None = None) -> None:
        done = threading.Event()

        def emit_all() -> None:
            for request_id in list(self.streams):
                self.emit(request_id, *text, finish_reason=finish_reason)
            done.set()

        self.loop.call_soon_threadsafe(emit_all)
        assert done.wait(60)


class HeldTimers:
    """Stand in for the timers of a server's clients. A time limit ends when the test says so, on a slow machine
    too."""

    def __init__(self) -> None:
        self.armed: list[HeldTimer] = []

    def start(
        self, loop: asyncio.AbstractEventLoop, seconds: float, on_timeout: Callable[[], None]
    ) -> HeldTimer:
        timer = HeldTimer(self, loop, seconds, on_timeout)
        self.armed.append(timer)
        return timer

    def expire(self, seconds: float) -> None:
        """End all limits of so many seconds, on the thread of the server."""
        due = [timer for timer in self.armed if timer.seconds == seconds]
        for timer in due:
            done = threading.Event()
            timer.loop.call_soon_threadsafe(timer.expire)
            timer.loop.call_soon_threadsafe(done.set)
            assert done.wait(60)


@dataclass(eq=False)
class HeldTimer:
    timers: HeldTimers
    loop: asyncio.AbstractEventLoop
    seconds: float
    on_timeout: Callable[[], None]

    def cancel(self) -> None:
        if self in self.timers.armed:
            self.timers.armed.remove(self)

    def expire(self) -> None:
        if self in self.timers.armed:
            self.cancel()
            self.on_timeout()


class BoundedServed(Served):
    connections: ConnectionMetrics
    limits: ConnectionLimits
    num_bytes_read = 0  # from all connections


@contextmanager
def bounded_server(
    engine: FakeEngine,
    config: ServerConfig | None = None,
    *,
    gateway_config: GatewayConfig | None = None,
    observer: RequestObserver | None = None,
    request_log: RequestLog | None = None,
    more_routes: Callable[[Gateway], Sequence[Route]] | None = None,
    **uvicorn_options: Any,
) -> Iterator[BoundedServed]:
    config = config or ServerConfig()
    gateway = Gateway(
        engine, gateway_config or GatewayConfig(), accounts=Accounts(observers=[observer] if observer else [])
    )
    http, websocket, connections = bounded_protocols(config)
    routes = more_routes(gateway) if more_routes else ()

    class CountingProtocol(http):  # type: ignore[misc, valid-type]
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            served.num_bytes_read += len(data)

    app = create_app(
        gateway,
        config,
        request_log=request_log,
        more_routes=routes,
        pending_bodies=connections.pending_bodies,
    )
    options: dict[str, Any] = {
        "http": CountingProtocol,
        "ws": websocket,
        "ws_max_size": config.max_body_bytes,
        "ws_per_message_deflate": False,
        "log_config": None,
    }
    with listening_in_thread(app, **options | uvicorn_options) as port:
        served = BoundedServed(engine, gateway, port)
        served.limits = connections
        served.connections = connections.metrics
        yield served
