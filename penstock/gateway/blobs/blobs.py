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
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

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


class BlobWriter(ABC):
    """A blob that is not visible yet. Two writers of one id do not interfere: the last `publish` wins."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether it was published or abandoned."""

    @abstractmethod
    def write(self, data: bytes | bytearray, /) -> object: ...

    @abstractmethod
    def publish(self) -> None: ...

    @abstractmethod
    def abandon(self) -> None:
        """Does nothing after `publish`."""


class Blobs(ABC):
    @abstractmethod
    def exists(self, blob_id: str) -> bool: ...

    @abstractmethod
    def open(self, blob_id: str) -> IO[bytes]:
        """For reading from the start to the end, by a caller that closes it."""

    @abstractmethod
    def num_bytes(self, blob_id: str) -> int: ...

    @abstractmethod
    def begin(self, blob_id: str) -> BlobWriter:
        """Then `publish` or `abandon` the writer."""

    @contextlib.contextmanager
    def writing(self, blob_id: str) -> Iterator[BlobWriter]:
        """Published at the end of the block, abandoned when it raises."""
        writer = self.begin(blob_id)
        try:
            yield writer
            writer.publish()
        except BaseException:
            writer.abandon()
            raise

    @abstractmethod
    def copy(self, source_id: str, target_id: str) -> None:
        """Give the same bytes a second id; each can be removed on its own."""

    @abstractmethod
    def remove(self, blob_id: str) -> None:
        """Does nothing if there is no such blob."""

    @abstractmethod
    def remove_abandoned(self) -> None:
        """Remove half-written blobs of processes that died."""


_UNFINISHED = ".part"
# Longer than any upload may take; what is older was left behind by a process that died.
ABANDONED_AFTER_S = 24 * 3600.0


logger = logging.getLogger(__name__)


class FileFolder(Blobs):
    """Blobs as files of a folder, which several gateways may share over a network file system. Bytes are written to
    a temporary file, flushed to the disk and then renamed. Errors of the disk, such as a full one, become
    StoreUnavailable. Their cause goes to the log, once in a row: callers of an API read the error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outage: str | None = None  # the cause of the present one, which was logged

    def path(self, file_id: str) -> Path:
        return self._path / check_blob_id(file_id)

    def exists(self, blob_id: str) -> bool:
        return self.path(blob_id).exists()

    def open(self, blob_id: str) -> IO[bytes]:
        with self.disk():
            return self.path(blob_id).open("rb")

    def num_bytes(self, blob_id: str) -> int:
        return self.path(blob_id).stat().st_size

    def begin(self, blob_id: str) -> _Part:
        with self.disk():
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            target = self.path(blob_id)
            path = target.with_suffix(f".{secrets.token_hex(6)}{_UNFINISHED}")
            return _Part(
                open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)), target, self
            )

    def copy(self, source_id: str, target_id: str) -> None:
        target = self.path(target_id)
        with self.disk():
            target.unlink(missing_ok=True)
            os.link(self.path(source_id), target)

    def remove(self, blob_id: str) -> None:
        with self.disk():
            self.path(blob_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        oldest = time.time() - ABANDONED_AFTER_S
        for path in self._path.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError), self.disk():
                if path.stat().st_mtime < oldest:
                    path.unlink()

    @contextlib.contextmanager
    def disk(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            cause = error.strerror or str(error)
            if cause != self.outage:
                self.outage = cause
                logger.error("the folder %s cannot be used: %s", self._path, cause)
            raise StoreUnavailable(
                "The server's files cannot be used at the moment; the log says why.", retry_after_s=1.0
            ) from error


class _Part(BlobWriter):
    """A file that is being written under a temporary name."""

    def __init__(self, file: BinaryIO, target: Path, folder: FileFolder) -> None:
        self._file = file
        self._target = target
        self._folder = folder

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes | bytearray, /) -> object:
        with self._folder.disk():
            return self._file.write(data)

    def publish(self) -> None:
        with self._folder.disk():
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._file.name, self._target)
            self._file.close()  # not before: what is still open can be abandoned
            folder = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._folder.outage = None

    def abandon(self) -> None:
        if self.closed:
            return
        with contextlib.suppress(OSError):  # the disk may be too full for the last bytes
            self._file.close()
        with self._folder.disk():
            Path(self._file.name).unlink(missing_ok=True)
