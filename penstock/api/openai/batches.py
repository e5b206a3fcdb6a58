"""/v1/batches as OpenAI's clients know it, and the dialect in which such batches are written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.files import ExpiresAfter
from penstock.api.http.answers import ObjectList, json_response
from penstock.api.http.application import Endpoint, call_endpoint
from penstock.api.http.context import principal_of
from penstock.api.http.errors import error_body
from penstock.api.http.parsing import BodyDecoder, integer_of, text_of
from penstock.api.http.routes import PAGE, Operation
from penstock.api.openai.responses_requests import check_metadata
from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.core.request import Tier
from penstock.gateway.batches.batch import Batch, BatchLine, BatchStatus, Details, LineAnswer, LineResult
from penstock.gateway.batches.runner import StoredWork

KIND = "openai"
BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
MAX_CUSTOM_ID_CHARS = 512
_COMPLETION_WINDOW_S = 24 * 3600.0
_UNRUN = {
    "canceled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": ("batch_expired", "The batch expired before this request was run."),
}


class CreateBatch(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class WireLineError(msgspec.Struct):
    code: str
    line: int | None
    message: str
    param: str | None


class WireErrors(msgspec.Struct):
    data: list[WireLineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class WireBatch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: WireErrors | None
    input_file_id: str | None
    completion_window: str | None
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ObjectList[WireBatch]): ...


class InputLine(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Detached(msgspec.Struct):
    stream: bool | None = None
    background: Any = None


_decode_detached = msgspec.json.Decoder(_Detached).decode


class OpenAIBatches:
    """Implements `BatchDialect` in the format of the OpenAI API."""

    lists_output_files = True
    max_lines = 50_000

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self.endpoints = {path: endpoints[path] for path in BATCH_ENDPOINTS if path in endpoints}
        self._decoder = BodyDecoder(InputLine)

    def read_line(self, batch: Batch, number: int, raw: bytes) -> BatchLine:
        line = self._decoder.decode(raw)
        if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in line.custom_id:
            raise InvalidRequest(
                f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters, none of them NUL.",
                param="custom_id",
            )
        if line.url != batch.endpoint:
            raise InvalidRequest(
                f"The url is {line.url[:64]!r}, but the batch is for {batch.endpoint}.", param="url"
            )
        body = bytes(line.body)
        if not body.lstrip().startswith(b"{"):
            raise InvalidRequest("The body must be an object.", param="body")
        return BatchLine(number, line.custom_id, body)

    async def answer(self, batch: Batch, line: BatchLine, request_id: str) -> LineAnswer:
        endpoint = self.endpoints.get(batch.endpoint)
        if endpoint is None:
            raise NotFound(f"There is nothing at {batch.endpoint}.")
        refuse_detached(line.body)
        principal = msgspec.structs.replace(batch.principal, best_tier=Tier.BATCH)
        return await call_endpoint(
            endpoint, batch.endpoint, line.body, principal=principal, request_id=request_id
        )

    def refusal(self, error: PenstockError, request_id: str) -> LineAnswer:
        return LineAnswer(error.status, error_body(error))

    def result_line(self, batch: Batch, result: LineResult) -> bytes:
        line: dict[str, Any] = {
            "id": f"batch_req_{batch.id.removeprefix('batch_')}_{result.number}",
            "custom_id": result.custom_id,
            "response": None,
            "error": None,
        }
        if result.outcome in _UNRUN:
            code, message = _UNRUN[result.outcome]
            line["error"] = {"code": code, "message": message}
        else:
            line["response"] = {
                "status_code": result.status_code,
                "request_id": result.request_id,
                "body": msgspec.Raw(result.body),
            }
        return msgspec.json.encode(line)


class OpenAIBatchEndpoints:
    def __init__(self, work: StoredWork, dialect: OpenAIBatches) -> None:
        self._work = work
        self._dialect = dialect

    def routes(self) -> list[Operation]:
        return [
            Operation("POST /v1/batches", self.create_batch, WireBatch, reads=CreateBatch),
            Operation("GET /v1/batches", self.list_batches, BatchList, query=PAGE),
            Operation("GET /v1/batches/{batch_id}", self.show_batch, WireBatch),
            Operation("POST /v1/batches/{batch_id}/cancel", self.cancel_batch, WireBatch, takes_body=False),
        ]

    async def create_batch(self, request: Request, wire: CreateBatch) -> Response:
        if wire.endpoint not in self._dialect.endpoints:
            known = ", ".join(self._dialect.endpoints)
            raise InvalidRequest(
                f"The endpoint {wire.endpoint[:64]!r} takes no batches; {known} do.", param="endpoint"
            )
        check_metadata(wire.metadata)
        principal = principal_of(request)
        file = await self._work.files.get(principal.workspace_id, wire.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"The purpose of the file {file.id} is {file.purpose!r}, not 'batch'.", param="input_file_id"
            )
        kept = wire.output_expires_after
        now = time.time()
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            workspace_id=principal.workspace_id,
            kind=KIND,
            endpoint=wire.endpoint,
            status=BatchStatus.VALIDATING,
            principal=principal,
            created_at=now,
            expires_at=now + _COMPLETION_WINDOW_S,
            details=Details(
                input_file_id=file.id,
                completion_window=wire.completion_window,
                metadata=wire.metadata,
                output_expires_after_s=None if kept is None else kept.checked("output_expires_after"),
            ),
        )
        await self._work.files.copy_bytes(file, batch.input_id)
        await self._work.add(batch)
        return json_response(_wire_batch(batch))

    async def list_batches(self, request: Request) -> Response:
        batches, has_more = await self._work.batches.page(
            principal_of(request).workspace_id,
            KIND,
            limit=integer_of(request, "limit", default=20, low=1, high=100),
            after=text_of(request, "after"),
        )
        return json_response(BatchList.of([_wire_batch(batch) for batch in batches], has_more=has_more))

    async def show_batch(self, request: Request) -> Response:
        workspace_id, batch_id = principal_of(request).workspace_id, request.path_params["batch_id"]
        return json_response(_wire_batch(await self._work.batches.get(workspace_id, batch_id, KIND)))

    async def cancel_batch(self, request: Request) -> Response:
        workspace_id, batch_id = principal_of(request).workspace_id, request.path_params["batch_id"]
        batch = await self._work.batches.cancel(workspace_id, batch_id, KIND)
        self._work.runner.cancelled(batch.id)
        return json_response(_wire_batch(batch))


def refuse_detached(body: bytes) -> None:
    """Refuse requests whose work goes on after their answer: a batch runs so many at a time, and no more."""
    try:
        asked = _decode_detached(body)
    except (msgspec.DecodeError, RecursionError):
        return  # the endpoint says better what is wrong
    if asked.stream:
        raise InvalidRequest("A request in a batch cannot be streamed.", param="stream")
    if asked.background is True:
        raise InvalidRequest("A request in a batch cannot run in the background.", param="background")


def _wire_batch(batch: Batch) -> WireBatch:
    details, counts = batch.details, batch.counts
    errors = [WireLineError(error.code, error.line, error.message, error.param) for error in details.errors]

    def entered(status: BatchStatus) -> int | None:
        moment = batch.times.get(status.value)
        return None if moment is None else int(moment)

    return WireBatch(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=WireErrors(errors) if errors else None,
        input_file_id=details.input_file_id,
        completion_window=details.completion_window,
        status=batch.status.value,
        output_file_id=details.output_file_id,
        error_file_id=details.error_file_id,
        created_at=int(batch.created_at),
        expires_at=int(batch.expires_at),
        request_counts=RequestCounts(counts.lines, counts.succeeded, counts.recorded - counts.succeeded),
        metadata=details.metadata,
        in_progress_at=entered(BatchStatus.IN_PROGRESS),
        finalizing_at=entered(BatchStatus.FINALIZING),
        completed_at=entered(BatchStatus.COMPLETED),
        failed_at=entered(BatchStatus.FAILED),
        expired_at=entered(BatchStatus.EXPIRED),
        cancelling_at=entered(BatchStatus.CANCELLING),
        cancelled_at=entered(BatchStatus.CANCELLED),
    )
