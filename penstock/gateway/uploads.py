"""Files that are uploaded in parts. This module knows no HTTP.

An upload and its parts are rows in the table of files that no list of files shows. The parts count against the
workspace's quota from their first byte, and the file takes their place when the upload is completed. An upload that
is not completed expires with its parts.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from penstock.core.errors import Conflict, InvalidRequest, NotFound, RequestTooLarge
from penstock.gateway.blobs.blobs import is_blob_id
from penstock.gateway.files import (
    PART,
    UPLOAD,
    FileStore,
    StoredFile,
    Upload,
    insert_file,
    lock_workspace,
    new_file_id,
    stored_name,
)
from penstock.gateway.store.database import reading, transaction
from penstock.gateway.store.tables import files as table
from penstock.gateway.turns import in_thread

UPLOAD_LIFE_S = 3600.0
MAX_PART_BYTES = 64 << 20
MAX_PARTS = 1000  # of one upload
MAX_PENDING = 1000  # uploads of one workspace
_JOINED_BYTES = 1 << 20  # read at once


class UploadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The file that an upload will become, and the progress of the upload."""

    purpose: str
    num_bytes: int
    expires_after_s: float | None = None
    status: str = "pending"  # then completed or cancelled
    file_id: str | None = None


def plan_of(upload: StoredFile) -> UploadPlan:
    return msgspec.convert(upload.details, UploadPlan)


class Uploads:
    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._database = files.database

    async def create(self, workspace_id: str, filename: str, plan: UploadPlan) -> StoredFile:
        max_bytes = self.files.config.max_file_bytes
        if plan.num_bytes > max_bytes:
            raise RequestTooLarge(f"A file may have at most {max_bytes} bytes.", param="bytes")
        now = time.time()
        upload = StoredFile(
            id=f"upload_{secrets.token_hex(16)}",
            workspace_id=workspace_id,
            filename=stored_name(filename),
            purpose=UPLOAD,
            num_bytes=0,
            created_at=now,
            expires_at=now + UPLOAD_LIFE_S,
            details=msgspec.to_builtins(plan),
        )

        await self._add(upload)
        return upload

    @transaction
    def _add(self, connection: Connection, upload: StoredFile) -> None:
        lock_workspace(connection, upload.workspace_id)
        is_upload = table.c.workspace_id == upload.workspace_id, table.c.purpose == UPLOAD
        if connection.execute(select(func.count()).where(*is_upload)).scalar_one() >= MAX_PENDING:
            raise RequestTooLarge(
                f"The workspace has {MAX_PENDING} uploads of the last hour already.",
                hint="Wait until some of them have expired.",
            )
        insert_file(connection, upload)

    @reading
    def get(self, connection: Connection, workspace_id: str, upload_id: str) -> StoredFile:
        found = None
        if is_blob_id(upload_id):
            query = select(table).where(
                table.c.id == upload_id,
                table.c.workspace_id == workspace_id,
                table.c.purpose == UPLOAD,
                table.c.expires_at > time.time(),
            )
            found = connection.execute(query).one_or_none()
        if found is None:
            raise NotFound(f"There is no upload {upload_id[:64]!r}.", param="upload_id")
        return StoredFile(**found._mapping)

    async def pending(self, workspace_id: str, upload_id: str) -> StoredFile:
        upload = await self.get(workspace_id, upload_id)
        _check_pending(upload)
        return upload

    async def add_part(self, upload: StoredFile, part: Upload) -> StoredFile:
        """Raises RequestTooLarge when the parts have more bytes than the upload announced."""
        plan = plan_of(upload)
        parts = await self._parts(upload)
        if len(parts) >= MAX_PARTS:
            raise InvalidRequest(f"An upload may have at most {MAX_PARTS} parts.", param="data")
        if sum(each.num_bytes for each in parts.values()) + part.num_bytes > plan.num_bytes:
            raise RequestTooLarge(f"The upload was to have {plan.num_bytes} bytes in all.", param="data")
        assert upload.expires_at is not None
        left_s = upload.expires_at - time.time()
        return await self.files.create(part, filename=upload.id, purpose=PART, expires_after_s=left_s)

    async def complete(
        self, workspace_id: str, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> tuple[StoredFile, StoredFile]:
        """Return the upload, and the file that its parts make in this order."""
        upload = await self.pending(workspace_id, upload_id)
        plan, parts = plan_of(upload), await self._parts(upload)
        for part_id in part_ids:
            if part_id not in parts:
                raise InvalidRequest(f"The upload has no part {part_id[:64]!r}.", param="part_ids")
        num_bytes = sum(parts[part_id].num_bytes for part_id in part_ids)
        if num_bytes != plan.num_bytes or len(set(part_ids)) != len(part_ids):
            raise InvalidRequest(
                f"The parts have {num_bytes} bytes, but the upload was to have {plan.num_bytes}.",
                param="part_ids",
            )
        now = time.time()
        file = StoredFile(
            id=new_file_id(),
            workspace_id=workspace_id,
            filename=upload.filename,
            purpose=plan.purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=None if plan.expires_after_s is None else now + plan.expires_after_s,
        )
        try:
            digest = await in_thread(self._join, file.id, part_ids)
        except FileNotFoundError as error:  # another request ended the upload meanwhile
            raise InvalidRequest("A part of the upload is gone.", param="part_ids") from error
        try:
            if md5 is not None and md5.lower() != digest:
                raise InvalidRequest("The bytes of the parts have another md5.", param="md5")
            ended = await self._end(upload, "completed", file)
        except BaseException:
            await self.files.remove_bytes(file.id)
            raise
        return ended, file

    async def cancel(self, workspace_id: str, upload_id: str) -> StoredFile:
        return await self._end(await self.pending(workspace_id, upload_id), "cancelled", None)

    @reading
    def _parts(self, connection: Connection, upload: StoredFile) -> dict[str, StoredFile]:
        rows = connection.execute(select(table).where(*_is_part(upload)))
        return {row.id: StoredFile(**row._mapping) for row in rows}

    def _join(self, file_id: str, part_ids: Sequence[str]) -> str:
        """Write the bytes of the parts one after another, and return their md5."""
        digest = hashlib.md5(usedforsecurity=False)
        with self.files.blobs.writing(file_id) as target:
            for part_id in part_ids:
                with self.files.blobs.open(part_id) as part:
                    while data := part.read(_JOINED_BYTES):
                        digest.update(data)
                        target.write(data)
        return digest.hexdigest()

    async def _end(self, upload: StoredFile, status: str, file: StoredFile | None) -> StoredFile:
        """Replace the parts by the file in one transaction, so that the quota never counts both."""
        plan = msgspec.structs.replace(
            plan_of(upload), status=status, file_id=None if file is None else file.id
        )
        ended = msgspec.structs.replace(upload, details=msgspec.to_builtins(plan))

        def end(connection: Connection) -> list[str]:
            lock_workspace(connection, upload.workspace_id)
            details = connection.execute(select(table.c.details).where(table.c.id == upload.id)).scalar()
            _check_pending(msgspec.structs.replace(upload, details=details or {}))
            part_ids = list(connection.execute(select(table.c.id).where(*_is_part(upload))).scalars())
            connection.execute(delete(table).where(*_is_part(upload)))
            if file is not None:
                insert_file(connection, file)
            connection.execute(update(table).where(table.c.id == upload.id).values(details=ended.details))
            return part_ids

        for part_id in await self._database.run(end):
            await self.files.remove_bytes(part_id)
        return ended


def _is_part(upload: StoredFile) -> tuple[ColumnElement[bool], ...]:
    return (
        table.c.workspace_id == upload.workspace_id,
        table.c.purpose == PART,
        table.c.filename == upload.id,
    )


def _check_pending(upload: StoredFile) -> None:
    status = (upload.details or {}).get("status", "expired")
    if status != "pending":
        raise Conflict(f"The upload is {status} already.", param="upload_id")
