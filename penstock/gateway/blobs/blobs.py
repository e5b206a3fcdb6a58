"""The interface of every place for bytes. Used from threads; knows no event loop, no database and no HTTP of clients.

A blob appears under its id whole or not at all. A place that does not answer raises StoreUnavailable, and a blob that
is not there FileNotFoundError.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import IO, Protocol

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
    """A blob that nobody sees yet."""

    @property
    def closed(self) -> bool:
        """Say whether it was published or abandoned."""
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
