"""The context of a request, from headers and middleware: its id, its caller, its time limit, its cache settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Scope

from penstock.core.errors import InvalidRequest
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.gateway.answers.stream import AnswerStream
from penstock.gateway.prompts import GenerationRequest
from penstock.gateway.turns import working_for

TIMEOUT_HEADER = "x-request-timeout-ms"

# The ASGI extension whose `watch` calls back when the client of a request goes away; None ends the watch.
ON_DEPARTURE = "penstock.on_departure"
ConnectionWatch: TypeAlias = Callable[[Callable[[], None] | None], None]


_HEADERS = "penstock.headers"
_STATE = "penstock.state"


def watch_of(scope: Scope) -> ConnectionWatch | None:
    """Return the server's watch over the client's connection. Other servers report a disconnect by `receive`
    alone."""
    found = (scope.get("extensions") or {}).get(ON_DEPARTURE)
    return found["watch"] if found else None


def headers_of(connection: HTTPConnection) -> dict[bytes, bytes]:
    """Return the headers by their names in lower case; the first of several with one name. Looking up several headers
    costs less in a dictionary than in Starlette's list. Callers must not change it."""
    scope = connection.scope
    found: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if found is None:
        found = scope[_HEADERS] = dict(reversed(scope["headers"]))
    return found


class RequestState(msgspec.Struct):
    """What middleware and endpoints note about one request, or about one WebSocket."""

    request_id: str | None = None
    principal: Principal | None = None  # None before the caller is known, and on paths that need no key
    model: str | None = None  # the name in the request; rate-limit headers are about this model
    deployment: str | None = None  # the model that the path names; the body need not name it then
    refusal: str | None = None  # the code of the error that the answer tells; it is counted
    has_sent_limits: bool = False  # the answer has its caller's rate-limit headers
    # Authenticates the connection again, if it may outlive a request.
    identify: Callable[[], Awaitable[Principal]] | None = None


def state_of(scope: Scope) -> RequestState:
    found: RequestState | None = scope.get(_STATE)
    if found is None:
        found = scope[_STATE] = RequestState()
    return found


def set_principal(scope: Scope, principal: Principal) -> None:
    state_of(scope).principal = principal
    working_for.set(principal.workspace_id)


def note_model(connection: HTTPConnection, name: str | None) -> None:
    state_of(connection.scope).model = name


def request_id_of(connection: HTTPConnection) -> str:
    return str(state_of(connection.scope).request_id)


def principal_of(connection: HTTPConnection) -> Principal:
    """Return the caller that the key belongs to; on a server without keys, the owner of the machine."""
    return state_of(connection.scope).principal or OPEN_PRINCIPAL


def timeout_s_of(connection: HTTPConnection) -> float | None:
    """Return how long the client waits for the whole answer; None if the client sent no timeout."""
    return _timeout_s(headers_of(connection).get(_TIMEOUT_HEADER))


def _timeout_s(value: bytes | None) -> float | None:
    if value is None:
        return None
    text = value.decode("latin-1")
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 12 and int(text)):
        raise InvalidRequest(f"The header {TIMEOUT_HEADER} must be a whole number of milliseconds above 0.")
    return int(text) / 1000


async def current_principal_of(connection: HTTPConnection) -> Principal:
    """Like `principal_of`, but checked now: raises AuthenticationFailed when the key has been revoked since."""
    identify = state_of(connection.scope).identify
    return principal_of(connection) if identify is None else await identify()


CACHE_HEADER = "x-penstock-cache"  # asks for seconds, or "off"; answers "hit" or "miss"
WARNING_HEADER = b"warning"
MAX_WARNINGS = 8  # in headers; the body of the answer has all
MAX_WARNING_CHARS = 500
IDEMPOTENCY_HEADER = "idempotency-key"
REGION_HEADER = "x-penstock-region"
MAX_REGION_LENGTH = 64
_TIMEOUT_HEADER, _CACHE_HEADER, _IDEMPOTENCY_HEADER, _REGION_HEADER = (
    name.encode() for name in (TIMEOUT_HEADER, CACHE_HEADER, IDEMPOTENCY_HEADER, REGION_HEADER)
)

_OWN_HEADERS = frozenset((_TIMEOUT_HEADER, _CACHE_HEADER, _IDEMPOTENCY_HEADER, _REGION_HEADER))


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def context_of(connection: HTTPConnection, model: str | None) -> dict[str, Any]:
    """Return the fields of a `GenerationRequest` that the caller and the headers determine."""
    headers, state = headers_of(connection), state_of(connection.scope)
    state.model = model
    fields: dict[str, Any] = {
        "principal": state.principal or OPEN_PRINCIPAL,
        "request_id": state.request_id,
    }
    if not _OWN_HEADERS.isdisjoint(headers):
        fields |= {
            "idempotency_key": _text(headers.get(_IDEMPOTENCY_HEADER)),
            "cache_response_s": _cache_seconds(_text(headers.get(_CACHE_HEADER))),
            "region": _region(_text(headers.get(_REGION_HEADER)) or ""),
            "timeout_s": _timeout_s(headers.get(_TIMEOUT_HEADER)),
        }
    return fields


def with_context(
    connection: HTTPConnection, request: GenerationRequest, *, is_read_whole: bool = False
) -> GenerationRequest:
    fields = context_of(connection, request.model)
    return msgspec.structs.replace(request, is_read_whole=is_read_whole, **fields)


def answer_headers(answer: AnswerStream) -> list[tuple[bytes, bytes]]:
    """Return headers with the answer's warnings and, for a request that used the response cache, hit or miss."""
    status = answer.cache_status
    headers = [] if status is None else [(_CACHE_HEADER, status.encode())]
    if not answer.warnings:
        return headers
    return headers + [(WARNING_HEADER, _warning(each.message)) for each in answer.warnings[:MAX_WARNINGS]]


def _warning(message: str) -> bytes:
    """Code 299 stands for a lasting warning of any kind. The text is one quoted line of ASCII."""
    line = "".join(each if each.isprintable() else " " for each in message[:MAX_WARNING_CHARS])
    quoted = line.replace("\\", "\\\\").replace('"', '\\"')
    return b'299 penstock "%b"' % quoted.encode("ascii", "replace")


def _region(text: str) -> str:
    if len(text) > MAX_REGION_LENGTH or not (text.isascii() and text.isprintable()):
        raise InvalidRequest(f"The header {REGION_HEADER} must be the name of a region.", param=REGION_HEADER)
    return text.strip()


def _cache_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    if text.strip().lower() == "off":
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidRequest(
            f"The header {CACHE_HEADER} must be a number of seconds, or 'off', not {text[:40]!r}.",
            param=CACHE_HEADER,
        )
    return seconds
