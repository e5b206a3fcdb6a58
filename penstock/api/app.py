"""Puts routes, error shapes and middleware together into the application that an ASGI server runs."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from penstock.api.errors import on_http_exception, on_penstock_error, on_reader_gone
from penstock.api.middleware import BearerKey, RequestIds
from penstock.api.openai_endpoints import OpenAIEndpoints
from penstock.api.service_endpoints import ServiceEndpoints
from penstock.core.config import ServerConfig
from penstock.core.errors import PenstockError
from penstock.gateway.gateway import Gateway
from penstock.gateway.stream import ReaderGone


def create_app(gateway: Gateway, config: ServerConfig) -> ASGIApp:
    middleware = [Middleware(RequestIds)]
    if config.api_key is not None:
        middleware.append(Middleware(BearerKey, config.api_key))
    app = Starlette(
        routes=[
            *OpenAIEndpoints(gateway, config.max_body_bytes).routes(),
            *ServiceEndpoints(gateway, config.max_body_bytes).routes(),
        ],
        middleware=middleware,
        exception_handlers={
            PenstockError: on_penstock_error,
            HTTPException: on_http_exception,
            ReaderGone: on_reader_gone,
        },
    )
    app.router.redirect_slashes = False
    return app
