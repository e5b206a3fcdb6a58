"""Exchanges between the gateway processes of a server which external server got which prompt. External servers report
nothing about their caches, so a process would otherwise know only the prefixes that it sent itself.

Messages are datagrams on Unix sockets in a private folder. A lost message costs only a cached prefix. No process
waits for another process that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.cluster.external.pool import ExternalPool

MAX_MESSAGE_BYTES = 1 << 17
MAX_READ_AT_ONCE = 32


class _Placed(msgspec.Struct, array_like=True):
    server: str
    hashes: list[bytes]


class Placements:
    """Open from `start` to `close`, in one event loop."""

    def __init__(self, pool: ExternalPool, folder: Path, num_processes: int, number: int) -> None:
        self._pool = pool
        paths = [folder / f"placed-{process}.sock" for process in range(num_processes)]
        self._own = paths.pop(number)
        self._others = [str(path) for path in paths]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(_Placed).decode

    def start(self) -> None:
        self._own.unlink(missing_ok=True)  # of a process that died
        self._socket.bind(str(self._own))
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        self._pool.on_placed = self._tell

    def close(self) -> None:
        self._pool.on_placed = None
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._own.unlink(missing_ok=True)

    def _tell(self, server: str, hashes: Sequence[bytes]) -> None:
        message = self._encode(_Placed(server, list(hashes)))
        for other in self._others:
            with contextlib.suppress(OSError):  # it starts, has died, or does not read
                self._socket.sendto(message, other)

    def _read(self) -> None:
        for _ in range(MAX_READ_AT_ONCE):
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except OSError:
                return
            with contextlib.suppress(msgspec.DecodeError):
                placed = self._decode(message)
                self._pool.learn(placed.server, placed.hashes)
