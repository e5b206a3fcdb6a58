"""Several gateway processes behind one port, with real processes and the echo engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.slow

NUM_WORKERS = 3
BODY = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    running = start_server(tmp_path, "echo", "--api-workers", str(NUM_WORKERS), "--data-dir", str(tmp_path))
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0


def children(server: RunningServer, module: str) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    return [child for child in found if module in " ".join(child.cmdline())]


def metric(page: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


async def ask(client: httpx.AsyncClient) -> int:
    return (await client.post("/v1/completions", json=BODY)).status_code


async def ask_often(url: str, times: int) -> list[int]:
    """Each on a connection of its own, so that the kernel may choose another worker."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        return list(await asyncio.gather(*(ask(client) for _ in range(times))))


def test_all_workers_answer_and_their_metrics_add_up(server: RunningServer) -> None:
    assert len(children(server, "penstock.cli.api_worker")) == NUM_WORKERS
    assert asyncio.run(ask_often(server.url, 60)) == [200] * 60
    pages = {httpx.get(f"{server.url}/metrics").text for _ in range(6)}
    assert {metric(page, "penstock_generation_tokens_total") for page in pages} == {60 * 8}
    assert {metric(page, "penstock_time_to_first_token_seconds_count") for page in pages} == {60}


def test_a_killed_worker_comes_back_and_the_others_serve_on(server: RunningServer) -> None:
    victim = children(server, "penstock.cli.api_worker")[0]
    victim.kill()
    victim.wait(timeout=10)
    assert asyncio.run(ask_often(server.url, 20)) == [200] * 20
    deadline = time.monotonic() + 30
    while len(children(server, "penstock.cli.api_worker")) < NUM_WORKERS and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children(server, "penstock.cli.api_worker")) == NUM_WORKERS


def test_every_worker_hears_of_the_engines_death_and_return(server: RunningServer) -> None:
    (engine,) = children(server, "penstock.cluster.worker")
    engine.kill()
    deadline = time.monotonic() + 60
    statuses: list[int] = []
    while time.monotonic() < deadline:
        statuses = asyncio.run(ask_often(server.url, 12))
        assert set(statuses) <= {200, 503}
        if statuses == [200] * 12:
            break
        time.sleep(0.2)
    assert statuses == [200] * 12


def test_sigterm_lets_answers_finish(server: RunningServer) -> None:
    async def stream_through_the_stop() -> str:
        body = {**BODY, "max_tokens": 400, "stream": True}
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            parts = response.aiter_text()
            first = await anext(parts)
            os.kill(server.process.pid, signal.SIGTERM)
            return first + "".join([part async for part in parts])

    assert asyncio.run(stream_through_the_stop()).rstrip().endswith("[DONE]")
    assert server.process.wait(timeout=30) == 0
