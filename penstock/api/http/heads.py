"""Heads of requests: their checks while they arrive, and heads that a connection sends again.

An ambiguous head is refused. A proxy in front of the server might read the head in another way, and see another
sender or another end of the request (RFC 9112).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import httptools

from penstock.core.errors import HeadTooLarge, InvalidRequest

MAX_HEADERS = 100
# Headers that a request may have once only: a proxy might have checked the other one.
_SINGLE_HEADERS = frozenset({b"host", b"transfer-encoding", b"authorization", b"x-api-key", b"api-key"})
_HOST_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:[]%!$&'()*+;="
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class ArrivingHead:
    """The head of one request while it arrives: its size, and the headers that may come only once."""

    __slots__ = ("_began_in_chunk", "_num_bytes", "_num_chunk_bytes", "_singles")

    def __init__(self) -> None:
        self._singles: dict[bytes, bytes] = {}
        self._num_bytes = 0  # of the chunks before the one in which the head ends
        self._num_chunk_bytes = 0
        self._began_in_chunk = False  # whether the head began in the current chunk

    def next_chunk(self, num_bytes: int) -> None:
        """Note that a chunk has arrived, before it is parsed."""
        self._began_in_chunk = False
        self._num_chunk_bytes = num_bytes

    def begin(self) -> None:
        """Note that another head begins in this chunk."""
        self._began_in_chunk = True
        self._num_bytes = 0
        self._singles.clear()

    def add(self, name: bytes, value: bytes) -> None:
        """Note a header, whose name is in lower case. Raises InvalidRequest if it may not come again."""
        if name in _SINGLE_HEADERS:
            if name in self._singles:
                raise InvalidRequest(f"The request has more than one header {name.decode()!r}.")
            self._singles[name] = value

    def count_chunk(self) -> int:
        """Count a chunk that did not end the head. Returns the size of the head so far. Bytes in one chunk with the
        end of an earlier request are not counted: a chunk is at most a read buffer."""
        if not self._began_in_chunk:
            self._num_bytes += self._num_chunk_bytes
        return self._num_bytes

    def may_exceed(self, num_bytes: int) -> bool:
        """Return whether a complete head may be larger. Most heads arrive in one chunk: a small chunk has no large
        head."""
        return not self._began_in_chunk or self._num_chunk_bytes > num_bytes

    def check(self, http_version: str, target: bytes) -> None:
        """Raise InvalidRequest for a head that is not plain HTTP/1.1 or HTTP/1.0."""
        host, coding = self._singles.get(b"host"), self._singles.get(b"transfer-encoding")
        if http_version != "1.1" and http_version != "1.0":
            raise InvalidRequest("This server speaks HTTP/1.1.")
        if host is None:
            if http_version == "1.1":
                raise InvalidRequest("The request has no header 'host'.")
        elif host.strip(_HOST_BYTES):
            raise InvalidRequest("The header 'host' of the request does not hold a host.")
        if coding is not None and (http_version == "1.0" or coding.strip().lower() != b"chunked"):
            raise InvalidRequest("The only supported transfer coding is 'chunked', in HTTP/1.1.")
        if target[:1] != b"/" and host is not None and httptools.parse_url(target).host is not None:
            authority = target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
            if authority.lower() != host.lower():
                raise InvalidRequest(
                    "The request names one host in its first line, and another in its headers."
                )


def head_too_large(max_bytes: int) -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head is larger than {max_bytes} bytes, or has more than {MAX_HEADERS} headers."
    )


def is_plain_target(target: bytes) -> bool:
    """Return whether the target of a request is a path, with or without a query, that needs no decoding."""
    is_path = target[:1] == b"/" and target[:2] != b"//"
    return is_path and target.isascii() and b"%" not in target and b"#" not in target


def head_without_upgrade(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of an HTTP/1.1 request without its offer to change the protocol."""
    head = [method, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE_HEADERS)
        if name not in _UPGRADE_HEADERS and value:
            head += [name, b": ", value, b"\r\n"]
    return b"".join(head) + b"\r\n"


_LENGTH = b"ength: "  # at its end, "Content-Length: " in the two common spellings
_MAX_LENGTH_DIGITS = 9
# Headers that only the parser handles.
_UNPLAIN_HEADERS = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"trailer"})


class KnownHead:
    """The head of a POST request that the parser has read, without the length of the body. Clients send the same head
    again and again over a connection, and parsing a head costs a tenth of a short request."""

    __slots__ = ("_end", "_headers", "_start", "target")

    def __init__(
        self, start: bytes, end: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self._start = start  # up to the length
        self._end = end  # from the length to the end of the head
        self._headers = [each for each in headers if each[0] != b"content-length"]
        self.target = target

    @classmethod
    def of(cls, data: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> KnownHead | None:
        """Return the head of the one request that `data` is, as the parser has read it from the first byte on. None
        for a head whose framing is more than a length, and for several requests."""
        by_name = dict(headers)
        is_plain = len(by_name) == len(headers) and _UNPLAIN_HEADERS.isdisjoint(by_name)
        if not is_plain or by_name.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        end = data.find(b"\r\n\r\n") + 4
        first = data.find(_LENGTH, 0, end) + len(_LENGTH)
        last = data.find(b"\r\n", first, end)
        name = data[data.rfind(b"\n", 0, first) + 1 : first].lower()
        length = by_name.get(b"content-length", b"")
        is_length = name == b"content-length: " and data[first:last] == length and length.isdigit()
        is_alone = is_length and data.startswith(b"POST ") and end + int(length) == len(data)
        return cls(data[:first], data[last:end], target, headers) if is_alone else None

    def request(self, data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes] | None:
        """Return the headers and the body of the whole request that `data` is, if it has this head."""
        start, end = self._start, self._end
        if not data.startswith(start):
            return None
        first = len(start)
        last = data.find(b"\r\n", first)
        length = data[first:last]
        if not data.startswith(end, last) or not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            return None
        body = data[last + len(end) :]
        if int(length) != len(body) or not body:
            return None
        return [*self._headers, (b"content-length", length)], body
