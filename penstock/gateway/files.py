"""The files of workspaces: upload, list, read, delete, expire. This module knows no HTTP.

A file of another workspace looks as if it did not exist. The metadata are in the database and the bytes in a
`FileFolder`, one file per id. Bytes are written beside, flushed to the disk and then renamed, so that a file appears
under its id whole or not at all. Bytes are on the disk before the row that names them is committed, and a row is
deleted before its bytes, so that a crash leaves at most bytes that no row names.

An upload reserves room in its workspace's quota before its bytes reach the disk. The reservation is a row in the
table of files that no client sees; it becomes the file's row at the end, and expires if the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta
from sqlalchemy import Connection, Row, Select, delete, func, insert, or_, select

from penstock.core.errors import NotFound, RequestTooLarge
from penstock.gateway.store import tables
from penstock.gateway.store.database import Database, Order, read_page

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNFINISHED = ".part"
# Longer than any upload may take; what is older was left behind by a process that died.
_ABANDONED_AFTER_S = 24 * 3600.0


def is_file_id(text: str) -> bool:
    """Whether it could be one: nothing that a path or a database would read otherwise."""
    return _ID.fullmatch(text) is not None


class FileFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, file_id: str) -> Path:
        if not is_file_id(file_id):
            raise ValueError(f"not the id of a file: {file_id!r}")
        return self._path / file_id

    def exists(self, file_id: str) -> bool:
        return self.path(file_id).exists()

    def begin(self, file_id: str) -> BinaryIO:
        """Open a file for writing that nobody sees yet. Then `publish` or `abandon` it.

        Two that write under one id do not meet: who publishes last, wins."""
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.path(file_id).with_suffix(f".{secrets.token_hex(6)}{_UNFINISHED}")
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def publish(self, file_id: str, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(file.name, self.path(file_id))
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self, file: BinaryIO) -> None:
        file.close()
        Path(file.name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        """Published at the end of the block, abandoned when it raises."""
        file = self.begin(file_id)
        try:
            yield file
        except BaseException:
            self.abandon(file)
            raise
        self.publish(file_id, file)

    def copy(self, source_id: str, target_id: str) -> None:
        """Give the same bytes a second id; each can be removed on its own."""
        target = self.path(target_id)
        target.unlink(missing_ok=True)
        os.link(self.path(source_id), target)

    def remove(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        oldest = time.time() - _ABANDONED_AFTER_S
        for path in self._path.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


_WRITE_BYTES = 1 << 20  # how much of an upload is gathered before a thread writes it
_MAX_FILENAME_CHARS = 512
_MAX_EXPIRED_AT_ONCE = 1000
_RESERVED_AHEAD_BYTES = 8 << 20  # so that a long upload asks the database once in a while
_RESERVED_FOR_S = 24 * 3600.0  # longer than an upload may take
_UPLOADING = "uploading"  # the purpose of reservations
UPLOAD, PART = "upload", "upload_part"  # the purposes of an upload in parts, and of its parts
_HIDDEN = (_UPLOADING, UPLOAD, PART)


class FilesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a workspace may keep."""

    max_file_bytes: Annotated[int, Meta(ge=1)] = 512 << 20
    max_workspace_bytes: Annotated[int, Meta(ge=1)] = 16 << 30


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
    """For a transaction that does more than that. The bytes must be in the folder."""
    connection.execute(insert(tables.files).values(msgspec.structs.asdict(file)))


class FileStore:
    def __init__(
        self,
        database: Database,
        data_dir: Path,
        config: FilesConfig | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = FileFolder(data_dir / "files")
        self.config = config or FilesConfig()
        self.database = database
        self._wall_clock = wall_clock

    async def upload(self, workspace_id: str, *, prefix: str = "file-") -> Upload:
        file_id = new_file_id(prefix)
        file = await asyncio.to_thread(self.folder.begin, file_id)
        return Upload(self, workspace_id, file_id, file)

    async def create(
        self,
        upload: Upload,
        *,
        filename: str,
        purpose: str,
        expires_after_s: float | None = None,
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
            await self.database.run(lambda connection: _replace_reservation(connection, file))
        except Exception:
            await asyncio.to_thread(self.folder.remove, file.id)
            raise
        return file

    async def reserve(self, workspace_id: str, file_id: str, num_bytes: int, *, ahead: int) -> int:
        """Reserve room for `num_bytes` of an upload, and for `ahead` more if there is room, and return how much was
        reserved. Raises RequestTooLarge when the workspace has too little room."""
        return await self.database.run(
            lambda connection: self._reserve(connection, workspace_id, file_id, num_bytes, ahead)
        )

    async def release(self, file_id: str) -> None:
        """Give back the room of an upload that was abandoned."""
        is_reservation = tables.files.c.id == file_id, tables.files.c.purpose == _UPLOADING
        await self.database.run(
            lambda connection: connection.execute(delete(tables.files).where(*is_reservation))
        )

    async def get(self, workspace_id: str, file_id: str) -> StoredFile:
        row = None
        if is_file_id(file_id):
            row = await self.database.run(
                lambda connection: connection.execute(self._find(workspace_id, file_id)).one_or_none(),
                reads_only=True,
            )
        if row is None:
            raise NotFound(f"There is no file {file_id[:64]!r}.", param="file_id")
        return _file(row)

    async def page(
        self,
        workspace_id: str,
        *,
        purpose: str | None = None,
        limit: int = 10_000,
        order: Order = "desc",
        after: str | None = None,
    ) -> FilePage:
        def read(connection: Connection) -> FilePage:
            query = self._of_workspace(workspace_id)
            if purpose is not None:
                query = query.where(tables.files.c.purpose == purpose)
            rows, has_more = read_page(connection, query, tables.files, limit=limit, order=order, after=after)
            return FilePage([_file(row) for row in rows], has_more)

        return await self.database.run(read, reads_only=True)

    async def delete(self, workspace_id: str, file_id: str) -> None:
        await self.get(workspace_id, file_id)
        await self.database.run(
            lambda connection: connection.execute(
                delete(tables.files).where(
                    tables.files.c.id == file_id, tables.files.c.workspace_id == workspace_id
                )
            )
        )
        await asyncio.to_thread(self.folder.remove, file_id)

    async def remove_expired(self) -> int:
        """Remove expired files, which are invisible already, and return how many there were."""

        def remove(connection: Connection) -> list[str]:
            is_expired = tables.files.c.expires_at <= self._wall_clock()
            query = select(tables.files.c.id).where(is_expired).limit(_MAX_EXPIRED_AT_ONCE)
            ids = list(connection.execute(query).scalars())
            connection.execute(delete(tables.files).where(tables.files.c.id.in_(ids)))
            return ids

        expired = await self.database.run(remove)
        for file_id in expired:
            await asyncio.to_thread(self.folder.remove, file_id)
        await asyncio.to_thread(self.folder.remove_abandoned)
        return len(expired)

    def _reserve(
        self, connection: Connection, workspace_id: str, file_id: str, num_bytes: int, ahead: int
    ) -> int:
        lock_workspace(connection, workspace_id)
        is_other = tables.files.c.workspace_id == workspace_id, tables.files.c.id != file_id
        used = connection.execute(
            select(func.coalesce(func.sum(tables.files.c.num_bytes), 0)).where(*is_other)
        ).scalar_one()
        room = self.config.max_workspace_bytes - used
        if num_bytes > room:
            raise RequestTooLarge(
                f"The workspace's files would take more than the {self.config.max_workspace_bytes} bytes that it may "
                "keep.",
                hint="Delete files that are no longer needed.",
            )
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

    def _of_workspace(self, workspace_id: str) -> Select[Any]:
        expires_at = tables.files.c.expires_at
        return select(tables.files).where(
            tables.files.c.workspace_id == workspace_id,
            tables.files.c.purpose.not_in(_HIDDEN),
            or_(expires_at.is_(None), expires_at > self._wall_clock()),
        )

    def _find(self, workspace_id: str, file_id: str) -> Select[Any]:
        return self._of_workspace(workspace_id).where(tables.files.c.id == file_id)


class Upload:
    """Bytes on their way to the disk, in large pieces that another thread writes. The caller passes the upload to
    `FileStore.create`, or abandons it."""

    def __init__(self, store: FileStore, workspace_id: str, file_id: str, file: BinaryIO) -> None:
        self.workspace_id = workspace_id
        self.file_id = file_id
        self._store = store
        self._file = file
        self._pending = bytearray()
        self._num_bytes = 0
        self._num_reserved = 0

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
        """Move the file to its place, and return its size in bytes."""
        await self._write_pending(reserved_ahead=0)
        await asyncio.to_thread(self._store.folder.publish, self.file_id, self._file)
        return self._num_bytes

    async def abandon(self) -> None:
        """Does nothing after `publish`."""
        if self._file.closed:
            return
        await asyncio.to_thread(self._store.folder.abandon, self._file)
        if self._num_reserved:
            await self._store.release(self.file_id)

    async def _write_pending(self, reserved_ahead: int = _RESERVED_AHEAD_BYTES) -> None:
        if self._num_bytes > self._num_reserved:
            self._num_reserved = await self._store.reserve(
                self.workspace_id, self.file_id, self._num_bytes, ahead=reserved_ahead
            )
        pending, self._pending = self._pending, bytearray()
        await asyncio.to_thread(self._file.write, pending)


def lock_workspace(connection: Connection, workspace_id: str) -> None:
    """Until the transaction ends, no other one gets past this line for the same workspace. SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.blake2b(workspace_id.encode(), digest_size=8).digest()
        connection.execute(select(func.pg_advisory_xact_lock(int.from_bytes(digest, signed=True))))


def _replace_reservation(connection: Connection, file: StoredFile) -> None:
    connection.execute(delete(tables.files).where(tables.files.c.id == file.id))
    insert_file(connection, file)


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._mapping)
