"""Heads of answers that come again: a server sends the same one with every short answer, but for the length and, once
a second, the date."""

from __future__ import annotations

from collections.abc import Mapping

MAX_LENGTH_DIGITS = 9
_LENGTH = b"\r\ncontent-length: "


class KnownHead:
    """The head of a whole answer that the parser has read, without the length of the body. To compare it takes a
    third of the time that the parser takes."""

    __slots__ = ("_end", "_start", "headers", "status")

    def __init__(self, start: bytes, end: bytes, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._start = start  # up to the length
        self._end = end  # from the length to the end of the head
        self.status = status
        self.headers = {name: value for name, value in headers.items() if name != b"content-length"}

    @classmethod
    def of(cls, data: bytes, status: int, headers: Mapping[bytes, bytes]) -> KnownHead | None:
        """Return the head of the one answer that `data` is from its first byte to its last, after which the
        connection can stay. None for a head whose length cannot be told from the rest."""
        end = data.find(b"\r\n\r\n") + 4
        first = data[:end].lower().find(_LENGTH) + len(_LENGTH)
        last = data.find(b"\r\n", first, end)
        if data[first:last] != headers.get(b"content-length") or b"transfer-encoding" in headers:
            return None
        head = cls(data[:first], data[last:end], status, headers)
        return head if head.body(data) is not None else None

    def body(self, data: bytes) -> bytes | None:
        """Return the body of the whole answer that `data` is, if it has this head."""
        start, end = self._start, self._end
        if not data.startswith(start):
            return None
        first = len(start)
        last = data.find(b"\r\n", first, first + MAX_LENGTH_DIGITS + 2)
        length = data[first:last]
        if last < 0 or not length.isdigit() or not data.startswith(end, last):
            return None
        body = data[last + len(end) :]
        return body if body and int(length) == len(body) else None
