"""What surrounds every request: its id, its caller's limits, the last net for exceptions. Plain ASGI, for speed."""

from __future__ import annotations

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.context import are_limits_told, set_request_id
from penstock.api.errors import internal_error_response_for, is_anthropic
from penstock.api.limit_headers import Headers, limit_headers, tells_limits
from penstock.core.errors import PenstockError
from penstock.core.identity import Principal
from penstock.gateway.gateway import Gateway

logger = logging.getLogger(__name__)


class RequestIds:
    """Names every request in a header, and turns an unforeseen exception into a logged 500. With `limits`, every
    answer to a caller that is known has its rate-limit headers, however early it was refused."""

    def __init__(self, app: ASGIApp, limits: CallerLimits | None = None) -> None:
        self._app = app
        self._limits = limits

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
                headers = [*message.get("headers", ()), (header_name, request_id.encode())]
                if self._limits is not None and not (are_limits_told(scope) or tells_limits(headers)):
                    headers += await self._limits.headers(scope)
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s (%s %s) failed", request_id, scope["method"], scope["path"])
            if has_started:
                raise  # the server closes the connection, so that the answer cannot look complete
            await internal_error_response_for(scope)(scope, receive, send_with_id)


class CallerLimits:
    """The limits of a request's caller as they stand, for answers that no account was opened for."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def headers(self, scope: Scope) -> Headers:
        """None for a caller that nobody knows."""
        principal: Principal | None = scope["state"].get("principal")
        if principal is None:
            return []
        rate_limits = await self._gateway.accounts.peek(principal, self._model(scope["state"].get("model")))
        return limit_headers(rate_limits, is_anthropic=is_anthropic(scope))

    def _model(self, name: str | None) -> str | None:
        """As limits call it. A name that is not served is nobody's: limits would otherwise be kept for any name."""
        try:
            return None if name is None else self._gateway.catalogue.answering(name).name
        except PenstockError:
            return None
