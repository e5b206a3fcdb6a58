"""A server as `penstock serve` configures it, with a fake engine, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
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
        assert done.wait(20)


class BoundedServed(Served):
    connections: ConnectionMetrics
    limits: ConnectionLimits


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
    gateway = Gateway(engine, gateway_config or GatewayConfig(), accounts=Accounts(observer=observer))
    http, websocket, connections = bounded_protocols(config)
    routes = more_routes(gateway) if more_routes else ()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(
                gateway,
                config,
                request_log=request_log,
                more_routes=routes,
                pending_bodies=connections.pending_bodies,
            ),
            **{
                "host": "127.0.0.1",
                "port": 0,
                "http": http,
                "ws": websocket,
                "ws_max_size": config.max_body_bytes,
                "ws_per_message_deflate": False,
                "log_config": None,
                "access_log": False,
            }
            | uvicorn_options,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    served = BoundedServed(engine, gateway, server.servers[0].sockets[0].getsockname()[1])
    served.limits = connections
    served.connections = connections.metrics
    try:
        yield served
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
