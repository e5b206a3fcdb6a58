"""How many gateway processes a server has when nobody says, and how they are started again."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.config import ExternalServerConfig, ServeConfig
from penstock.core.gateway_config import ServerConfig
from penstock.serve import api_workers
from penstock.serve.api_workers import MAX_API_WORKERS, ApiWorkers, WorkerReady, encode_line, with_api_workers

RELAY = ServeConfig(external=(ExternalServerConfig(url="http://gpu-1:8000"),), runs_engines=False)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_workers, "usable_cores", lambda: 64)


def test_a_server_with_keys_that_only_passes_requests_on_has_several_processes() -> None:
    assert with_api_workers(RELAY, has_keys=True).server.num_api_workers == MAX_API_WORKERS


def test_a_machine_with_few_cores_gets_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_workers, "usable_cores", lambda: 2)
    assert with_api_workers(RELAY, has_keys=True).server.num_api_workers == 2


@pytest.mark.parametrize(
    ("config", "has_keys"),
    [
        (RELAY, False),
        (msgspec.structs.replace(RELAY, runs_engines=True), True),
        (
            msgspec.structs.replace(
                RELAY, external=(ExternalServerConfig(url="http://gpu-1:8000", max_concurrent=8),)
            ),
            True,
        ),
        (msgspec.structs.replace(RELAY, server=ServerConfig(api_workers=1)), True),
    ],
    ids=["no keys", "engines", "a bounded server", "as told"],
)
def test_other_servers_have_one(config: ServeConfig, has_keys: bool) -> None:
    assert with_api_workers(config, has_keys=has_keys).server.num_api_workers == 1


class FakeProcess:
    """A worker that is ready at once and lives until it is told to die."""

    stdin = None

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(encode_line(WorkerReady()))
        self._dead = asyncio.Event()

    def die(self) -> None:
        self.returncode = -9
        self._dead.set()

    kill = die

    async def wait(self) -> int | None:
        await self._dead.wait()
        return self.returncode


async def test_a_dead_worker_is_started_again_once_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(api_workers, "FIRST_RESTART_DELAY_S", 0.001)
    processes: list[FakeProcess] = []
    num_refusals = 0

    async def start(*_: Any, **__: Any) -> FakeProcess:
        nonlocal num_refusals
        if processes and num_refusals < 3:
            num_refusals += 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        processes.append(FakeProcess())
        return processes[-1]

    monkeypatch.setattr(api_workers.asyncio, "create_subprocess_exec", start)
    config = ServeConfig(server=ServerConfig(api_workers=1))
    with socket.socket() as listener:
        workers = ApiWorkers(config, listener, tmp_path / "control.sock", is_open=False)
        await workers.start()
        processes[0].die()
        async with asyncio.timeout(60):
            while len(processes) < 2:
                await asyncio.sleep(0.001)
        await workers.stop()
    assert num_refusals == 3
