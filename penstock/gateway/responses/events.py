"""The stream events of one response in the background: written while it runs, followed by any number of readers.

The events are numbered from 0, one number for each. Their log lives in the process that makes the response; it is
also written to the store now and then, for readers in other processes and for those who come later. This module
knows no wire format beyond the empty line that ends a server-sent event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Sequence

from penstock.core.errors import StoreUnavailable
from penstock.gateway.responses.store import ResponseStore, StoredResponse

WRITTEN_EVERY_S = 1.0
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
_END = b"\n\n"


class EventLog:
    """Has one writer, which calls `add`, `write` and, once, `close`."""

    def __init__(self, store: ResponseStore, record: StoredResponse) -> None:
        self._store = store
        self._record = record
        self._events: list[bytes] = []
        self._num_written = 0
        self._written_at = time.monotonic()
        self._is_closed = False
        self._news = asyncio.Event()  # replaced at each piece of news

    def add(self, events: bytes) -> None:
        if events:
            self._events += split_events(events)
            self._tell()

    async def write(self, *, at_once: bool = False) -> None:
        """Write what is new to the store, unless the last time was a moment ago."""
        if not at_once and time.monotonic() - self._written_at < WRITTEN_EVERY_S:
            return
        self._written_at = time.monotonic()
        first, fresh = self._num_written, self._events[self._num_written :]
        if not fresh:
            return
        data = zlib.compress(b"".join(fresh), 1)
        with contextlib.suppress(StoreUnavailable):
            await self._store.add_events(self._record.workspace_id, self._record.id, first, data)
            self._num_written += len(fresh)

    def close(self) -> None:
        self._is_closed = True
        self._tell()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """The events from the number `first` on, until the last one; comments while there is no news."""
        while True:
            news = self._news
            if first < len(self._events):
                fresh, first = self._events[first:], len(self._events)
                yield b"".join(fresh)
            elif self._is_closed:
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield KEEP_ALIVE

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def split_events(events: bytes) -> list[bytes]:
    return [event + _END for event in events.split(_END) if event]


def unpacked(chunks: Sequence[tuple[int, bytes]], first: int) -> list[bytes]:
    """The stored events from the number `first` on."""
    if not chunks:
        return []
    start = chunks[0][0]
    events = [event for _, data in chunks for event in split_events(zlib.decompress(data))]
    return events[max(0, first - start) :]
