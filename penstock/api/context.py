"""What is known about a request before its endpoint reads the body: its id, who is asking, how long it may take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import HTTPConnection
from starlette.types import Scope

from penstock.core.errors import InvalidRequest
from penstock.core.identity import OPEN_PRINCIPAL, Principal

TIMEOUT_HEADER = "x-request-timeout-ms"


def set_request_id(scope: Scope, request_id: str) -> None:
    scope.setdefault("state", {})["request_id"] = request_id


def set_principal(scope: Scope, principal: Principal) -> None:
    scope.setdefault("state", {})["principal"] = principal


def note_model(connection: HTTPConnection, name: str | None) -> None:
    """Which model a request names, for whoever answers it in the endpoint's place."""
    connection.scope["state"]["model"] = name


def note_limits_told(scope: Scope) -> None:
    """The answer says what its caller's limits are, if there are any."""
    scope.setdefault("state", {})["limits_told"] = True


def are_limits_told(scope: Scope) -> bool:
    return scope["state"].get("limits_told", False) is True


def request_id_of(connection: HTTPConnection) -> str:
    return str(connection.scope["state"]["request_id"])


def principal_of(connection: HTTPConnection) -> Principal:
    """Whoever the key belongs to; without keys, the owner of the machine."""
    principal: Principal = connection.scope["state"].get("principal", OPEN_PRINCIPAL)
    return principal


def timeout_s_of(connection: HTTPConnection) -> float | None:
    """How long the client will wait for the whole answer; None when it does not say."""
    text = connection.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 12 and int(text)):
        raise InvalidRequest(f"The header {TIMEOUT_HEADER} must be a whole number of milliseconds above 0.")
    return int(text) / 1000


def set_identify(scope: Scope, identify: Callable[[], Awaitable[Principal]]) -> None:
    """How to ask again who a connection belongs to, for connections that outlive a request."""
    scope.setdefault("state", {})["identify"] = identify


async def current_principal_of(connection: HTTPConnection) -> Principal:
    """Like `principal_of`, but checked now: raises AuthenticationFailed when the key has been revoked since."""
    identify: Callable[[], Awaitable[Principal]] | None = connection.scope["state"].get("identify")
    return principal_of(connection) if identify is None else await identify()
