"""Several gateway processes behind one port, with real processes and the echo engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import RunningServer, start_server

pytestmark = pytest.mark.slow

NUM_WORKERS = 2
BODY = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that its tests leave running, but the last one."""
    with running_in(tmp_path_factory.mktemp("workers")) as running:
        yield running


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("limited")
    settings = folder / "settings.toml"
    settings.write_text("[limits.model]\nrequests_per_minute = 12\n")
    with running_in(folder, "--settings", str(settings)) as running:
        yield running


@contextlib.contextmanager
def running_in(folder: Path, *options: str) -> Iterator[RunningServer]:
    running = start_server(
        folder, "echo", "--api-workers", str(NUM_WORKERS), "--data-dir", str(folder), *options
    )
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
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return list(await asyncio.gather(*(ask(client) for _ in range(times))))


def test_all_workers_answer_and_their_metrics_add_up(lasting_server: RunningServer) -> None:
    server = lasting_server
    assert len(children(server, "penstock.serve.api_worker")) == NUM_WORKERS
    assert asyncio.run(ask_often(server.url, 60)) == [200] * 60

    def figures() -> set[tuple[float, float]]:
        pages = [httpx.get(f"{server.url}/metrics").text for _ in range(6)]
        names = ("penstock_generation_tokens_total", "penstock_time_to_first_token_seconds_count")
        return {(metric(page, names[0]), metric(page, names[1])) for page in pages}

    deadline = time.monotonic() + 240
    while (found := figures()) != {(60 * 8, 60)}:  # a page leaves out a worker that is slow to answer
        assert time.monotonic() < deadline, found


def test_connections_that_come_at_once_are_spread_over_the_workers(lasting_server: RunningServer) -> None:
    """One worker would take all of them, each time. On a busy machine, it does so while the others do not run."""
    deadline = time.monotonic() + 240
    while not (sum(held := held_connections(lasting_server)) >= 32 and min(held) >= 8):
        assert time.monotonic() < deadline, held


def held_connections(server: RunningServer) -> list[int]:
    """How many of 32 connections that come at once each worker takes."""
    port = int(server.url.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        httpx.get(f"{server.url}/ready")  # comes after them
        return [
            sum(
                1
                for connection in worker.net_connections()
                if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
            )
            for worker in children(server, "penstock.serve.api_worker")
        ]


def test_a_limit_holds_for_all_workers_together(limited_server: RunningServer) -> None:
    server = limited_server
    started = time.monotonic()
    with httpx.Client(base_url=server.url, timeout=60) as client:  # one connection, so one worker
        first = [client.post("/v1/completions", json=BODY).status_code for _ in range(10)]
    statuses = first + asyncio.run(ask_often(server.url, 20))
    refilled = 12 * (time.monotonic() - started) / 60
    assert first == [200] * 10
    # One more is allowed, should a worker lose its core for 20 ms while it holds the lock of the table.
    assert 12 <= statuses.count(200) <= 13 + refilled


def test_a_killed_worker_comes_back_and_the_others_serve_on(lasting_server: RunningServer) -> None:
    server = lasting_server
    victim = children(server, "penstock.serve.api_worker")[0]
    victim.kill()
    victim.wait(timeout=60)
    assert asyncio.run(ask_often(server.url, 20)) == [200] * 20
    deadline = time.monotonic() + 240
    while len(children(server, "penstock.serve.api_worker")) < NUM_WORKERS and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children(server, "penstock.serve.api_worker")) == NUM_WORKERS


def test_no_worker_refuses_anybody_while_the_only_engine_starts_again(lasting_server: RunningServer) -> None:
    server = lasting_server
    (engine,) = children(server, "penstock.cluster.worker")
    engine.kill()
    for _ in range(5):
        assert asyncio.run(ask_often(server.url, 12)) == [200] * 12


class OpenStream:
    """An answer that runs until the server or the test ends it, on a plain socket. A server with a limit admits it
    some seconds after the requests before."""

    def __init__(self, server: RunningServer) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        body = json.dumps({**BODY, "max_tokens": 60_000, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        while True:
            self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
            self.socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = self.socket.recv(1000)
            if not answer.startswith(b"HTTP/1.1 429"):
                break
            self.socket.close()
            time.sleep(0.2)
        assert answer.startswith(b"HTTP/1.1 200")

    def read_to_end(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        self.socket.close()


def all_gone(processes: list[psutil.Process]) -> bool:
    """Within four minutes. A zombie counts as gone: its new parent may reap it later."""
    deadline = time.monotonic() + 240
    while not all(map(is_gone, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_everybody_leaves_when_the_parent_is_killed_in_mid_stream(tmp_path: Path) -> None:
    with running_in(tmp_path) as server:
        streams = [OpenStream(server) for _ in range(4)]
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= NUM_WORKERS + 1
        server.process.kill()
        server.process.wait(timeout=240)
        for stream in streams:
            stream.read_to_end()
        assert all_gone(family)


def test_a_second_sigterm_cuts_answers_short(limited_server: RunningServer) -> None:
    """The last test with this server."""
    server = limited_server
    stream = OpenStream(server)
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("draining")
    server.process.send_signal(signal.SIGTERM)
    stream.read_to_end()
    assert server.process.wait(timeout=240) == 0
    assert all_gone(family)


def test_sigterm_lets_answers_finish_and_waits_for_no_body(lasting_server: RunningServer) -> None:
    """The last test with this server."""
    server = lasting_server
    port = int(server.url.rsplit(":", 1)[1])
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000000\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        has_begun = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                client.sendall(head)
                while True:  # quick enough for the server's patience with slow bodies
                    client.sendall(b" " * 2048)
                    has_begun.set()
                    time.sleep(0.05)

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert has_begun.wait(60)
        body = {**BODY, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.process.pid, signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert server.process.wait(timeout=240) == 0
        dripping.join()
