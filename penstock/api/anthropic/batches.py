"""/v1/messages/batches, and the dialect in which such batches are written."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.anthropic.endpoints import check_version
from penstock.api.http.answers import IdList, blob_response, json_response
from penstock.api.http.application import Endpoint, call_endpoint
from penstock.api.http.context import principal_of
from penstock.api.http.errors import anthropic_error_body, anthropic_status, timestamp
from penstock.api.http.parsing import BodyDecoder, integer_of, text_of
from penstock.api.http.routes import Operation
from penstock.api.openai.batches import refuse_detached
from penstock.core.errors import InvalidRequest, PenstockError, quoted
from penstock.core.request import Tier
from penstock.gateway.batches.batch import (
    MAX_LINE_BYTES,
    Batch,
    BatchLine,
    BatchStatus,
    Counts,
    LineAnswer,
    LineResult,
)
from penstock.gateway.batches.runner import StoredWork
from penstock.gateway.blobs.blobs import Blobs
from penstock.gateway.turns import in_thread

KIND = "anthropic"
MESSAGES_PATH = "/v1/messages"
_EXPIRES_AFTER_S = 24 * 3600.0
VALUES_FACTOR = 10  # the params of each request are decoded one by one
MAX_PARAMS_BYTES = MAX_LINE_BYTES - 1024  # the rest of the line is the custom_id
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class RequestOfBatch(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class CreateMessageBatch(msgspec.Struct):
    requests: list[RequestOfBatch]


class MessageCounts(msgspec.Struct):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(IdList[MessageBatch]): ...


class MessageBatchDeleted(msgspec.Struct):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class MessageBatches:
    """Anthropic's format of batches: a `BatchDialect`."""

    lists_output_files = False
    max_lines = 100_000

    def __init__(self, create_message: Endpoint) -> None:
        self._create_message = create_message
        # The bound of a batch is the bound of a line here: the endpoint checks each request again.
        self._decoder = BodyDecoder(RequestOfBatch, values_factor=VALUES_FACTOR)

    def read_line(self, batch: Batch, number: int, raw: bytes) -> BatchLine:
        line = self._decoder.decode(raw)
        return BatchLine(number, line.custom_id, bytes(line.params))

    async def answer(self, batch: Batch, line: BatchLine, request_id: str) -> LineAnswer:
        refuse_detached(line.body)
        principal = msgspec.structs.replace(batch.principal, best_tier=Tier.BATCH)
        return await call_endpoint(
            self._create_message, MESSAGES_PATH, line.body, principal=principal, request_id=request_id
        )

    def refusal(self, error: PenstockError, request_id: str) -> LineAnswer:
        return LineAnswer(anthropic_status(error), anthropic_error_body(error, request_id))

    def result_line(self, batch: Batch, result: LineResult) -> bytes:
        outcome: dict[str, Any] = {"type": result.outcome}
        if result.outcome == "succeeded":
            outcome["message"] = msgspec.Raw(result.body)
        elif result.outcome == "errored":
            outcome["error"] = msgspec.Raw(result.body)
        return msgspec.json.encode({"custom_id": result.custom_id, "result": outcome})


class MessageBatchEndpoints:
    def __init__(self, work: StoredWork, dialect: MessageBatches) -> None:
        self._work = work
        self._dialect = dialect
        self._decoder = BodyDecoder(CreateMessageBatch, values_factor=VALUES_FACTOR)

    def routes(self) -> list[Operation]:
        one = "/v1/messages/batches/{batch_id}"
        return [
            Operation(
                "POST /v1/messages/batches", self.create_batch, MessageBatch, request=CreateMessageBatch
            ),
            Operation(
                "GET /v1/messages/batches",
                self.list_batches,
                MessageBatchList,
                query=("limit", "after_id", "before_id"),
            ),
            Operation(f"GET {one}", self.show_batch, MessageBatch),
            Operation(f"DELETE {one}", self.delete_batch, MessageBatchDeleted),
            Operation(f"POST {one}/cancel", self.cancel_batch, MessageBatch, takes_body=False),
            Operation(f"GET {one}/results", self.read_results, content_type="application/x-jsonl"),
        ]

    async def create_batch(self, request: Request) -> Response:
        check_version(request)
        wire = await self._decoder.read(request)
        self._check(wire.requests)
        principal = principal_of(request)
        now = time.time()
        batch = Batch(
            id=f"msgbatch_{secrets.token_hex(12)}",
            workspace_id=principal.workspace_id,
            kind=KIND,
            endpoint=MESSAGES_PATH,
            status=BatchStatus.IN_PROGRESS,
            principal=principal,
            created_at=now,
            expires_at=now + _EXPIRES_AFTER_S,
            counts=Counts(lines=len(wire.requests)),
        )
        num_bytes = await in_thread(_write_input, self._work.files.blobs, batch, wire.requests)
        await self._work.add(batch, num_bytes)
        return json_response(_message_batch(request, batch))

    async def list_batches(self, request: Request) -> Response:
        batches, has_more = await self._work.batches.page(
            principal_of(request).workspace_id,
            KIND,
            limit=integer_of(request, "limit", default=20, low=1, high=1000),
            after=text_of(request, "after_id"),
            before=text_of(request, "before_id"),
        )
        data = [_message_batch(request, batch) for batch in batches]
        return json_response(MessageBatchList.of(data, has_more=has_more))

    async def show_batch(self, request: Request) -> Response:
        return json_response(_message_batch(request, await self._batch_of(request)))

    async def cancel_batch(self, request: Request) -> Response:
        batch = await self._batch_of(request)
        batch = await self._work.batches.cancel(batch.workspace_id, batch.id, KIND)
        self._work.runner.cancelled(batch.id)
        return json_response(_message_batch(request, batch))

    async def delete_batch(self, request: Request) -> Response:
        batch = await self._batch_of(request)
        await self._work.batches.delete(batch.workspace_id, batch.id, KIND)
        await self._work.files.remove(batch.results_id)
        return json_response(MessageBatchDeleted(batch.id))

    async def read_results(self, request: Request) -> Response:
        batch = await self._batch_of(request)
        if batch.is_active:
            raise InvalidRequest(f"The batch {batch.id} has not ended, so there are no results yet.")
        return await blob_response(
            self._work.files.blobs,
            batch.results_id,
            missing=f"The results of the batch {batch.id} are gone.",
            media_type="application/x-jsonl",
        )

    async def _batch_of(self, request: Request) -> Batch:
        check_version(request)
        workspace_id = principal_of(request).workspace_id
        return await self._work.batches.get(workspace_id, request.path_params["batch_id"], KIND)

    def _check(self, requests: Sequence[RequestOfBatch]) -> None:
        """Check the batch as a whole. An error in the params of one request appears in its own result."""
        if not requests:
            raise InvalidRequest("requests: at least one request is required.", param="requests")
        if len(requests) > self._dialect.max_lines:
            raise InvalidRequest(
                f"requests: a batch may have at most {self._dialect.max_lines} requests.", param="requests"
            )
        seen: set[str] = set()
        for index, request in enumerate(requests):
            if not _CUSTOM_ID.fullmatch(request.custom_id):
                raise InvalidRequest(
                    f"requests.{index}.custom_id: it must have 1 to 64 letters, digits, underscores or hyphens.",
                    param="requests",
                )
            if request.custom_id in seen:
                raise InvalidRequest(
                    f"requests.{index}.custom_id: {quoted(request.custom_id)} is used twice.",
                    param="requests",
                )
            seen.add(request.custom_id)
            if len(request.params) > MAX_PARAMS_BYTES:
                raise InvalidRequest(
                    f"requests.{index}.params: they may have at most {MAX_PARAMS_BYTES} bytes.",
                    param="requests",
                )


def _write_input(blobs: Blobs, batch: Batch, requests: Sequence[RequestOfBatch]) -> int:
    """Return the number of bytes that were written."""
    num_bytes = 0
    with blobs.writing(batch.input_id) as file:
        for request in requests:
            # One request, one line: JSON needs no line breaks between its tokens.
            line = msgspec.json.format(msgspec.json.encode(request), indent=-1) + b"\n"
            file.write(line)
            num_bytes += len(line)
    return num_bytes


def _message_batch(request: Request, batch: Batch) -> MessageBatch:
    counts = batch.counts
    ended_at = max(batch.times.values(), default=batch.created_at)
    cancelling_at = batch.times.get(BatchStatus.CANCELLING.value)
    return MessageBatch(
        id=batch.id,
        processing_status=_processing_status(batch),
        request_counts=MessageCounts(
            counts.lines - counts.recorded, counts.succeeded, counts.errored, counts.canceled, counts.expired
        ),
        created_at=timestamp(batch.created_at),
        expires_at=timestamp(batch.expires_at),
        ended_at=None if batch.is_active else timestamp(ended_at),
        cancel_initiated_at=None if cancelling_at is None else timestamp(cancelling_at),
        results_url=None if batch.is_active else f"{request.base_url}v1/messages/batches/{batch.id}/results",
    )


def _processing_status(batch: Batch) -> Literal["in_progress", "canceling", "ended"]:
    if not batch.is_active:
        return "ended"
    return "canceling" if batch.status is BatchStatus.CANCELLING else "in_progress"
