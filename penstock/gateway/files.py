"""The files of workspaces: upload, list, read, delete, expire. This module knows no HTTP.

A file of another workspace looks as if it did not exist. The metadata are in the database. The bytes are a blob in a
folder or a bucket, under the file's id. Bytes are stored before the row that names them is committed, and a row is
deleted before its bytes, so that a crash leaves at most bytes that no row names.

An upload reserves room in its workspace's quota before its bytes are stored. The reservation is a row in the
table of files that no client sees; it becomes the file's row at the end, and expires if the process dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, insert, or_, select

from penstock.core.errors import NotFound, RequestTooLarge, StoreUnavailable
from penstock.core.figures import Count
from penstock.gateway.blobs.blobs import Blobs, BlobWriter, is_blob_id
from penstock.gateway.store import tables
from penstock.gateway.store.database import Database, Order, read_page, reading, transaction
from penstock.gateway.turns import in_thread

logger = logging.getLogger(__name__)

_WRITE_BYTES = 1 << 20  # how much of an upload is gathered before a thread writes it
_MAX_FILENAME_CHARS = 512
_MAX_EXPIRED_AT_ONCE = 1000
_RESERVED_AHEAD_BYTES = 8 << 20  # so that a long upload asks the database once in a while
_RESERVED_FOR_S = 24 * 3600.0  # longer than an upload may take
_UPLOADING = "uploading"  # the purpose of reservations
UPLOAD, PART = "upload", "upload_part"  # the purposes of an upload in parts, and of its parts
BATCH_INPUT, BATCH_RESULTS = "batch_input", "batch_results"  # of batches whose API has no files
_HIDDEN = (_UPLOADING, UPLOAD, PART, BATCH_INPUT, BATCH_RESULTS)


class FilesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the files of a workspace."""

    max_file_bytes: Count = 512 << 20
    max_workspace_bytes: Count = 16 << 30
    max_workspace_files: Count = 100_000  # each upload adds up the sizes of all


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float  # Unix time
    expires_at: float | None = None
    details: dict[str, Any] | None = None  # of an upload in parts


class FilePage(msgspec.Struct, frozen=True):
    files: list[StoredFile]
    has_more: bool


def new_file_id(prefix: str = "file-") -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def stored_name(filename: str) -> str:
    return filename[-_MAX_FILENAME_CHARS:].replace("\0", "")


def insert_file(connection: Connection, file: StoredFile) -> None:
    """For a transaction that does more than that. The bytes must be stored."""
    connection.execute(insert(tables.files).values(msgspec.structs.asdict(file)))


class FileStore:
    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        config: FilesConfig | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.blobs = blobs
        self.config = config or FilesConfig()
        self.database = self._database = database
        self._wall_clock = wall_clock

    async def upload(self, workspace_id: str, *, prefix: str = "file-") -> Upload:
        file_id = new_file_id(prefix)
        file = await in_thread(self.blobs.begin, file_id)
        return Upload(self, workspace_id, file_id, file)

    async def create(
        self, upload: Upload, *, filename: str, purpose: str, expires_after_s: float | None = None
    ) -> StoredFile:
        """Make a file of what was uploaded."""
        try:
            num_bytes = await upload.publish()
        except RequestTooLarge:
            await upload.abandon()
            raise
        now = self._wall_clock()
        file = StoredFile(
            id=upload.file_id,
            workspace_id=upload.workspace_id,
            filename=stored_name(filename),
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        try:
            await self._replace(file)
        except Exception:
            await self.remove_bytes(file.id)
            raise
        return file

    @transaction
    def hold(self, connection: Connection, file: StoredFile) -> None:
        """Count bytes that are stored and that no client sees. Raises RequestTooLarge when the workspace has too
        little room."""
        self._check_room(connection, file.workspace_id, file.id, file.num_bytes)
        if file.num_bytes:
            insert_file(connection, file)

    async def remove(self, file_id: str) -> None:
        """Remove bytes that no client sees, and the row that counts them."""
        with contextlib.suppress(StoreUnavailable):  # the row expires
            await self._delete(tables.files.c.id == file_id)
        await self.remove_bytes(file_id)

    async def release(self, file_id: str) -> None:
        """Give back the room of an upload that was abandoned."""
        await self._delete(tables.files.c.id == file_id, tables.files.c.purpose == _UPLOADING)

    @reading
    def get(self, connection: Connection, workspace_id: str, file_id: str) -> StoredFile:
        row = None
        if is_blob_id(file_id):
            query = self._of_workspace(workspace_id).where(tables.files.c.id == file_id)
            row = connection.execute(query).one_or_none()
        if row is None:
            raise _no_file(file_id)
        return _file(row)

    @reading
    def page(
        self,
        connection: Connection,
        workspace_id: str,
        *,
        purpose: str | None = None,
        limit: int = 10_000,
        order: Order = "desc",
        after: str | None = None,
    ) -> FilePage:
        query = self._of_workspace(workspace_id)
        if purpose is not None:
            query = query.where(tables.files.c.purpose == purpose)
        rows, has_more = read_page(connection, query, tables.files, limit=limit, order=order, after=after)
        return FilePage([_file(row) for row in rows], has_more)

    async def delete(self, workspace_id: str, file_id: str) -> None:
        await self.get(workspace_id, file_id)
        await self._delete(tables.files.c.id == file_id, tables.files.c.workspace_id == workspace_id)
        await self.remove_bytes(file_id)

    async def copy_bytes(self, file: StoredFile, blob_id: str) -> None:
        """Give the bytes of a file a second id. Raises NotFound if the file was deleted since it was looked up."""
        try:
            await in_thread(self.blobs.copy, file.id, blob_id)
        except FileNotFoundError as error:
            raise _no_file(file.id) from error

    async def remove_bytes(self, file_id: str) -> None:
        """Remove the bytes of a file whose row is gone. Bytes that cannot be removed now stay, unseen."""
        try:
            await in_thread(self.blobs.remove, file_id)
        except StoreUnavailable:
            logger.warning("the bytes of the deleted file %s stay in their place", file_id)

    async def remove_expired(self) -> int:
        """Remove expired files, which are invisible already, and return how many there were."""
        expired = await self._delete_expired()
        for file_id in expired:
            await self.remove_bytes(file_id)
        await in_thread(self.blobs.remove_abandoned)
        return len(expired)

    @transaction
    def _delete(self, connection: Connection, *where: ColumnElement[bool]) -> None:
        connection.execute(delete(tables.files).where(*where))

    @transaction
    def _delete_expired(self, connection: Connection) -> list[str]:
        is_expired = tables.files.c.expires_at <= self._wall_clock()
        query = select(tables.files.c.id).where(is_expired).limit(_MAX_EXPIRED_AT_ONCE)
        ids = list(connection.execute(query).scalars())
        connection.execute(delete(tables.files).where(tables.files.c.id.in_(ids)))
        return ids

    @transaction
    def _replace(self, connection: Connection, file: StoredFile) -> None:
        _replace_reservation(connection, file)

    @transaction
    def reserve(
        self, connection: Connection, workspace_id: str, file_id: str, num_bytes: int, *, ahead: int
    ) -> int:
        """Reserve room for `num_bytes` of an upload, and for `ahead` more if there is room, and return how much was
        reserved. Raises RequestTooLarge when the workspace has too little room."""
        room = self._check_room(connection, workspace_id, file_id, num_bytes)
        now = self._wall_clock()
        reservation = StoredFile(
            id=file_id,
            workspace_id=workspace_id,
            filename="",
            purpose=_UPLOADING,
            num_bytes=min(num_bytes + ahead, room),
            created_at=now,
            expires_at=now + _RESERVED_FOR_S,
        )
        _replace_reservation(connection, reservation)
        return reservation.num_bytes

    def _check_room(self, connection: Connection, workspace_id: str, file_id: str, num_bytes: int) -> int:
        """Return the bytes that the workspace's other files leave. Raises RequestTooLarge if they are too few."""
        lock_workspace(connection, workspace_id)
        is_other = tables.files.c.workspace_id == workspace_id, tables.files.c.id != file_id
        sums = func.coalesce(func.sum(tables.files.c.num_bytes), 0), func.count()
        used, num_files = connection.execute(select(*sums).where(*is_other)).one()
        if num_files >= self.config.max_workspace_files:
            raise RequestTooLarge(
                f"The workspace has {num_files} files, which is the limit.",
                hint="Delete files and batches that are no longer needed.",
            )
        room = self.config.max_workspace_bytes - int(used)
        if num_bytes > room:
            raise RequestTooLarge(
                f"The workspace's files would take more than the {self.config.max_workspace_bytes} bytes that it may "
                "keep.",
                hint="Delete files and batches that are no longer needed.",
            )
        return room

    def _of_workspace(self, workspace_id: str) -> Select[Any]:
        expires_at = tables.files.c.expires_at
        return select(tables.files).where(
            tables.files.c.workspace_id == workspace_id,
            tables.files.c.purpose.not_in(_HIDDEN),
            or_(expires_at.is_(None), expires_at > self._wall_clock()),
        )


class Upload:
    """Bytes on their way to their place, in large pieces that another thread writes. The caller passes the upload to
    `FileStore.create`, or abandons it."""

    def __init__(self, store: FileStore, workspace_id: str, file_id: str, file: BlobWriter) -> None:
        self.workspace_id = workspace_id
        self.file_id = file_id
        self._store = store
        self._file = file
        self._pending = bytearray()
        self._num_bytes = 0
        self._num_reserved = -1  # an empty file needs a place, too

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        max_bytes = self._store.config.max_file_bytes
        if self._num_bytes > max_bytes:
            raise RequestTooLarge(f"A file may have at most {max_bytes} bytes.", param="file")
        self._pending += data
        if len(self._pending) >= _WRITE_BYTES:
            await self._write_pending()

    async def publish(self) -> int:
        """Make the file visible, and return its size in bytes."""
        await self._write_pending(reserved_ahead=0)
        await in_thread(self._file.publish)
        return self._num_bytes

    async def abandon(self) -> None:
        """Does nothing after `publish`."""
        if self._file.closed:
            return
        await in_thread(self._file.abandon)
        if self._num_reserved >= 0:
            await self._store.release(self.file_id)

    async def _write_pending(self, reserved_ahead: int = _RESERVED_AHEAD_BYTES) -> None:
        if self._num_bytes > self._num_reserved:
            self._num_reserved = await self._store.reserve(
                self.workspace_id, self.file_id, self._num_bytes, ahead=reserved_ahead
            )
        pending, self._pending = self._pending, bytearray()
        await in_thread(self._file.write, pending)


def lock_workspace(connection: Connection, workspace_id: str) -> None:
    """Until the transaction ends, no other one gets past this line for the same workspace. SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.blake2b(workspace_id.encode(), digest_size=8).digest()
        connection.execute(select(func.pg_advisory_xact_lock(int.from_bytes(digest, signed=True))))


def _replace_reservation(connection: Connection, file: StoredFile) -> None:
    connection.execute(delete(tables.files).where(tables.files.c.id == file.id))
    insert_file(connection, file)


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"There is no file {file_id[:64]!r}.", param="file_id")


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._mapping)
