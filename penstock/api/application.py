"""Starlette, with a short way to the endpoints that matter for speed. Knows no endpoint by name."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.direct import posted_endpoints
from penstock.api.errors import CLIENT_CLOSED_REQUEST, error_response_for
from penstock.core.errors import PenstockError
from penstock.gateway.stream import ReaderGone


class Application(Starlette):
    """Its outermost middleware must answer every exception: Starlette's own last net is left out, because it answers
    in the shape of no API."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        app = ShortWay(app, self.routes)
        for layer, arguments, options in reversed(self.user_middleware):
            app = layer(app, *arguments, **options)
        return app


class ShortWay:
    """Calls what takes a POST at a fixed path, as every request for tokens does, straight away: the router would try
    one pattern after the other, and the layers around it cost as much again. The rest goes on to `app`."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        fixed = [route for route in routes if isinstance(route, Route) and not route.param_convertors]
        self._endpoints = posted_endpoints(fixed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await endpoint(Request(scope, receive, send))
        except PenstockError as error:
            answer = error_response_for(scope, error)
        except ReaderGone:
            answer = Response(status_code=CLIENT_CLOSED_REQUEST)  # which only logs will see
        await answer(scope, receive, send)
