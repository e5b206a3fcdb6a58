"""Authenticates and authorizes every request and WebSocket. Plain ASGI, for speed.

The credential comes in a header, `Authorization: Bearer`, `x-api-key` or `api-key`; never in a URL, because URLs end
up in logs. A page can set no header of a WebSocket but its subprotocols, so a key may come as one of them, as with
OpenAI. Nothing here logs a credential or repeats it in an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from penstock.api.http.browsers import AllowedOrigins, has_local_name, is_foreign_page, is_loopback
from penstock.api.http.connections import take_place
from penstock.api.http.context import set_principal, state_of
from penstock.api.http.errors import error_response_for
from penstock.core.errors import AuthenticationFailed, PenstockError, PermissionDenied
from penstock.core.identity import OPEN_PRINCIPAL, Scope
from penstock.gateway.tenants.authenticator import Authenticator

# Paths that need no key: load balancers and people without a key may see them.
OPEN_PATHS = frozenset({"/", "/console", "/health", "/ready", "/version", "/api/version"})
_OPEN_FILES = "/console/"  # the console's scripts and styles; what they show comes from paths that need a key

# Paths that need a scope other than INFERENCE, with everything below them.
_SCOPED_PATHS = (
    ("/admin", Scope.ADMIN),
    ("/v1/load_lora_adapter", Scope.ADMIN),
    ("/v1/unload_lora_adapter", Scope.ADMIN),
    ("/metrics", Scope.METRICS),
    ("/v1/usage", Scope.USAGE),
)
_SCOPED_STARTS = tuple(start for start, _ in _SCOPED_PATHS)
_KEY_HEADERS = (b"x-api-key", b"api-key")  # of Anthropic's clients, and of Azure's
KEY_SUBPROTOCOL = "openai-insecure-api-key."
_HINT = "Send it as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
_POLICY_VIOLATION = 1008  # a WebSocket's close code


class Authenticate:
    """ASGI middleware that authenticates and authorizes. A server without keys also refuses pages of other sites,
    except those of `origins`."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, origins: AllowedOrigins | None = None
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._origins = origins or AllowedOrigins()

    def __call__(self, scope: Connection, receive: Receive, send: Send) -> Awaitable[None]:
        """Most requests have a key that is in memory, and need no coroutine."""
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or path in OPEN_PATHS or path.startswith(_OPEN_FILES):
            return self._app(scope, receive, send)
        needed = scope_of(path)
        try:
            credential = _credential(scope, may_differ=self._authenticator.is_open)
            if credential is None or scope["type"] != "http":
                return self._authenticate(scope, receive, send, credential, needed)
            principal = self._authenticator.known(credential, needed)
            if principal is None:
                return self._authenticate(scope, receive, send, credential, needed)
            take_place(scope, principal)
        except PenstockError as error:
            return _refuse(scope, receive, send, error)
        set_principal(scope, principal)
        return self._app(scope, receive, send)

    async def _authenticate(
        self, scope: Connection, receive: Receive, send: Send, credential: str | None, needed: Scope
    ) -> None:
        try:
            principal = await self._authenticator.authorize(credential, needed)
            if principal is OPEN_PRINCIPAL:
                _refuse_foreign_pages(scope, needed, self._origins)
            take_place(scope, principal)
        except PenstockError as error:
            await _refuse(scope, receive, send, error)
        else:
            set_principal(scope, principal)
            if scope["type"] == "websocket":  # a connection may outlive the key
                state_of(scope).identify = partial(self._authenticator.authorize, credential, needed)
            await self._app(scope, receive, send)


def _refuse_foreign_pages(scope: Connection, needed: Scope, origins: AllowedOrigins) -> None:
    headers = scope["headers"]
    is_allowed = needed is not Scope.ADMIN and origins.names(headers)
    if not is_allowed and is_foreign_page(headers, needs_local_name=needed is Scope.ADMIN):
        raise PermissionDenied(
            "Without keys, pages of other sites may not use this server.",
            hint="Use a key, name the page's origin with --allowed-origins, or open the page from this server's "
            "own address.",
        )
    # A WebSocket always names its page; an HTTP read may come from a page under a name that was rebound to us.
    server = scope.get("server") or ("", None)
    needs_local_name = scope["type"] == "http" and (needed is Scope.ADMIN or is_loopback(server[0]))
    if needs_local_name and not has_local_name(headers):
        raise PermissionDenied(
            "Without keys, this may only be called by an address or as localhost.",
            hint="Use a key, or an address: a name can be made to point anywhere.",
        )


def scope_of(path: str) -> Scope:
    """Return the scope that a caller needs for a path."""
    if not path.startswith(_SCOPED_STARTS):
        return Scope.INFERENCE
    for start, scope in _SCOPED_PATHS:
        if path.startswith(start) and path[len(start) :][:1] in ("", "/"):
            return scope
    return Scope.INFERENCE


def _credential(scope: Connection, *, may_differ: bool) -> str | None:
    """Return the caller's one credential. A proxy in front may have checked another of two different credentials than
    this server would, so two are refused unless they `may_differ`: the first counts then, and `Authorization` before
    the others."""
    bearer = api_key = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, credential = value.partition(b" ")
            if scheme.lower() == b"bearer":
                bearer = credential.strip()
        elif name in _KEY_HEADERS and (key := value.strip()):
            if api_key is not None and key != api_key and not may_differ:
                raise _two_keys()
            api_key = api_key or key
    if bearer and api_key and bearer != api_key and not may_differ:
        raise _two_keys()
    found = bearer or api_key
    if found is None and scope["type"] == "websocket":
        return _offered_key(scope, may_differ)
    return str(found, "latin-1") if found else None


def _offered_key(scope: Connection, may_differ: bool) -> str | None:
    """Return the key among the subprotocols of a WebSocket."""
    offered: list[str] = scope.get("subprotocols", [])
    keys = {each[len(KEY_SUBPROTOCOL) :]: None for each in offered if each.startswith(KEY_SUBPROTOCOL)}
    keys.pop("", None)
    if len(keys) > 1 and not may_differ:
        raise _two_keys()
    return next(iter(keys), None)


def _two_keys() -> AuthenticationFailed:
    return AuthenticationFailed("The request has two different keys.", hint="Send one key, in one header.")


async def _refuse(scope: Connection, receive: Receive, send: Send, error: PenstockError) -> None:
    if isinstance(error, AuthenticationFailed):
        error.hint = error.hint or _HINT
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message})
        return
    await error_response_for(scope, error)(scope, receive, send)
