"""What surrounds every request: its id, and the last net for exceptions. Plain ASGI, for speed."""

from __future__ import annotations

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.context import set_request_id
from penstock.api.errors import internal_error_response_for, is_anthropic

logger = logging.getLogger(__name__)


class RequestIds:
    """Names every request in a header, and turns an unforeseen exception into a logged 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        set_request_id(scope, request_id)
        header_name = b"request-id" if is_anthropic(scope) else b"x-request-id"
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), (header_name, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if has_started:
                raise  # the server closes the connection, so that the answer cannot look complete
            await internal_error_response_for(scope)(scope, receive, send_with_id)
