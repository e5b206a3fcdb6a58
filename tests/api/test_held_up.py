"""A server that stood still (a frozen process or machine) does not blame its clients for the time that it lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import uvicorn
from starlette.applications import Starlette
from uvicorn.server import ServerState

from penstock.api.http.connections import ClientTimer
from penstock.api.http.protocol import BoundedHttpProtocol, bounded_protocols
from penstock.core.gateway_config import ServerConfig
from penstock.core.identity import Principal

BODY = b'{"prompt": "hi", "max_tokens": 4}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that does not run by itself: `pass_time` calls what is due, as late as the test wants it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def run_once(self) -> None:
        """Run what is ready."""
        self.call_soon(self.stop)
        self.run_forever()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for timer in list(self._scheduled):  # type: ignore[attr-defined]
            if timer.when() <= self.now_s:
                self._scheduled.remove(timer)  # type: ignore[attr-defined]
                if not timer.cancelled():
                    timer._run()


@pytest.mark.parametrize(
    ("freezes_s", "ends_after_s"),
    [
        ({}, 10.0),
        ({0.5: 20.0}, 30.0),  # the clock goes on while the process stands still
        ({8.5: 20.0}, 30.0),
        ({9.5: 20.0}, 30.5),  # the last step begins anew when the process goes on
        ({3.0: 0.5}, 10.5),  # a busy server
        ({0.5 * turn: 2.0 for turn in range(100)}, 27.5),  # it is late each time, and ends all the same
    ],
)
def test_time_in_which_the_server_stood_still_does_not_count(
    freezes_s: dict[float, float], ends_after_s: float
) -> None:
    loop = VirtualLoop()
    ended_s: list[float] = []
    ClientTimer(loop, 10.0, lambda: ended_s.append(loop.time()))
    ran_s = 0.0
    while not ended_s:
        loop.pass_time(0.5 + freezes_s.get(ran_s, 0.0))
        ran_s += 0.5
    assert ended_s[0] == pytest.approx(ends_after_s, abs=1.0)
    loop.close()


def test_a_cancelled_timer_ends_nothing() -> None:
    loop = VirtualLoop()
    timer = ClientTimer(loop, 10.0, lambda: pytest.fail("it was cancelled"))
    loop.pass_time(30.0)
    timer.cancel()
    loop.pass_time(30.0)
    loop.close()


class OpenConnection(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False
        self.num_unread_bytes = 0  # that were written
        self.protocol: asyncio.BaseProtocol | None = None

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.num_unread_bytes

    def is_closing(self) -> bool:
        return self.is_closed

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


Served: TypeAlias = tuple[VirtualLoop, BoundedHttpProtocol, OpenConnection]


@pytest.fixture
def served() -> Iterator[Served]:
    """A connection that a server has just taken, with time limits of 10 s."""
    http, _, _ = bounded_protocols(
        ServerConfig(header_timeout_s=10.0, body_timeout_s=10.0, write_timeout_s=10.0, max_unread_bytes=1000)
    )
    loop = VirtualLoop()
    yield loop, *accept(http, loop)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_once()
    loop.close()


def accept(
    http: type[BoundedHttpProtocol], loop: asyncio.AbstractEventLoop
) -> tuple[BoundedHttpProtocol, OpenConnection]:
    config = uvicorn.Config(Starlette(), timeout_keep_alive=10, log_config=None)
    config.load()
    protocol = http(config, ServerState(), {}, _loop=loop)
    connection = OpenConnection()
    connection.protocol = protocol
    protocol.connection_made(connection)
    return protocol, connection


@pytest.mark.parametrize("first", [b"", REQUEST[:30], REQUEST[:-5]])
def test_a_request_that_came_during_a_freeze_is_taken(served: Served, first: bytes) -> None:
    loop, protocol, connection = served
    if first:
        protocol.data_received(first)
    loop.pass_time(30.0)
    protocol.data_received(REQUEST[len(first) :])
    for _ in range(100):
        loop.pass_time(0.5)
    assert not connection.is_closed
    assert protocol.cycle is not None
    assert bytes(protocol.cycle.body) == BODY


def test_a_client_that_sends_nothing_after_a_freeze_either_is_refused(served: Served) -> None:
    loop, _, connection = served
    loop.pass_time(30.0)
    assert not connection.written
    for _ in range(20):
        loop.pass_time(0.5)
    assert connection.written.startswith(b"HTTP/1.1 408")
    assert connection.is_closed


def answer(protocol: BoundedHttpProtocol) -> None:
    protocol.data_received(REQUEST)
    assert protocol.cycle is not None
    protocol.cycle.response_complete = True
    protocol.on_response_complete()


def test_the_rest_of_a_body_is_read_after_an_early_answer(served: Served) -> None:
    loop, protocol, connection = served
    head = b"POST /none HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (8 << 20)
    protocol.data_received(head + bytes(4 << 20))
    assert protocol.flow.is_held, "other connections have their turn"
    for _ in range(20):
        loop.run_once()
    assert connection.written.startswith(b"HTTP/1.1 404")
    assert not protocol.flow.read_paused
    protocol.data_received(bytes(4 << 20) + REQUEST)
    for _ in range(20):
        loop.run_once()
    assert connection.written.count(b"HTTP/1.1 404") == 2


def test_idle_connections_end_some_time_after_their_last_answer(served: Served) -> None:
    loop, protocol, connection = served
    for _ in range(4):
        answer(protocol)
        for _ in range(9):
            loop.pass_time(1.0)
        assert not connection.is_closed
    loop.pass_time(1.0)
    assert connection.is_closed
    assert not connection.written


def test_a_connection_that_was_idle_before_a_freeze_still_takes_requests(served: Served) -> None:
    loop, protocol, connection = served
    answer(protocol)
    loop.pass_time(30.0)
    assert not connection.is_closed
    loop.pass_time(10.0)
    assert connection.is_closed


def pass_seconds(loop: VirtualLoop, seconds: int) -> None:
    for _ in range(seconds):
        loop.pass_time(1.0)


@pytest.mark.parametrize("is_kept_alive", [True, False])
def test_a_closed_connection_whose_client_does_not_read_the_rest_ends(
    served: Served, is_kept_alive: bool
) -> None:
    """The rest is too small to pause the writer, and the connection counts as open until it is read."""
    loop, protocol, connection = served
    connection.num_unread_bytes = 40_000
    connection.is_closed = not is_kept_alive
    if is_kept_alive:
        answer(protocol)
        pass_seconds(loop, 10)
        assert connection.is_closed
    else:
        protocol.on_response_complete()
    assert not connection.is_aborted
    pass_seconds(loop, 10)
    assert connection.is_aborted
    assert protocol.limits.metrics.num_stalled == 1


def test_a_client_that_reads_a_long_answer_slowly_is_not_dropped(served: Served) -> None:
    loop, protocol, connection = served
    connection.num_unread_bytes = 1_000_000
    protocol.pause_writing()
    while connection.num_unread_bytes > 20_000:
        connection.num_unread_bytes -= 20_000
        pass_seconds(loop, 10)
        assert not connection.is_aborted
    pass_seconds(loop, 10)
    assert connection.is_aborted, "the client reads no more"


class SlowReaders:
    """The connections of workspaces whose clients do not read what is written."""

    def __init__(self, loop: VirtualLoop, http: type[BoundedHttpProtocol]) -> None:
        self.loop = loop
        self.http = http
        self.protocols: list[BoundedHttpProtocol] = []

    def write(self, workspace: str, num_bytes: int) -> OpenConnection:
        protocol, connection = accept(self.http, self.loop)
        self.protocols.append(protocol)
        protocol._place.take(Principal(workspace_id=workspace, key_id="key"))
        connection.num_unread_bytes = num_bytes
        protocol.pause_writing()
        return connection


@pytest.fixture
def slow_readers(served: Served) -> SlowReaders:
    loop, protocol, _ = served
    return SlowReaders(loop, type(protocol))


def test_a_workspace_that_reads_nothing_leaves_room_to_others(slow_readers: SlowReaders) -> None:
    write = slow_readers.write
    greedy = [write("greedy", 250) for _ in range(2)]
    assert not any(each.is_aborted for each in greedy)
    greedy.append(write("greedy", 300))
    assert [each.is_aborted for each in greedy] == [True, False, False], "the one that has waited the longest"
    other = write("other", 300)
    assert not any(each.is_aborted for each in (other, *greedy[1:]))
    for protocol in slow_readers.protocols:
        if not protocol.transport.is_closing():
            protocol.resume_writing()
    unread = slow_readers.protocols[0].limits.unread
    assert unread.shares.used == 0
    assert not unread._waiting


def test_one_answer_may_have_more_than_the_share(slow_readers: SlowReaders) -> None:
    first = slow_readers.write("greedy", 5000)
    assert not first.is_aborted
    second = slow_readers.write("greedy", 5000)
    assert first.is_aborted
    assert not second.is_aborted


def test_readers_that_read_are_spared(slow_readers: SlowReaders) -> None:
    reading = slow_readers.write("greedy", 20_000)
    reading.num_unread_bytes = 300
    assert not slow_readers.write("greedy", 300).is_aborted
    assert not reading.is_aborted
    limits = slow_readers.protocols[0].limits
    assert limits.unread.shares.of("greedy") == 600
    assert limits.metrics.num_stalled == 0
