"""Assembles routes, error handlers and middleware into the application that an ASGI server runs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from penstock.api.admin.service import AdapterEndpoints, ModelsEndpoints, ServiceEndpoints
from penstock.api.admin.tenants import AdminEndpoints
from penstock.api.anthropic.batches import KIND as ANTHROPIC
from penstock.api.anthropic.batches import MESSAGES_PATH, MessageBatchEndpoints, MessageBatches
from penstock.api.anthropic.endpoints import AnthropicEndpoints
from penstock.api.console import ConsoleFiles
from penstock.api.files import FilesEndpoints, UploadEndpoints
from penstock.api.http.access_log import AccessLog, RequestLog
from penstock.api.http.application import (
    Application,
    CallerLimits,
    RequestCounts,
    RequestIds,
    answer_unknown_path,
    posted_endpoints,
)
from penstock.api.http.authenticate import Authenticate
from penstock.api.http.bodies import PendingBodies
from penstock.api.http.browsers import AllowedOrigins, Cors
from penstock.api.http.errors import on_deep_value, on_http_exception, on_penstock_error, on_reader_gone
from penstock.api.http.routes import OpenAPIEndpoint
from penstock.api.ollama.endpoints import OllamaEndpoints
from penstock.api.openai.batches import KIND as OPENAI
from penstock.api.openai.batches import OpenAIBatchEndpoints, OpenAIBatches
from penstock.api.openai.embeddings import EmbeddingEndpoints
from penstock.api.openai.endpoints import OpenAIEndpoints
from penstock.api.openai.moderations import ModerationEndpoints
from penstock.api.openai.responses_endpoints import ResponsesEndpoints
from penstock.api.openai.responses_history import StoredBodies
from penstock.api.openai.stored_chats import ConversationEndpoints, StoredChatEndpoints, StoredChats
from penstock.api.scoring.cohere import EmbedEndpoints, RerankEndpoints
from penstock.api.scoring.endpoints import ScoringEndpoints
from penstock.api.websocket.endpoint import WebSocketEndpoint
from penstock.api.websocket.responses import PATH as RESPONSES_PATH
from penstock.api.websocket.responses import ResponsesSession
from penstock.core.errors import PenstockError
from penstock.core.gateway_config import ServerConfig
from penstock.gateway.answers.stream import ReaderGone
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.embeddings.scores import Scores
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.responses.objects import ObjectStore
from penstock.gateway.responses.service import Responses
from penstock.gateway.responses.store import MAX_MEMORY_BYTES, ResponseStore
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.authenticator import Authenticator, Tenants
from penstock.gateway.turns import WorkspaceTurns
from penstock.gateway.uploads import Uploads


def create_app(
    gateway: Gateway,
    config: ServerConfig,
    *,
    tenants: Tenants | None = None,
    work: StoredWork | None = None,
    responses: ResponseStore | None = None,
    objects: ObjectStore | None = None,
    request_log: RequestLog | None = None,
    more_routes: Sequence[Route] = (),
    pending_bodies: PendingBodies | None = None,
) -> ASGIApp:
    """Without `tenants` there is one key at most, the server's own, and nothing to administer; without `work` there
    are neither files nor batches; without a store, `responses` and `objects` are kept in memory. `more_routes` are
    those of parts that not every server has. `pending_bodies` belongs to the protocols below, where there are any."""
    authenticator = (
        Authenticator(static_key=config.api_key, is_open=config.api_key is None)
        if tenants is None
        else tenants.authenticator
    )
    gateway.metrics.register(authenticator.metrics)
    if work is not None:
        gateway.metrics.register(work.runner.metrics)
    counts = RequestCounts(gateway.metrics.refusals)
    gateway.metrics.register(counts)
    origins = AllowedOrigins(config.allowed_origins)
    middleware = [
        Middleware(Cors, origins),
        Middleware(RequestIds, CallerLimits(gateway), counts),
        *([Middleware(AccessLog, request_log)] if request_log is not None else []),
        Middleware(Authenticate, authenticator, origins),
    ]
    embeddings = Embeddings(gateway)
    scores = Scores(embeddings)
    objects = objects or ObjectStore(Database("sqlite://"), max_workspace_bytes=MAX_MEMORY_BYTES)
    responses = responses or ResponseStore(Database("sqlite://"), max_workspace_bytes=MAX_MEMORY_BYTES)
    stored = Responses(gateway, responses, StoredBodies())
    responses_api = ResponsesEndpoints(stored, objects)
    sockets = WebSocketEndpoint(gateway, config, request_log)

    async def serve_responses(socket: WebSocket) -> None:
        await sockets.run(ResponsesSession(sockets, socket, responses_api), socket)

    chats = StoredChats(objects, stored.ttl_s)
    inference_routes = [
        *ModelsEndpoints(gateway).routes(),
        *AnthropicEndpoints(gateway).routes(),
        *OpenAIEndpoints(gateway, chats).routes(),
        *responses_api.routes(),
        *ModerationEndpoints(gateway, embeddings).routes(),
        *EmbeddingEndpoints(embeddings).routes(),
        *EmbedEndpoints(embeddings).routes(),
        *RerankEndpoints(scores).routes(),
        *ScoringEndpoints(embeddings, scores).routes(),
    ]
    app = Application(
        routes=[
            *inference_routes,
            *OllamaEndpoints(gateway, embeddings).routes(),
            *StoredChatEndpoints(chats).routes(),
            *ConversationEndpoints(stored, objects).routes(),
            *sockets.routes(),
            WebSocketRoute(RESPONSES_PATH, serve_responses),
            *(stored_work_routes(work, inference_routes) if work else ()),
            *ServiceEndpoints(gateway).routes(),
            *ConsoleFiles(tenants.sign_in if tenants else None, needs_key=not authenticator.is_open).routes(),
            *(AdminEndpoints(tenants.directory).routes() if tenants else ()),
            *AdapterEndpoints(gateway).routes(),
            *more_routes,
            *OpenAPIEndpoint().routes(),
        ],
        middleware=middleware,
        exception_handlers={
            PenstockError: on_penstock_error,
            RecursionError: on_deep_value,
            HTTPException: on_http_exception,
            ReaderGone: on_reader_gone,
        },
    )
    counts.set_routes(app.routes)
    app.max_body_bytes = config.max_body_bytes
    app.pending_bodies = pending_bodies or PendingBodies(config.max_pending_body_bytes, config.max_body_bytes)
    app.body_turns = WorkspaceTurns()
    app.router.redirect_slashes = False
    app.router.default = answer_unknown_path
    return app


def stored_work_routes(work: StoredWork, inference_routes: Sequence[Route]) -> list[Route]:
    """Also teaches the runner of batches to answer their lines as `inference_routes` would."""
    endpoints = posted_endpoints(inference_routes)
    openai = OpenAIBatches(endpoints)
    anthropic = MessageBatches(endpoints[MESSAGES_PATH])
    work.runner.teach(OPENAI, openai)
    work.runner.teach(ANTHROPIC, anthropic)
    return [
        *FilesEndpoints(work.files).routes(),
        *UploadEndpoints(Uploads(work.files)).routes(),
        *OpenAIBatchEndpoints(work, openai).routes(),
        *MessageBatchEndpoints(work, anthropic).routes(),
    ]
