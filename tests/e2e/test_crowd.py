"""A thousand idle WebSockets against the real server process: everyone else is served, memory stays bounded, and
what is over the limit is told so."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.e2e.conftest import RunningServer, start_server

# The server closes a socket that answers no ping. A slow machine must let the whole crowd in before that.
NUM_IDLE = 1_000
MAX_WEBSOCKETS = 900
MAX_BYTES_PER_SOCKET = 40_000

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Crowd:
    """Sockets that shake hands and then say nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.writers: list[asyncio.StreamWriter] = []
        self.statuses: dict[int, int] = {}

    async def gather(self, num_sockets: int) -> None:
        at_once = asyncio.Semaphore(200)

        async def open_one() -> None:
            async with at_once:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1024)
                self.writers.append(writer)
                writer.write(HANDSHAKE)
                status = int((await reader.readline()).split()[1])
                self.statuses[status] = self.statuses.get(status, 0) + 1

        await asyncio.gather(*(open_one() for _ in range(num_sockets)))

    def leave(self) -> None:
        for writer in self.writers:
            writer.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The last test ends it."""
    folder = tmp_path_factory.mktemp("crowd")
    flags = ("--max-websockets", str(MAX_WEBSOCKETS), "--drain-timeout", "200", "--data-dir", str(folder))
    running = start_server(folder, "--model", "echo", *flags)
    yield running
    running.process.kill()


@pytest.mark.slow
def test_a_thousand_idle_sockets(server: RunningServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_IDLE + 1000:
        pytest.skip(f"the system allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_IDLE + 1000, hard))
    try:
        asyncio.run(_crowd(server))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _crowd(server: RunningServer) -> None:
    process = psutil.Process(server.process.pid)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        assert await _asks(client) == 200
        bytes_before = process.memory_info().rss
        crowd = Crowd(int(server.url.rsplit(":", 1)[1]))
        arriving = asyncio.create_task(crowd.gather(NUM_IDLE))
        num_answered = 0
        while not arriving.done():
            assert await _asks(client) == 200, "requests are answered while the crowd pushes in"
            num_answered += 1
        await arriving
        assert num_answered > 5
        assert crowd.statuses == {101: MAX_WEBSOCKETS, 503: NUM_IDLE - MAX_WEBSOCKETS}
        for _ in range(20):
            assert await _asks(client) == 200
        grown = process.memory_info().rss - bytes_before
        assert grown < MAX_WEBSOCKETS * MAX_BYTES_PER_SOCKET, f"{grown / MAX_WEBSOCKETS:.0f} bytes per socket"
        metrics = (await client.get("/metrics")).text
        assert f"penstock_websockets_open {MAX_WEBSOCKETS}.0" in metrics
        crowd.leave()
        while "penstock_websockets_open 0.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.1)
        assert await _asks(client) == 200


async def _asks(client: httpx.AsyncClient) -> int:
    answer = await client.post("/v1/completions", content=json.dumps({"prompt": "hi", "max_tokens": 4}))
    return answer.status_code


@pytest.mark.slow
def test_open_sockets_do_not_hold_up_the_end(server: RunningServer) -> None:
    """A running answer finishes, an idle socket is told to go, and the process ends."""
    url = server.url.replace("http", "ws") + "/v1/stream"
    with connect(url) as idle, connect(url) as busy:
        busy.send(json.dumps({"id": 1, "prompt": "water " * 200, "max_tokens": 2000}))
        assert "token" in json.loads(busy.recv(timeout=60))
        server.process.terminate()
        while "usage" not in (message := json.loads(busy.recv(timeout=60))):
            pass
        assert message["usage"]["completion_tokens"] == 2000
        for socket in (busy, idle):
            with pytest.raises(ConnectionClosed, match="1012"):
                socket.recv(timeout=60)
    assert server.process.wait(timeout=240) == 0
