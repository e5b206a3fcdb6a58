"""A real HTTP server around a fake engine, in a thread; and a client that calls the application directly."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from penstock.api.app import create_app
from penstock.core.gateway_config import GatewayConfig, ServerConfig
from penstock.gateway.accounts import Accounts
from penstock.gateway.gateway import Gateway
from tests.gateway.fake_engine import FakeEngine
from tests.servers import listening_in_thread


@dataclass
class Served:
    engine: FakeEngine
    gateway: Gateway
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sdk(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def ask_and_leave(self, path: str, body: dict[str, Any]) -> None:
        """Send a request, and close the connection once the engine has the request."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode() + content)
            self.wait_until(lambda: bool(self.engine.streams))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls, because the server lives on another thread; gives up long before the test's timeout."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.005)


@contextmanager
def serving(
    engine: FakeEngine,
    gateway_config: GatewayConfig,
    server_config: ServerConfig,
    accounts: Accounts | None = None,
) -> Iterator[Served]:
    gateway = Gateway(engine, gateway_config, accounts=accounts)
    with listening_in_thread(create_app(gateway, server_config)) as port:
        yield Served(engine, gateway, port)


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Call with an engine, and settings where the defaults do not do."""
    open_contexts = []

    def start(
        engine: FakeEngine,
        *,
        gateway: GatewayConfig | None = None,
        server: ServerConfig | None = None,
        accounts: Accounts | None = None,
    ) -> Served:
        context = serving(engine, gateway or GatewayConfig(), server or ServerConfig(), accounts)
        open_contexts.append(context)
        return context.__enter__()

    yield start
    for context in open_contexts:
        context.__exit__(None, None, None)


def direct_client(engine: FakeEngine, gateway: Gateway | None = None, **server: Any) -> httpx.AsyncClient:
    """Calls the application without a socket: quick, but it sees a stream only when it is over."""
    app = create_app(gateway or Gateway(engine, GatewayConfig()), ServerConfig(**server))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")
