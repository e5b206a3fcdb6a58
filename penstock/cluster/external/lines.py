"""Server-sent events out of bytes. Knows no JSON."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

MAX_LINE_BYTES = 16 << 20
_DONE = b"[DONE]"


class LineTooLong(Exception):
    """No event is that large: whatever sends it is no event stream."""


async def event_data(source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event, up to the one that says that there are no more. Lines end at line feeds only: text may
    hold characters that other decoders split at."""
    pending = b""
    async for piece in source:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == _DONE:
                    return
                if data:
                    yield data
        if len(pending) > MAX_LINE_BYTES:
            raise LineTooLong
    if pending.startswith(b"data:") and (rest := pending[5:].strip()) and rest != _DONE:
        yield rest
