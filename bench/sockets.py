"""Loads an HTTP server from plain sockets: as little client as can be, because it shares the machine with the server.

Every connection is kept alive and has one request under way; when its answer is complete, the next one goes out.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

HOST = "127.0.0.1"
_READ_BYTES = 1 << 16
_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to be sent again and again."""

    port: int
    request: bytes

    @classmethod
    def post(cls, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Call:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {HOST}:{port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        return cls(port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of calls took."""

    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    @property
    def p50_ms(self) -> float:
        return 1e3 * statistics.median(self.latencies_s)


class _Connection:
    def __init__(self, call: Call) -> None:
        self.socket = socket.create_connection((HOST, call.port), timeout=_ANSWER_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = call.request
        self._answer = b""
        self._length: int | None = (
            None  # of head and body together; None for chunks, and before the head is there
        )
        self._is_chunked = False
        self._sent_at = 0.0

    def send(self) -> None:
        self._answer, self._length, self._is_chunked = b"", None, False
        self._sent_at = time.perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> float | None:
        """The seconds that the answer took, once it is complete."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError(f"the server closed the connection after {self._answer[-300:]!r}")
        self._answer = answer = self._answer + data if self._answer else data
        if self._length is None and not self._is_chunked:
            self._read_head(answer)
        is_complete = (
            answer.endswith(b"0\r\n\r\n")
            if self._is_chunked
            else self._length is not None and len(answer) >= self._length
        )
        return time.perf_counter() - self._sent_at if is_complete else None

    def _read_head(self, answer: bytes) -> None:
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {answer[:1000]!r}")
        head = answer[:end].lower()
        _, name, value = head.partition(b"\r\ncontent-length:")
        if name:
            self._length = end + 4 + int(value.partition(b"\r\n")[0])
        else:
            self._is_chunked = True


def run(call: Call, *, num_clients: int, seconds: float) -> Load:
    """Send calls over `num_clients` connections, one at a time on each, for so long; then let the last finish."""
    connections = [_Connection(call) for _ in range(num_clients)]
    by_descriptor = {connection.socket.fileno(): connection for connection in connections}
    poll = select.epoll()
    latencies: list[float] = []
    num_open = num_clients
    started = time.perf_counter()
    try:
        for descriptor, connection in by_descriptor.items():
            poll.register(descriptor, select.EPOLLIN)
            connection.send()
        while num_open:
            ready = poll.poll(_ANSWER_TIMEOUT_S)
            if not ready:
                raise TimeoutError("the server does not answer")
            for descriptor, _ in ready:
                connection = by_descriptor[descriptor]
                latency_s = connection.read()
                if latency_s is None:
                    continue
                latencies.append(latency_s)
                if time.perf_counter() - started < seconds:
                    connection.send()
                else:
                    num_open -= 1
                    poll.unregister(descriptor)  # its server may close it now
    finally:
        poll.close()
        for connection in connections:
            connection.socket.close()
    return Load(time.perf_counter() - started, tuple(latencies))
