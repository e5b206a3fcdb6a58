"""/v1/files in both APIs' shapes: upload, list, look at, read and delete the files of a workspace; and /v1/uploads,
files in parts."""

from __future__ import annotations

import mimetypes
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.api.http.answers import IdList, ObjectList, blob_response, json_response
from penstock.api.http.context import principal_of
from penstock.api.http.errors import is_anthropic, timestamp
from penstock.api.http.multipart import UploadReader
from penstock.api.http.parsing import choice_of, integer_of, text_of
from penstock.api.http.routes import PAGE, Operation
from penstock.core.errors import InvalidRequest
from penstock.core.figures import Count
from penstock.gateway.files import FileStore, StoredFile
from penstock.gateway.store.database import Order
from penstock.gateway.uploads import MAX_PART_BYTES, MAX_PARTS, UploadPlan, Uploads, plan_of

UPLOAD_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
MAX_ANTHROPIC_EXPIRY_S = 90 * 24 * 3600
ANTHROPIC_PURPOSE = "user_data"  # of files from Anthropic's clients, whose API knows no purpose
_MAX_PAGE = 10_000
_ANTHROPIC_PAGE, _MAX_ANTHROPIC_PAGE = 20, 1000
_NO_URL = str.maketrans(":/", "__")
_BYTES = {"type": "string", "contentMediaType": "application/octet-stream"}
_FORM = {
    "type": "object",
    "properties": {"purpose": {"type": "string"}, "file": _BYTES},
    "required": ["purpose", "file"],
}
_PART_FORM = {"type": "object", "properties": {"data": _BYTES}, "required": ["data"]}
_ORDERS: tuple[Order, ...] = ("asc", "desc")


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(ObjectList[FileObject]): ...


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileMetadata(msgspec.Struct):
    """A file as Anthropic's clients see it."""

    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    downloadable: bool
    expires_at: str | None = None
    type: Literal["file"] = "file"


class FileMetadataList(IdList[FileMetadata], kw_only=True):
    next_page: str | None


class FileMetadataDeleted(msgspec.Struct):
    id: str
    type: Literal["file_deleted"] = "file_deleted"


class FilesEndpoints:
    def __init__(self, files: FileStore) -> None:
        self._files = files

    def routes(self) -> list[Operation]:
        return [
            Operation("POST /v1/files", self.create_file, FileObject, form=_FORM),
            Operation("GET /v1/files", self.list_files, FileList, query=(*PAGE, "order", "purpose")),
            Operation("GET /v1/files/{file_id}", self.show_file, FileObject),
            Operation("DELETE /v1/files/{file_id}", self.delete_file, FileDeleted),
            Operation(
                "GET /v1/files/{file_id}/content", self.read_file, content_type="application/octet-stream"
            ),
        ]

    async def create_file(self, request: Request) -> Response:
        reader = UploadReader(
            request,
            partial(self._files.upload, principal_of(request).workspace_id),
            file_field="file",
            max_file_bytes=self._files.config.max_file_bytes,
        )
        async with reader:
            form, upload = await reader.read()
            for_anthropic = is_anthropic(request.scope)
            purpose = form.fields.get("purpose", ANTHROPIC_PURPOSE if for_anthropic else "")
            if purpose not in UPLOAD_PURPOSES:
                raise InvalidRequest(
                    f"The purpose {purpose[:64]!r} is none of {', '.join(UPLOAD_PURPOSES)}.", param="purpose"
                )
            file = await self._files.create(
                upload,
                filename=form.filename or "file",
                purpose=purpose,
                expires_after_s=_expiry_of_anthropic(form.fields) if for_anthropic else _expiry(form.fields),
            )
        return json_response(_shown(file, request))

    async def list_files(self, request: Request) -> Response:
        if is_anthropic(request.scope):
            return await self._list_for_anthropic(request)
        page = await self._files.page(
            principal_of(request).workspace_id,
            purpose=text_of(request, "purpose"),
            limit=integer_of(request, "limit", default=_MAX_PAGE, low=1, high=_MAX_PAGE),
            order=choice_of(request, "order", default="desc", choices=_ORDERS),
            after=text_of(request, "after"),
        )
        return json_response(FileList.of([file_object(file) for file in page.files], has_more=page.has_more))

    async def _list_for_anthropic(self, request: Request) -> Response:
        page = await self._files.page(
            principal_of(request).workspace_id,
            limit=integer_of(request, "limit", default=_ANTHROPIC_PAGE, low=1, high=_MAX_ANTHROPIC_PAGE),
            after=text_of(request, "page") or text_of(request, "after_id"),
        )
        data = [_file_metadata(file) for file in page.files]
        next_page = data[-1].id if page.has_more and data else None
        return json_response(FileMetadataList.of(data, has_more=page.has_more, next_page=next_page))

    async def show_file(self, request: Request) -> Response:
        return json_response(_shown(await self._file_of(request), request))

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self._files.delete(principal_of(request).workspace_id, file_id)
        return json_response(
            FileMetadataDeleted(file_id) if is_anthropic(request.scope) else FileDeleted(file_id)
        )

    async def read_file(self, request: Request) -> Response:
        file = await self._file_of(request)
        # Whatever it holds, a browser must not run it as a page of this server.
        headers = {"x-content-type-options": "nosniff", "content-security-policy": "sandbox"}
        return await blob_response(
            self._files.blobs,
            file.id,
            missing=f"The bytes of the file {file.id} are gone.",
            media_type="application/octet-stream",
            filename=file.filename,
            headers=headers,
        )

    async def _file_of(self, request: Request) -> StoredFile:
        return await self._files.get(principal_of(request).workspace_id, request.path_params["file_id"])


def checked_expiry(seconds: int, param: str) -> float:
    if not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"{param}.seconds must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}, not {seconds}.", param=param
        )
    return float(seconds)


def _expiry(fields: dict[str, str]) -> float | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not seconds.isascii() or not seconds.isdecimal():
        raise InvalidRequest(
            "expires_after needs the anchor 'created_at' and a whole number of seconds.",
            param="expires_after",
        )
    return checked_expiry(int(seconds[:12]), "expires_after")


def _expiry_of_anthropic(fields: dict[str, str]) -> float | None:
    seconds = fields.get("expires_in_seconds")
    if seconds is None:
        return None
    is_number = seconds.isascii() and seconds.isdecimal() and len(seconds) < 12
    if not is_number or not MIN_EXPIRY_S <= int(seconds) <= MAX_ANTHROPIC_EXPIRY_S:
        raise InvalidRequest(
            f"expires_in_seconds must be between {MIN_EXPIRY_S} and {MAX_ANTHROPIC_EXPIRY_S}.",
            param="expires_in_seconds",
        )
    return float(seconds)


def _shown(file: StoredFile, request: Request) -> FileObject | FileMetadata:
    return _file_metadata(file) if is_anthropic(request.scope) else file_object(file)


def _file_metadata(file: StoredFile) -> FileMetadata:
    return FileMetadata(
        file.id,
        file.filename,
        _media_type(file.filename),
        file.num_bytes,
        timestamp(file.created_at),
        downloadable=True,
        expires_at=None if file.expires_at is None else timestamp(file.expires_at),
    )


def _media_type(filename: str) -> str:
    """Return the type that belongs to a name's ending. The library would read a name with a colon or slashes as a
    URL, and its newer releases raise an error where the URL is not valid."""
    return mimetypes.guess_type(filename.translate(_NO_URL))[0] or "application/octet-stream"


def file_object(file: StoredFile) -> FileObject:
    expires_at = None if file.expires_at is None else int(file.expires_at)
    return FileObject(file.id, file.num_bytes, int(file.created_at), file.filename, file.purpose, expires_at)


class ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int

    def checked(self, param: str) -> float:
        return checked_expiry(self.seconds, param)


class NewUpload(msgspec.Struct):
    bytes: Count
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

    def routes(self) -> list[Operation]:
        one = "/v1/uploads/{upload_id}"
        return [
            Operation("POST /v1/uploads", self.create_upload, UploadObject, reads=NewUpload),
            Operation(f"POST {one}/parts", self.add_part, UploadPart, form=_PART_FORM),
            Operation(f"POST {one}/complete", self.complete_upload, UploadObject, reads=CompleteUpload),
            Operation(f"POST {one}/cancel", self.cancel_upload, UploadObject, takes_body=False),
        ]

    async def create_upload(self, request: Request, wire: NewUpload) -> Response:
        if wire.purpose not in UPLOAD_PURPOSES:
            raise InvalidRequest(
                f"The purpose {wire.purpose[:64]!r} is none of {', '.join(UPLOAD_PURPOSES)}.", param="purpose"
            )
        expiry = wire.expires_after
        plan = UploadPlan(
            purpose=wire.purpose,
            num_bytes=wire.bytes,
            expires_after_s=None if expiry is None else expiry.checked("expires_after"),
        )
        workspace_id = principal_of(request).workspace_id
        return json_response(_shown_upload(await self._uploads.create(workspace_id, wire.filename, plan)))

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
        async with reader:
            _, sent = await reader.read()
            part = await self._uploads.add_part(upload, sent)
        return json_response(UploadPart(part.id, int(part.created_at), upload.id))

    async def complete_upload(self, request: Request, wire: CompleteUpload) -> Response:
        workspace_id, upload_id = principal_of(request).workspace_id, request.path_params["upload_id"]
        return json_response(
            _shown_upload(*await self._uploads.complete(workspace_id, upload_id, wire.part_ids, wire.md5))
        )

    async def cancel_upload(self, request: Request) -> Response:
        workspace_id, upload_id = principal_of(request).workspace_id, request.path_params["upload_id"]
        return json_response(_shown_upload(await self._uploads.cancel(workspace_id, upload_id)))


def _shown_upload(upload: StoredFile, file: StoredFile | None = None) -> UploadObject:
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
