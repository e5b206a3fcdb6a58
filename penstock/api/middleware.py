"""What surrounds every request: its id, its key, and the last net for exceptions. Plain ASGI, for speed."""

from __future__ import annotations

import logging
import secrets
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.context import set_request_id
from penstock.api.errors import error_response, internal_error_response
from penstock.core.errors import AuthenticationFailed

logger = logging.getLogger(__name__)

# What load balancers, and people without a key, may see.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})


class RequestIds:
    """Names every request in an `x-request-id` header, and turns an unforeseen exception into a logged 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        set_request_id(scope, request_id)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if has_started:
                raise  # the server closes the connection, so that the answer cannot look complete
            await internal_error_response()(scope, receive, send_with_id)


class BearerKey:
    """Asks for `Authorization: Bearer <key>` everywhere but on open paths."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = AuthenticationFailed(
            "The API key is missing or wrong.", hint="Send it as the header 'Authorization: Bearer KEY'."
        )
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._key)
        return False
