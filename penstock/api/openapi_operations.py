"""What every route takes and gives, in one table. A test sees to it that none is missing."""

from __future__ import annotations

from penstock.api.adapter_endpoints import (
    AdapterDeleted,
    AdapterList,
    AdapterObject,
    LoadAdapter,
    UnloadAdapter,
)
from penstock.api.admin_endpoints import (
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
from penstock.api.anthropic_answers import Message
from penstock.api.anthropic_endpoints import TokenCount
from penstock.api.anthropic_requests import CountTokensRequest, MessagesRequest
from penstock.api.batches_anthropic import (
    CreateMessageBatch,
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchList,
)
from penstock.api.batches_openai import BatchList, CreateBatch, WireBatch
from penstock.api.cluster_endpoints import ReleaseList, ReleaseObject, WhichModel
from penstock.api.embeddings_endpoints import CreateEmbeddings, EmbeddingList
from penstock.api.files_endpoints import FileDeleted, FileList, FileObject
from penstock.api.models_endpoints import ModelEntry, ModelList
from penstock.api.openai_answers import ChatCompletion, Completion
from penstock.api.openai_requests import ChatCompletionRequest, CompletionRequest
from penstock.api.openapi import Operation
from penstock.api.responses_answers import ResponseBody
from penstock.api.responses_endpoints import DeletedResponse, InputItemList, InputTokens
from penstock.api.responses_requests import ResponseRequest
from penstock.api.service_endpoints import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.api.usage_endpoints import PARAMETERS as USAGE_PARAMETERS
from penstock.core.cluster_view import ClusterView, ReleaseOrder
from penstock.gateway.ledger.report import UsagePage

_UPLOAD = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "required": ["purpose", "file"],
}
_PAGE = ("limit", "after")

INFERENCE: dict[str, Operation] = {
    "GET /v1/models": Operation(response=ModelList),
    "GET /v1/models/{name:path}": Operation(response=ModelEntry),
    "POST /v1/chat/completions": Operation(
        request=ChatCompletionRequest, response=ChatCompletion, streams=True
    ),
    "POST /v1/completions": Operation(request=CompletionRequest, response=Completion, streams=True),
    "POST /v1/responses": Operation(request=ResponseRequest, response=ResponseBody, streams=True),
    "POST /v1/responses/input_tokens": Operation(request=ResponseRequest, response=InputTokens),
    "GET /v1/responses/{response_id}": Operation(response=ResponseBody),
    "DELETE /v1/responses/{response_id}": Operation(response=DeletedResponse),
    "POST /v1/responses/{response_id}/cancel": Operation(response=ResponseBody, takes_body=False),
    "GET /v1/responses/{response_id}/input_items": Operation(
        response=InputItemList, query=("limit", "after", "order")
    ),
    "POST /v1/embeddings": Operation(request=CreateEmbeddings, response=EmbeddingList),
    "POST /v1/messages": Operation(request=MessagesRequest, response=Message, streams=True),
    "POST /v1/messages/count_tokens": Operation(request=CountTokensRequest, response=TokenCount),
}

STORED_WORK: dict[str, Operation] = {
    "POST /v1/files": Operation(form=_UPLOAD, response=FileObject),
    "GET /v1/files": Operation(response=FileList, query=(*_PAGE, "order", "purpose")),
    "GET /v1/files/{file_id}": Operation(response=FileObject),
    "DELETE /v1/files/{file_id}": Operation(response=FileDeleted),
    "GET /v1/files/{file_id}/content": Operation(content_type="application/octet-stream"),
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
    "GET /health": Operation(),
    "GET /ready": Operation(),
    "GET /version": Operation(),
    "GET /metrics": Operation(content_type="text/plain"),
    "POST /tokenize": Operation(request=TokenizeRequest, response=TokenizeResponse),
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
    "POST /admin/settings/reload": Operation(takes_body=False),
    "GET /admin/adapters": Operation(response=AdapterList),
    "POST /admin/adapters": Operation(request=LoadAdapter, response=AdapterObject),
    "DELETE /admin/adapters/{name:path}": Operation(response=AdapterDeleted),
    "POST /v1/load_lora_adapter": Operation(request=LoadAdapter, content_type="text/plain"),
    "POST /v1/unload_lora_adapter": Operation(request=UnloadAdapter, content_type="text/plain"),
    "GET /admin/cluster": Operation(response=ClusterView),
    "GET /admin/releases": Operation(response=ReleaseList),
    "POST /admin/releases": Operation(request=ReleaseOrder, response=ReleaseObject),
    "POST /admin/releases/promote": Operation(request=WhichModel, response=ReleaseObject),
    "POST /admin/releases/rollback": Operation(request=WhichModel, response=ReleaseObject),
}

OPERATIONS = INFERENCE | STORED_WORK | SERVICE | ADMIN
