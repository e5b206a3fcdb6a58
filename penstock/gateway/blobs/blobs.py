"""The interface of every place for bytes, and the place that needs no service: a folder. Used from threads; knows
no event loop, no database and no HTTP of clients.

A blob appears under its id whole or not at all. A place that does not answer raises StoreUnavailable, and a blob
that is not there FileNotFoundError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from penstock.core.errors import StoreUnavailable

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def is_blob_id(text: str) -> bool:
    """Return whether a text can be the id of a blob: it has nothing that a path, a URL or a database would read
    in another way."""
    return _ID.fullmatch(text) is not None


def check_blob_id(blob_id: str) -> str:
    if not is_blob_id(blob_id):
        raise ValueError(f"not the id of a blob: {blob_id!r}")
    return blob_id


class BlobWriter(Protocol):
    """A blob that is not visible yet."""

    @property
    def closed(self) -> bool:
        """Return whether it was published or abandoned."""
        ...

    def write(self, data: bytes | bytearray, /) -> object: ...


class Blobs(Protocol):
    def exists(self, blob_id: str) -> bool: ...

    def open(self, blob_id: str) -> IO[bytes]:
        """For reading from the start to the end, by a caller that closes it."""
        ...

    def num_bytes(self, blob_id: str) -> int: ...

    def begin(self, blob_id: str) -> BlobWriter:
        """Then `publish` or `abandon` it. Two writers of one id do not interfere: the last `publish` wins."""
        ...

    def publish(self, blob_id: str, writer: BlobWriter) -> None: ...

    def abandon(self, writer: BlobWriter) -> None:
        """Does nothing after `publish`."""
        ...

    def writing(self, blob_id: str) -> contextlib.AbstractContextManager[BlobWriter]:
        """Published at the end of the block, abandoned when it raises."""
        ...

    def copy(self, source_id: str, target_id: str) -> None:
        """Give the same bytes a second id; each can be removed on its own."""
        ...

    def remove(self, blob_id: str) -> None:
        """Does nothing if there is no such blob."""
        ...

    def remove_abandoned(self) -> None:
        """Remove half-written blobs of processes that died."""
        ...

    def local_path(self, blob_id: str) -> Path | None:
        """Return the blob's path; None if the blob is not on a disk."""
        ...


_UNFINISHED = ".part"
# Longer than any upload may take; what is older was left behind by a process that died.
ABANDONED_AFTER_S = 24 * 3600.0


logger = logging.getLogger(__name__)


class FileFolder:
    """Blobs as files of a folder, which several gateways may share over a network file system. Bytes are written to
    a temporary file, flushed to the disk and then renamed. Errors of the disk, such as a full one, become
    StoreUnavailable. Their cause goes to the log, once in a row: callers of an API read the error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outage: str | None = None  # its cause, which was logged

    def path(self, file_id: str) -> Path:
        return self._path / check_blob_id(file_id)

    def local_path(self, blob_id: str) -> Path | None:
        return self.path(blob_id)

    def exists(self, blob_id: str) -> bool:
        return self.path(blob_id).exists()

    def open(self, blob_id: str) -> IO[bytes]:
        with self._disk():
            return self.path(blob_id).open("rb")

    def num_bytes(self, blob_id: str) -> int:
        return self.path(blob_id).stat().st_size

    def begin(self, blob_id: str) -> _Part:
        with self._disk():
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.path(blob_id).with_suffix(f".{secrets.token_hex(6)}{_UNFINISHED}")
            return _Part(open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)), self._disk)

    def publish(self, blob_id: str, writer: BlobWriter) -> None:
        file = cast(_Part, writer).file
        with self._disk():
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, self.path(blob_id))
            file.close()  # not before: what is still open can be abandoned
            folder = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._outage = None

    def abandon(self, writer: BlobWriter) -> None:
        file = cast(_Part, writer).file
        if file.closed:
            return
        with contextlib.suppress(OSError):  # the disk may be too full for the last bytes
            file.close()
        with self._disk():
            Path(file.name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, blob_id: str) -> Iterator[BlobWriter]:
        part = self.begin(blob_id)
        try:
            yield part
            self.publish(blob_id, part)
        except BaseException:
            self.abandon(part)
            raise

    def copy(self, source_id: str, target_id: str) -> None:
        target = self.path(target_id)
        with self._disk():
            target.unlink(missing_ok=True)
            os.link(self.path(source_id), target)

    def remove(self, blob_id: str) -> None:
        with self._disk():
            self.path(blob_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        oldest = time.time() - ABANDONED_AFTER_S
        for path in self._path.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError), self._disk():
                if path.stat().st_mtime < oldest:
                    path.unlink()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            cause = error.strerror or str(error)
            if cause != self._outage:
                self._outage = cause
                logger.error("the folder %s cannot be used: %s", self._path, cause)
            raise StoreUnavailable(
                "The server's files cannot be used at the moment; the log says why.", retry_after_s=1.0
            ) from error


class _Part:
    """A file that is being written under a temporary name."""

    def __init__(self, file: BinaryIO, disk: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.file = file
        self._disk = disk

    @property
    def closed(self) -> bool:
        return self.file.closed

    def write(self, data: bytes | bytearray, /) -> object:
        with self._disk():
            return self.file.write(data)
