"""Servers of tests that listen on ports of their own, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class PromptServer(uvicorn.Server):
    """Ends as soon as `end` is called. Uvicorn's own server looks ten times a second whether it should end, and then
    waits for a tenth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._listens = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    def wait_until_it_listens(self, thread: threading.Thread) -> None:
        while not self._listens.wait(0.1):
            assert thread.is_alive(), "the server ended before it listened"

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        self._listens.set()
        await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.force_exit:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # connections close

    def end(self, *, is_forced: bool = True) -> None:
        """Call this from any thread. Unless it is forced, requests end first, and then the lifespan does."""
        self.force_exit = is_forced
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._told.set)


def _server(app: ASGIApp, options: dict[str, Any]) -> PromptServer:
    defaults: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "log_level": "error", "access_log": False}
    return PromptServer(uvicorn.Config(app, interface="asgi3", **defaults | options))


@contextmanager
def listening_in_thread(app: ASGIApp, *, is_forced: bool = True, **options: Any) -> Iterator[int]:
    """Yields the port of an application that runs in a thread. `options` are Uvicorn's."""
    server = _server(app, options)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    server.wait_until_it_listens(thread)
    try:
        yield server.port
    finally:
        server.end(is_forced=is_forced)
        thread.join()


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Yields the URL of an application that runs on this event loop."""
    server = _server(app, {"log_level": "critical", "lifespan": "off"})
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.end()
        await task
