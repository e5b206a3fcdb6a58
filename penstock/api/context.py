"""What the middleware found out about a request before its endpoint runs: its id and who is asking."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import Scope

from penstock.core.identity import OPEN_PRINCIPAL, Principal


def set_request_id(scope: Scope, request_id: str) -> None:
    scope.setdefault("state", {})["request_id"] = request_id


def set_principal(scope: Scope, principal: Principal) -> None:
    scope.setdefault("state", {})["principal"] = principal


def request_id_of(connection: HTTPConnection) -> str:
    return str(connection.scope["state"]["request_id"])


def principal_of(connection: HTTPConnection) -> Principal:
    """Whoever the key belongs to; without keys, the owner of the machine."""
    principal: Principal = connection.scope["state"].get("principal", OPEN_PRINCIPAL)
    return principal
