"""A client's connection whose small writes leave at the end of the event loop's turn, so that all requests which
arrived together are worked on before the first answer leaves.

A write wakes its reader. A reader on the same processor runs at once, and displaces from the caches what the next
request needs: before an external server, this cost a fifth of the processor time of a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD_BYTES = 16 << 10  # of one connection; more leaves at once, and the transport may pause the writer


class LateWrites(asyncio.Transport):
    """A transport around another one. The order of writes is kept, and closing sends what is held."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[bytes | bytearray | memoryview[Any]] = []
        self._num_held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        held = self._held
        self._num_held_bytes += len(data)
        held.append(data)
        if self._num_held_bytes > MAX_HELD_BYTES:
            self.flush()
        elif len(held) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what is held. Nothing goes to a connection that closes, as with any transport."""
        held = self._held
        if held and not self._transport.is_closing():
            self._transport.writelines(held)
        held.clear()
        self._num_held_bytes = 0

    def unwrap(self) -> asyncio.Transport:
        """Return the transport below, for a protocol that takes over the connection."""
        self.flush()
        return self._transport

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._num_held_bytes = 0
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._num_held_bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
