"""Rules for web pages that call the server from a browser: CORS for allowed origins, checks against foreign pages.

A browser lets any page send a POST anywhere: without CORS the page cannot read the answer, but the request takes
effect. With DNS rebinding, a foreign page can even look like a page of this server. Programs other than browsers send
none of the headers that are checked here, and a server that asks for keys needs no check, because pages have no key.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Awaitable, Iterable, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.http.errors import error_response_for
from penstock.core.errors import ConfigError, PermissionDenied
from penstock.core.gateway_config import ServerConfig

ANY_ORIGIN = "*"
PREFLIGHT_LIFETIME_S = 600
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_FIGURES = ("limit", "remaining", "reset")
_READABLE_HEADERS = ", ".join(
    [
        "x-request-id, request-id, retry-after, retry-after-ms, x-should-retry, warning, x-penstock-cache",
        *(f"x-ratelimit-{figure}-{kind}" for kind in ("requests", "tokens") for figure in _FIGURES),
        *(
            f"anthropic-ratelimit-{kind}-{figure}"
            for kind in ("requests", "tokens", "input-tokens", "output-tokens")
            for figure in _FIGURES
        ),
    ]
).encode()
_ELSEWHERE = (b"cross-site", b"same-site")  # as opposed to same-origin and none (a typed URL)

Headers = Iterable[tuple[bytes, bytes]]


class AllowedOrigins:
    """The origins that the operator named, such as https://app.example, or `*` for all. Raises ConfigError for text
    that is no origin."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        for origin in origins:
            parts = urlsplit(origin)
            is_origin = parts.scheme and parts.netloc and f"{parts.scheme}://{parts.netloc}" == origin
            if origin != ANY_ORIGIN and not is_origin:
                raise ConfigError(
                    f"{origin!r} is not an origin.",
                    hint="An origin is a scheme, a host and perhaps a port: --allowed-origins https://app.example",
                )
        self._named = frozenset(origin.encode() for origin in origins)
        self._allows_any = ANY_ORIGIN in origins

    def __bool__(self) -> bool:
        return bool(self._named)

    def allows(self, origin: bytes) -> bool:
        return self._allows_any or origin in self._named

    def names(self, headers: Headers) -> bool:
        """Return whether the headers come from a page whose origin the operator named. `*` names no origin: on a
        server without keys, `*` would admit every page."""
        return _header(headers, b"origin") in self._named


def check_web_settings(config: ServerConfig) -> None:
    """Raises ConfigError for origins and TLS files that the server could not use, before a model is loaded."""
    AllowedOrigins(config.allowed_origins)
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs a certificate.", hint="Name it with --ssl-certfile.")
        return
    for path in filter(None, (config.ssl_certfile, config.ssl_keyfile)):
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from error
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except OSError as error:  # an SSLError is one
        raise ConfigError(
            f"The certificate {config.ssl_certfile} cannot be used: {error}.",
            hint="Both files must be PEM, and the key must belong to the certificate.",
        ) from error


class Cors:
    """ASGI middleware that answers CORS preflights and lets allowed origins read the answers, errors included."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins
        self._has_origins = bool(origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Most requests need nothing from here, not even a coroutine."""
        if scope["type"] != "http" or not (self._has_origins or scope["method"] == "OPTIONS"):
            return self._app(scope, receive, send)
        return self._look_at_origin(scope, receive, send)

    async def _look_at_origin(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_options = scope["method"] == "OPTIONS"
        origin = _header(scope["headers"], b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif is_options and _header(scope["headers"], b"access-control-request-method") is not None:
            await self._answer_preflight(origin, scope, receive, send)
        elif not self._origins.allows(origin):
            await self._app(scope, receive, send)
        else:

            async def send_readable(message: Message) -> None:
                if message["type"] == "http.response.start":
                    readable = (b"access-control-expose-headers", _READABLE_HEADERS)
                    message["headers"] = [*message.get("headers", ()), *_allowing(origin), readable]
                await send(message)

            await self._app(scope, receive, send_readable)

    async def _answer_preflight(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._origins.allows(origin):
            error = PermissionDenied(
                f"Pages of {origin.decode('latin-1')[:200]} may not use this server.",
                hint="The operator can allow the origin with --allowed-origins.",
            )
            await error_response_for(scope, error)(scope, receive, send)
            return
        wanted = (
            _header(scope["headers"], b"access-control-request-headers") or b"authorization, content-type"
        )
        headers = [
            *_allowing(origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"%d" % PREFLIGHT_LIFETIME_S),
        ]
        if _header(scope["headers"], b"access-control-request-private-network") is not None:
            # A browser asks before a public page may call a server inside the local network.
            headers.append((b"access-control-allow-private-network", b"true"))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def is_foreign_page(headers: Headers, *, needs_local_name: bool) -> bool:
    """Return whether a browser sends these headers for a page of another site. With `needs_local_name` a page counts
    as our own only if the browser opened it by an IP address or as localhost: DNS rebinding cannot change those
    names."""
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
    # Browsers say how page and server relate; browsers that do not, over plain HTTP, still name the page's origin.
    if site in _ELSEWHERE or (site is None and origin is not None and _place(origin) != host):
        return True
    return needs_local_name and not _is_local_name(host)


def has_local_name(headers: Headers) -> bool:
    """Return whether the client called the server by an IP address or as localhost. A browser believes that a page
    under a rebound name belongs to this server. In a request that only reads, the name is the only sign of
    rebinding."""
    return _is_local_name(_header(headers, b"host") or b"")


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, also in the IPv4-mapped form of dual-stack sockets, such as
    ::ffff:127.0.0.1."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _allowing(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


def _header(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


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
