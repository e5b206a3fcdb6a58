"""The OpenAPI document, made from the routes of an application and from the wire shapes of its endpoints.

The table `OPERATIONS` names the request and response shape of each route; a test checks that no route is missing.
A route without an entry still appears in the document, with bodies of any shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock import __version__
from penstock.api.admin.adapters import (
    AdapterDeleted,
    AdapterList,
    AdapterObject,
    LoadAdapter,
    UnloadAdapter,
)
from penstock.api.admin.experiments import ExperimentList, ExperimentObject, NewExperiment
from penstock.api.admin.fleet import USAGE_PARAMETERS, ReleaseList, ReleaseObject, WhichModel
from penstock.api.admin.history import HISTORY_PARAMETERS, REQUEST_PARAMETERS, ConsoleObject, RequestList
from penstock.api.admin.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from penstock.api.admin.settings import (
    Reloaded,
    RevertSettings,
    SettingsHistory,
    SettingsObject,
    SettingsVersionObject,
)
from penstock.api.admin.tenants import (
    AuditList,
    KeyChangesBody,
    KeyList,
    KeyObject,
    NewKeyBody,
    NewKeyObject,
    NewOrganization,
    NewWorkspace,
    OrganizationList,
    OrganizationObject,
    Renaming,
    WorkspaceList,
    WorkspaceObject,
)
from penstock.api.anthropic.answers import Message
from penstock.api.anthropic.batches import (
    CreateMessageBatch,
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchList,
)
from penstock.api.anthropic.endpoints import TokenCount
from penstock.api.anthropic.requests import CountTokensRequest, MessagesRequest
from penstock.api.console import Exchange, SignedIn, SignInOffer
from penstock.api.files import (
    CompleteUpload,
    FileDeleted,
    FileList,
    FileObject,
    NewUpload,
    UploadObject,
    UploadPart,
)
from penstock.api.http.errors import AnthropicErrorBody, CohereErrorBody, ErrorBody, OllamaErrorBody
from penstock.api.models import ModelEntry, ModelList
from penstock.api.ollama.answers import ChatPart, GeneratePart
from penstock.api.ollama.endpoints import EmbeddingsResponse, EmbedResponse
from penstock.api.ollama.models import PullStatus, ShownModel, TaggedModels, Version
from penstock.api.ollama.requests import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
)
from penstock.api.openai.answers import ChatCompletion, Completion
from penstock.api.openai.batches import BatchList, CreateBatch, WireBatch
from penstock.api.openai.conversations import (
    ConversationChanges,
    ConversationDeleted,
    ConversationObject,
    NewConversation,
    NewItems,
)
from penstock.api.openai.embeddings import CreateEmbeddings, EmbeddingList
from penstock.api.openai.moderations import CreateModeration, ModerationList
from penstock.api.openai.requests import ChatCompletionRequest, CompletionRequest
from penstock.api.openai.responses_answers import ResponseBody
from penstock.api.openai.responses_endpoints import (
    CompactedResponse,
    CompactRequest,
    DeletedResponse,
    InputItemList,
    InputTokens,
)
from penstock.api.openai.responses_items import InputItem
from penstock.api.openai.responses_requests import ResponseRequest
from penstock.api.openai.stored_chats import CompletionChanges, CompletionDeleted, StoredList
from penstock.api.scoring.embed import CohereEmbedRequest, CohereEmbedResponse
from penstock.api.scoring.endpoints import (
    ClassificationList,
    CreateClassification,
    CreatePooling,
    CreateScores,
    PooledList,
    ScoreList,
)
from penstock.api.scoring.rerank import RerankRequest, RerankResponse
from penstock.core.cluster_view import ClusterView, HostOrder, ReleaseOrder, ReplicaOrder
from penstock.gateway.history.history import HistoryView
from penstock.gateway.ledger.usage_store import UsagePage
from penstock.gateway.simulations import SimulationChoices, SimulationObject, SimulationOrder

PATH = "/openapi.json"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"

_REFERENCE = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERRORS: dict[str, type[msgspec.Struct]] = {
    "/v1/messages": AnthropicErrorBody,
    "/api/": OllamaErrorBody,
    "/v2/": CohereErrorBody,
}  # others: OpenAI's
_WITH_BODY = frozenset({"POST", "PATCH", "PUT"})


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """The request and the response of one method of one path. None stands for any JSON."""

    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()
    streams: bool = False  # can also answer with a stream
    stream_type: str = EVENT_STREAM
    takes_body: bool = True  # of a method that could
    form: Mapping[str, Any] | None = None  # fields of a multipart form, in place of a JSON body
    content_type: str = JSON  # of the answer


class OpenAPIEndpoint:
    """Serves the document, made when it is first asked for."""

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._operations = operations
        self._body: bytes | None = None

    def routes(self) -> list[Route]:
        return [Route(PATH, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        if self._body is None:
            document = openapi_document(request.app.routes, self._operations)
            self._body = msgspec.json.encode(document)
        return Response(self._body, media_type=JSON)


def openapi_document(routes: Iterable[BaseRoute], operations: Mapping[str, Operation]) -> dict[str, Any]:
    """`operations` are keyed by method and path: `GET /v1/models`."""
    described = [
        (method, route, operations.get(f"{method} {route.path}", Operation()))
        for route in routes
        if isinstance(route, Route) and route.path != PATH
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    schemas, components = _schemas([operation for _, _, operation in described])
    paths: dict[str, dict[str, Any]] = {}
    for method, route, operation in described:
        path = _PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(method, route, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


Schemas = Mapping[type[msgspec.Struct], dict[str, Any]]


def _schemas(operations: Sequence[Operation]) -> tuple[Schemas, dict[str, Any]]:
    """Return a reference to each shape, and what the references stand for."""
    shapes: list[type[msgspec.Struct]] = [ErrorBody, *_ERRORS.values()]
    for operation in operations:
        shapes += [
            shape
            for shape in (operation.request, operation.response)
            if shape is not None and shape not in shapes
        ]
    references, components = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    return dict(zip(shapes, references, strict=True)), components


def _operation(method: str, route: Route, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    name: str = route.endpoint.__name__
    path_parameters = [
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        for parameter in _PATH_PARAMETER.findall(route.path.replace(":path", ""))
    ]
    query = [
        {"name": parameter, "in": "query", "schema": {"type": "string"}} for parameter in operation.query
    ]
    described: dict[str, Any] = {
        "operationId": f"{name}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}_{method.lower()}",
        "summary": name.replace("_", " ").capitalize(),
        "tags": [_tag(route.path)],
        "parameters": path_parameters + query,
        "responses": _responses(route, operation, schemas),
    }
    if operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": dict(operation.form)}},
        }
    elif method in _WITH_BODY and operation.takes_body:
        schema = schemas[operation.request] if operation.request else {}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _responses(route: Route, operation: Operation, schemas: Schemas) -> dict[str, Any]:
    schema = schemas[operation.response] if operation.response else {}
    content: dict[str, Any] = {operation.content_type: {"schema": schema}}
    if operation.streams:
        content[operation.stream_type] = {"schema": {"type": "string"}}
    shapes = (shape for prefix, shape in _ERRORS.items() if route.path.startswith(prefix))
    error = schemas[next(shapes, ErrorBody)]
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "A refusal or a failure.", "content": {JSON: {"schema": error}}},
    }


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" and len(parts) > 1 else parts[0] or "page"


_UPLOAD = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "required": ["purpose", "file"],
}
_PART = {
    "type": "object",
    "properties": {"data": {"type": "string", "contentMediaType": "application/octet-stream"}},
    "required": ["data"],
}
_PAGE = ("limit", "after")

INFERENCE: dict[str, Operation] = {
    "GET /v1/models": Operation(response=ModelList),
    "GET /v1/models/{name:path}": Operation(response=ModelEntry),
    "POST /v1/chat/completions": Operation(
        request=ChatCompletionRequest, response=ChatCompletion, streams=True
    ),
    "GET /v1/chat/completions": Operation(
        response=StoredList, query=("limit", "after", "order", "model", "metadata")
    ),
    "GET /v1/chat/completions/{completion_id}": Operation(response=ChatCompletion),
    "POST /v1/chat/completions/{completion_id}": Operation(
        request=CompletionChanges, response=ChatCompletion
    ),
    "DELETE /v1/chat/completions/{completion_id}": Operation(response=CompletionDeleted),
    "GET /v1/chat/completions/{completion_id}/messages": Operation(
        response=StoredList, query=("limit", "after", "order")
    ),
    "POST /v1/completions": Operation(request=CompletionRequest, response=Completion, streams=True),
    "POST /v1/responses": Operation(request=ResponseRequest, response=ResponseBody, streams=True),
    "POST /v1/responses/input_tokens": Operation(request=ResponseRequest, response=InputTokens),
    "POST /v1/responses/compact": Operation(request=CompactRequest, response=CompactedResponse),
    "GET /v1/responses/{response_id}": Operation(
        response=ResponseBody, query=("stream", "starting_after"), streams=True
    ),
    "DELETE /v1/responses/{response_id}": Operation(response=DeletedResponse),
    "POST /v1/responses/{response_id}/cancel": Operation(response=ResponseBody, takes_body=False),
    "GET /v1/responses/{response_id}/input_items": Operation(
        response=InputItemList, query=("limit", "after", "order")
    ),
    "POST /v1/conversations": Operation(request=NewConversation, response=ConversationObject),
    "GET /v1/conversations/{conversation_id}": Operation(response=ConversationObject),
    "POST /v1/conversations/{conversation_id}": Operation(
        request=ConversationChanges, response=ConversationObject
    ),
    "DELETE /v1/conversations/{conversation_id}": Operation(response=ConversationDeleted),
    "POST /v1/conversations/{conversation_id}/items": Operation(request=NewItems, response=InputItemList),
    "GET /v1/conversations/{conversation_id}/items": Operation(
        response=InputItemList, query=("limit", "after", "order")
    ),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": Operation(response=InputItem),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": Operation(response=ConversationObject),
    "POST /v1/embeddings": Operation(request=CreateEmbeddings, response=EmbeddingList),
    "POST /v2/embed": Operation(request=CohereEmbedRequest, response=CohereEmbedResponse),
    **{
        f"POST {path}": Operation(request=RerankRequest, response=RerankResponse)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    **{
        f"POST {path}": Operation(request=CreateScores, response=ScoreList)
        for path in ("/v1/score", "/score")
    },
    **{
        f"POST {path}": Operation(request=CreateClassification, response=ClassificationList)
        for path in ("/v1/classify", "/classify")
    },
    "POST /pooling": Operation(request=CreatePooling, response=PooledList),
    "POST /v1/moderations": Operation(request=CreateModeration, response=ModerationList),
    "POST /v1/messages": Operation(request=MessagesRequest, response=Message, streams=True),
    "POST /v1/messages/count_tokens": Operation(request=CountTokensRequest, response=TokenCount),
}

OLLAMA: dict[str, Operation] = {
    "POST /api/chat": Operation(request=ChatRequest, response=ChatPart, streams=True, stream_type=JSON_LINES),
    "POST /api/generate": Operation(
        request=GenerateRequest, response=GeneratePart, streams=True, stream_type=JSON_LINES
    ),
    "POST /api/embed": Operation(request=EmbedRequest, response=EmbedResponse),
    "POST /api/embeddings": Operation(request=EmbeddingsRequest, response=EmbeddingsResponse),
    "GET /api/tags": Operation(response=TaggedModels),
    "GET /api/ps": Operation(response=TaggedModels),
    "POST /api/show": Operation(request=ModelRequest, response=ShownModel),
    "GET /api/version": Operation(response=Version),
    "POST /api/pull": Operation(request=ModelRequest, response=PullStatus),
}

STORED_WORK: dict[str, Operation] = {
    "POST /v1/files": Operation(form=_UPLOAD, response=FileObject),
    "GET /v1/files": Operation(response=FileList, query=(*_PAGE, "order", "purpose")),
    "GET /v1/files/{file_id}": Operation(response=FileObject),
    "DELETE /v1/files/{file_id}": Operation(response=FileDeleted),
    "GET /v1/files/{file_id}/content": Operation(content_type="application/octet-stream"),
    "POST /v1/uploads": Operation(request=NewUpload, response=UploadObject),
    "POST /v1/uploads/{upload_id}/parts": Operation(form=_PART, response=UploadPart),
    "POST /v1/uploads/{upload_id}/complete": Operation(request=CompleteUpload, response=UploadObject),
    "POST /v1/uploads/{upload_id}/cancel": Operation(response=UploadObject, takes_body=False),
    "POST /v1/batches": Operation(request=CreateBatch, response=WireBatch),
    "GET /v1/batches": Operation(response=BatchList, query=_PAGE),
    "GET /v1/batches/{batch_id}": Operation(response=WireBatch),
    "POST /v1/batches/{batch_id}/cancel": Operation(response=WireBatch, takes_body=False),
    "POST /v1/messages/batches": Operation(request=CreateMessageBatch, response=MessageBatch),
    "GET /v1/messages/batches": Operation(
        response=MessageBatchList, query=("limit", "after_id", "before_id")
    ),
    "GET /v1/messages/batches/{batch_id}": Operation(response=MessageBatch),
    "DELETE /v1/messages/batches/{batch_id}": Operation(response=MessageBatchDeleted),
    "POST /v1/messages/batches/{batch_id}/cancel": Operation(response=MessageBatch, takes_body=False),
    "GET /v1/messages/batches/{batch_id}/results": Operation(content_type="application/x-jsonl"),
}

SERVICE: dict[str, Operation] = {
    "GET /": Operation(content_type="text/html"),
    "GET /console": Operation(content_type="text/html"),
    "GET /console/sign-in": Operation(response=SignInOffer),
    "POST /console/sign-in": Operation(request=Exchange, response=SignedIn),
    "GET /console/{name}": Operation(content_type="application/octet-stream"),
    "GET /health": Operation(),
    "GET /ready": Operation(),
    "GET /version": Operation(),
    "GET /metrics": Operation(content_type="text/plain"),
    "POST /tokenize": Operation(request=TokenizeRequest, response=TokenizeResponse),
    "GET /tokenizer_info": Operation(response=TokenizerInfo, query=("model",)),
    "POST /detokenize": Operation(request=DetokenizeRequest, response=DetokenizeResponse),
    "GET /v1/usage": Operation(response=UsagePage, query=tuple(sorted(USAGE_PARAMETERS))),
}

ADMIN: dict[str, Operation] = {
    "GET /admin/organizations": Operation(query=_PAGE, response=OrganizationList),
    "POST /admin/organizations": Operation(request=NewOrganization, response=OrganizationObject),
    "GET /admin/organizations/{id}": Operation(response=OrganizationObject),
    "PATCH /admin/organizations/{id}": Operation(request=Renaming, response=OrganizationObject),
    "DELETE /admin/organizations/{id}": Operation(response=OrganizationObject),
    "GET /admin/workspaces": Operation(query=(*_PAGE, "organization_id"), response=WorkspaceList),
    "POST /admin/workspaces": Operation(request=NewWorkspace, response=WorkspaceObject),
    "GET /admin/workspaces/{id}": Operation(response=WorkspaceObject),
    "PATCH /admin/workspaces/{id}": Operation(request=Renaming, response=WorkspaceObject),
    "DELETE /admin/workspaces/{id}": Operation(response=WorkspaceObject),
    "GET /admin/keys": Operation(query=(*_PAGE, "workspace_id"), response=KeyList),
    "POST /admin/keys": Operation(request=NewKeyBody, response=NewKeyObject),
    "GET /admin/keys/{id}": Operation(response=KeyObject),
    "PATCH /admin/keys/{id}": Operation(request=KeyChangesBody, response=KeyObject),
    "DELETE /admin/keys/{id}": Operation(response=KeyObject),
    "GET /admin/audit": Operation(query=(*_PAGE, "target"), response=AuditList),
    "GET /admin/settings": Operation(response=SettingsObject),
    "PUT /admin/settings": Operation(response=SettingsVersionObject),
    "PATCH /admin/settings": Operation(response=SettingsVersionObject),
    "POST /admin/settings/reload": Operation(takes_body=False, response=Reloaded),
    "POST /admin/settings/revert": Operation(request=RevertSettings, response=SettingsVersionObject),
    "GET /admin/settings/versions": Operation(query=_PAGE, response=SettingsHistory),
    "GET /admin/settings/versions/{version}": Operation(response=SettingsVersionObject),
    "GET /admin/adapters": Operation(response=AdapterList),
    "POST /admin/adapters": Operation(request=LoadAdapter, response=AdapterObject),
    "DELETE /admin/adapters/{name:path}": Operation(response=AdapterDeleted),
    "POST /v1/load_lora_adapter": Operation(request=LoadAdapter, content_type="text/plain"),
    "POST /v1/unload_lora_adapter": Operation(request=UnloadAdapter, content_type="text/plain"),
    "GET /admin/cluster": Operation(response=ClusterView),
    "GET /admin/console": Operation(response=ConsoleObject),
    "GET /admin/requests": Operation(response=RequestList, query=REQUEST_PARAMETERS),
    "GET /admin/simulations": Operation(response=SimulationChoices),
    "POST /admin/simulations": Operation(request=SimulationOrder, response=SimulationObject),
    "GET /admin/history": Operation(response=HistoryView, query=HISTORY_PARAMETERS),
    "POST /admin/cluster": Operation(request=HostOrder, response=ClusterView),
    "POST /admin/replicas": Operation(request=ReplicaOrder, response=ClusterView),
    "GET /admin/releases": Operation(response=ReleaseList),
    "POST /admin/releases": Operation(request=ReleaseOrder, response=ReleaseObject),
    "POST /admin/releases/promote": Operation(request=WhichModel, response=ReleaseObject),
    "POST /admin/releases/rollback": Operation(request=WhichModel, response=ReleaseObject),
    "GET /admin/experiments": Operation(response=ExperimentList),
    "POST /admin/experiments": Operation(request=NewExperiment, response=ExperimentObject),
    "POST /admin/experiments/stop": Operation(request=WhichModel, response=ExperimentObject),
}

OPERATIONS = INFERENCE | OLLAMA | STORED_WORK | SERVICE | ADMIN
