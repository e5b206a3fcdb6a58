"""Calls an endpoint from inside: the very function that a route calls, without a server and without middleware.

The caller says who is asking, which middleware would otherwise have found out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from penstock.api.context import set_principal, set_request_id
from penstock.core.identity import Principal
from penstock.gateway.batches.batch import LineAnswer

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def posted_endpoints(routes: Sequence[Route]) -> dict[str, Endpoint]:
    """The endpoints that take a POST, by path."""
    return {route.path: route.endpoint for route in routes if route.methods and "POST" in route.methods}


async def call_endpoint(
    endpoint: Endpoint, path: str, body: bytes, *, principal: Principal, request_id: str
) -> LineAnswer:
    """Status and body of the answer. Raises the PenstockError that the endpoint raises; cancelling this cancels the
    request."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "state": {},
    }
    set_principal(scope, principal)
    set_request_id(scope, request_id)
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # a caller from inside never hangs up
        raise AssertionError("unreachable")

    status = 500
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    response = await endpoint(Request(scope, receive, send))
    await response(scope, receive, send)
    return LineAnswer(status, b"".join(parts))
