"""Puts routes, error shapes and middleware together into the application that an ASGI server runs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.api.access_log import AccessLog, RequestJournal
from penstock.api.adapter_endpoints import AdapterEndpoints
from penstock.api.admin_endpoints import AdminEndpoints
from penstock.api.anthropic_endpoints import AnthropicEndpoints
from penstock.api.application import Application
from penstock.api.authenticate import Authenticate
from penstock.api.batch_routes import stored_work_routes
from penstock.api.embeddings_endpoints import EmbeddingEndpoints
from penstock.api.errors import on_http_exception, on_penstock_error, on_reader_gone
from penstock.api.middleware import CallerLimits, RequestIds
from penstock.api.models_endpoints import ModelsEndpoints
from penstock.api.openai_endpoints import OpenAIEndpoints
from penstock.api.openapi import OpenAPIEndpoint
from penstock.api.openapi_operations import OPERATIONS
from penstock.api.responses_endpoints import ResponsesEndpoints
from penstock.api.responses_service import Responses
from penstock.api.service_endpoints import ServiceEndpoints
from penstock.api.websocket import WebSocketEndpoint
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import ServerConfig
from penstock.gateway.batches.service import StoredWork
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.responses.store import MemoryResponses, ResponseStore
from penstock.gateway.stream import ReaderGone
from penstock.gateway.tenants.authenticator import Authenticator
from penstock.gateway.tenants.service import Tenants


def create_app(
    gateway: Gateway,
    config: ServerConfig,
    *,
    tenants: Tenants | None = None,
    work: StoredWork | None = None,
    responses: ResponseStore | None = None,
    journal: RequestJournal | None = None,
    more_routes: Sequence[Route] = (),
) -> ASGIApp:
    """Without `tenants` there is one key at most, the server's own, and nothing to administer; without `work` there
    are neither files nor batches; without a store `responses` are kept in memory. `more_routes` are those of parts
    that not every server has."""
    authenticator = (
        Authenticator(static_key=config.api_key, is_open=config.api_key is None)
        if tenants is None
        else tenants.authenticator
    )
    gateway.metrics.register(authenticator.metrics)
    if work is not None:
        gateway.metrics.register(work.runner.metrics)
    middleware = [
        Middleware(RequestIds, CallerLimits(gateway)),
        *([Middleware(AccessLog, journal)] if journal is not None else []),
        Middleware(Authenticate, authenticator),
    ]
    inference_routes = [
        *ModelsEndpoints(gateway).routes(),
        *AnthropicEndpoints(gateway, config.max_body_bytes).routes(),
        *OpenAIEndpoints(gateway, config.max_body_bytes).routes(),
        *ResponsesEndpoints(
            Responses(gateway, responses or MemoryResponses()), config.max_body_bytes
        ).routes(),
        *EmbeddingEndpoints(Embeddings(gateway), config.max_body_bytes).routes(),
    ]
    app = Application(
        routes=[
            *inference_routes,
            *WebSocketEndpoint(gateway, config, journal).routes(),
            *(stored_work_routes(work, inference_routes, config.max_body_bytes) if work else ()),
            *ServiceEndpoints(gateway, config.max_body_bytes).routes(),
            *(AdminEndpoints(tenants.directory, config.max_body_bytes).routes() if tenants else ()),
            *AdapterEndpoints(gateway, config.max_body_bytes).routes(),
            *more_routes,
            *OpenAPIEndpoint(OPERATIONS).routes(),
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
