"""/v1/uploads: files in parts. Create an upload, add parts, complete or cancel it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.files import UPLOAD_PURPOSES, FileObject, checked_expiry, file_object
from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of
from penstock.api.http.multipart import UploadReader
from penstock.api.http.parsing import BodyDecoder
from penstock.core.errors import InvalidRequest
from penstock.gateway.files import StoredFile
from penstock.gateway.uploads import MAX_PART_BYTES, MAX_PARTS, UploadPlan, Uploads, plan_of


class ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class NewUpload(msgspec.Struct):
    bytes: Annotated[int, Meta(ge=1)]
    filename: str
    purpose: str
    mime_type: str | None = None
    expires_after: ExpiresAfter | None = None


class CompleteUpload(msgspec.Struct):
    part_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_PARTS)]
    md5: str | None = None


class UploadObject(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int
    file: FileObject | None = None


class UploadPart(msgspec.Struct):
    id: str
    created_at: int
    upload_id: str
    object: str = "upload.part"


class UploadEndpoints:
    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._new = BodyDecoder(NewUpload)
        self._completing = BodyDecoder(CompleteUpload)

    def routes(self) -> list[Route]:
        one = "/v1/uploads/{upload_id}"
        return [
            Route("/v1/uploads", self.create_upload, methods=["POST"]),
            Route(f"{one}/parts", self.add_part, methods=["POST"]),
            Route(f"{one}/complete", self.complete_upload, methods=["POST"]),
            Route(f"{one}/cancel", self.cancel_upload, methods=["POST"]),
        ]

    async def create_upload(self, request: Request) -> Response:
        wire = await self._new.read(request)
        if wire.purpose not in UPLOAD_PURPOSES:
            raise InvalidRequest(
                f"The purpose {wire.purpose[:64]!r} is none of {', '.join(UPLOAD_PURPOSES)}.",
                param="purpose",
            )
        expiry = wire.expires_after
        plan = UploadPlan(
            purpose=wire.purpose,
            num_bytes=wire.bytes,
            expires_after_s=None if expiry is None else checked_expiry(expiry.seconds, "expires_after"),
        )
        workspace_id = principal_of(request).workspace_id
        return json_response(_shown(await self._uploads.create(workspace_id, wire.filename, plan)))

    async def add_part(self, request: Request) -> Response:
        files = self._uploads.files
        workspace_id = principal_of(request).workspace_id
        upload = await self._uploads.pending(workspace_id, request.path_params["upload_id"])
        reader = UploadReader(
            request,
            partial(files.upload, workspace_id, prefix="part_"),
            file_field="data",
            max_file_bytes=min(MAX_PART_BYTES, plan_of(upload).num_bytes, files.config.max_file_bytes),
        )
        try:
            form = await reader.read()
            assert form.upload is not None
            part = await self._uploads.add_part(upload, form.upload)
        finally:
            if reader.form.upload is not None:
                await reader.form.upload.abandon()
        return json_response(UploadPart(part.id, int(part.created_at), upload.id))

    async def complete_upload(self, request: Request) -> Response:
        wire = await self._completing.read(request)
        workspace_id, upload_id = principal_of(request).workspace_id, request.path_params["upload_id"]
        return json_response(
            _shown(*await self._uploads.complete(workspace_id, upload_id, wire.part_ids, wire.md5))
        )

    async def cancel_upload(self, request: Request) -> Response:
        workspace_id, upload_id = principal_of(request).workspace_id, request.path_params["upload_id"]
        return json_response(_shown(await self._uploads.cancel(workspace_id, upload_id)))


def _shown(upload: StoredFile, file: StoredFile | None = None) -> UploadObject:
    plan = plan_of(upload)
    return UploadObject(
        upload.id,
        "upload",
        plan.num_bytes,
        int(upload.created_at),
        upload.filename,
        plan.purpose,
        plan.status,
        int(upload.expires_at or 0),
        None if file is None else file_object(file),
    )
