"""Checks on the head of a request. An ambiguous head is refused: a proxy in front of the server might read it in
another way, and disagree with the server on who sends a request, or on where the request ends (RFC 9112)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from penstock.api.http.errors import error_body
from penstock.core.errors import InvalidRequest, PenstockError

# Headers that a request may have once only: a proxy might have checked the other one.
SINGLE_HEADERS = frozenset({b"host", b"transfer-encoding", b"authorization", b"x-api-key", b"api-key"})
_HOST_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:[]%!$&'()*+;="
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


def last_answer(error: PenstockError) -> bytes:
    """Return the whole answer that refuses a request below ASGI, and after which the connection ends."""
    body = error_body(error)
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return STATUS_LINE[error.status] + head + body


def is_plain_target(target: bytes) -> bool:
    """Say whether the target of a request is a path, with or without a query, that needs no decoding."""
    is_path = target[:1] == b"/" and target[:2] != b"//"
    return is_path and target.isascii() and b"%" not in target and b"#" not in target


def check_head(http_version: str, target: bytes, singles: Mapping[bytes, bytes]) -> None:
    """Raise InvalidRequest for a head that is not plain HTTP/1.1 or HTTP/1.0. `singles` are the SINGLE_HEADERS that
    the request has."""
    host, coding = singles.get(b"host"), singles.get(b"transfer-encoding")
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
            raise InvalidRequest("The request names one host in its first line, and another in its headers.")


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
