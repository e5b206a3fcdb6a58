"""Processes that share a listening socket, here as listeners in one event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.serve import even_listener
from penstock.serve.even_listener import IMPATIENCE_S, SLACK, ConnectionCounts, EvenListener
from tests.certificates import self_signed

NUM_CONNECTIONS = 40


class Held(asyncio.Protocol):
    def __init__(self, process: Process) -> None:
        self._process = process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process.count(+1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.count(-1)


class Process:
    def __init__(self, listener: socket.socket, folder: Path, number: int, num_processes: int) -> None:
        self.counts = ConnectionCounts(folder / "connections", num_processes, number)
        self.num_held = 0
        self._listener = EvenListener(listener.dup(), self.counts, lambda: Held(self))

    def count(self, change: int) -> None:
        self.num_held += change
        self.counts.publish(self.num_held)

    def stop(self) -> None:
        self._listener.close()


@pytest.fixture
def listener() -> socket.socket:
    made = socket.create_server(("127.0.0.1", 0), backlog=128)
    made.setblocking(False)
    return made


async def connect(listener: socket.socket, processes: Sequence[Process]) -> list[asyncio.StreamWriter]:
    """Open connections at once, and return when all are accepted."""
    before = sum(process.num_held for process in processes)
    port = listener.getsockname()[1]
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_CONNECTIONS))
    )
    async with asyncio.timeout(60):
        while sum(process.num_held for process in processes) < before + NUM_CONNECTIONS:
            await asyncio.sleep(0.001)
    return [writer for _, writer in opened]


async def test_new_connections_go_to_the_process_that_holds_fewer(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Process(listener, tmp_path, 0, 2)
    second = Process(listener, tmp_path, 1, 2)
    second.stop()
    writers = await connect(listener, [first])
    second = Process(listener, tmp_path, 1, 2)
    await asyncio.sleep(1.1 * IMPATIENCE_S)  # the first one expects nobody to come until then
    monkeypatch.setattr(
        even_listener, "PATIENCE_S", 60.0
    )  # on a busy machine, the other one may be slow to come
    writers += await connect(listener, [first, second])
    assert second.num_held >= NUM_CONNECTIONS - SLACK - 1  # without a preference, both would get half
    first.stop()
    second.stop()
    for writer in writers:
        writer.close()


async def test_a_process_that_stands_still_keeps_no_connection_waiting(
    listener: socket.socket, tmp_path: Path
) -> None:
    stopped, running = (Process(listener, tmp_path, number, 2) for number in range(2))
    stopped.stop()
    writers = await connect(listener, [running])
    assert (stopped.num_held, running.num_held) == (0, NUM_CONNECTIONS)
    running.stop()
    for writer in writers:
        writer.close()


async def test_a_new_process_starts_with_no_connections(tmp_path: Path) -> None:
    path = tmp_path / "connections"
    first, other = ConnectionCounts(path, 2, 0), ConnectionCounts(path, 2, 1)
    first.publish(7)
    other.publish(9)
    assert other.fewest == 7
    assert (ConnectionCounts(path, 2, 0).own, other.fewest, other.own) == (0, 0, 9)


class WithoutFiles(socket.socket):
    """A listening socket of a process that has no free file for a while."""

    num_failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_a_process_without_free_files_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(even_listener, "RETRY_S", 0.001)
    accepted = asyncio.Event()

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()
            accepted.set()

    with WithoutFiles() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        accepting = EvenListener(listener, None, Taken)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(60):
            await accepted.wait()
        writer.close()
        accepting.close()
    assert [record.getMessage() for record in caplog.records if "accepted" in record.message] == [
        f"new connections wait, because none can be accepted: {os.strerror(errno.EMFILE)}",
        "connections are accepted again",
    ]


async def test_handshakes_that_do_not_end_make_room(listener: socket.socket, tmp_path: Path) -> None:
    context, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    certificate, key = self_signed(tmp_path)
    context.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    held: list[asyncio.BaseTransport] = []

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            held.append(transport)

    accepting = EvenListener(listener, None, Taken, context, num_free=lambda: 3 - len(held))
    port = listener.getsockname()[1]
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    async with asyncio.timeout(60):
        assert [await reader.read() for reader, _ in silent[:2]] == [b"", b""], "the oldest made room"
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        assert await silent[2][0].read() == b""
        while not held:
            await asyncio.sleep(0)
    accepting.close()
    for open_one in (writer, *(each for _, each in silent)):
        open_one.close()
    for transport in held:
        transport.close()
