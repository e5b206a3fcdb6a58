"""Keeps pages of other sites from using an open server through the browser of someone who can reach it.

Browsers let any page send a POST anywhere; it cannot read the answer, but the deed is done. And a host name may point
to this machine only for the attack (DNS rebinding), which makes a strange page look like one of ours. Programs other
than browsers send none of these headers, and a server that asks for keys needs none of this: pages have no key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

_ELSEWHERE = (b"cross-site", b"same-site")  # as opposed to same-origin, and to what a person typed in


def is_foreign_page(headers: Iterable[tuple[bytes, bytes]], *, needs_local_name: bool) -> bool:
    """Whether a browser sends this for a page that is not ours. With `needs_local_name` a page counts as ours only
    if it was opened by an address or as localhost, which nobody can rebind."""
    origin = site = None
    host = b""
    for name, value in headers:
        if name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
        elif name == b"host":
            host = value
    if origin is None and site is None:
        return False
    # Browsers say how page and server relate; those that do not, for plain HTTP, still name the page's origin.
    if site in _ELSEWHERE or (site is None and origin is not None and _place(origin) != host):
        return True
    return needs_local_name and not _is_local_name(host)


def has_local_name(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the server was called by an address or as localhost. A page under a rebound name is one of ours to its
    browser, and where it only reads, nothing but the name gives it away."""
    return _is_local_name(next((value for name, value in headers if name == b"host"), b""))


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _place(origin: bytes) -> bytes:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return b""


def _is_local_name(host: bytes) -> bool:
    try:
        name = urlsplit(b"//" + host).hostname or b""
        if name == b"localhost" or name.endswith(b".localhost"):
            return True
        ipaddress.ip_address(name.decode("ascii"))
    except ValueError:
        return False
    return True
