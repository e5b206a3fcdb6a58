"""Blobs as objects of a bucket. All gateways see the same ones.

A blob is sent in parts while it is written, and becomes visible when the last one is confirmed. It is read in pieces,
each with a request of its own, so that a slow reader holds no connection. A writer and a reader each hold one part in
memory, however large the blob is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from penstock.core.errors import StoreUnavailable
from penstock.gateway.blobs.blobs import BlobWriter, check_blob_id
from penstock.gateway.blobs.folder import ABANDONED_AFTER_S
from penstock.gateway.blobs.s3 import ObjectMissing, S3Client

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20  # at least 5 MiB; 10,000 of them are the largest blob
PIECE_BYTES = 4 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Bucket:
    def __init__(self, client: S3Client) -> None:
        self._client = client

    def local_path(self, blob_id: str) -> Path | None:
        return None

    def exists(self, blob_id: str) -> bool:
        try:
            self._client.head(check_blob_id(blob_id))
        except ObjectMissing:
            return False
        return True

    def open(self, blob_id: str) -> IO[bytes]:
        return io.BufferedReader(cast(Any, _Reader(self._client, check_blob_id(blob_id))))

    def num_bytes(self, blob_id: str) -> int:
        return int(self._client.head(check_blob_id(blob_id)).headers["content-length"])

    def begin(self, blob_id: str) -> BlobWriter:
        return _Writer(self._client, check_blob_id(blob_id))

    def publish(self, blob_id: str, writer: BlobWriter) -> None:
        cast(_Writer, writer).finish()

    def abandon(self, writer: BlobWriter) -> None:
        cast(_Writer, writer).abandon()

    @contextlib.contextmanager
    def writing(self, blob_id: str) -> Iterator[BlobWriter]:
        writer = _Writer(self._client, check_blob_id(blob_id))
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def copy(self, source_id: str, target_id: str) -> None:
        self._client.copy(check_blob_id(source_id), check_blob_id(target_id))

    def remove(self, blob_id: str) -> None:
        self._client.delete(check_blob_id(blob_id))

    def remove_abandoned(self) -> None:
        oldest = time.time() - ABANDONED_AFTER_S
        for key, upload_id, begun_at in self._client.unfinished_parts():
            if begun_at < oldest:
                self._client.abort_parts(key, upload_id)


class _Writer:
    def __init__(self, client: S3Client, key: str) -> None:
        self._client = client
        self._key = key
        self._pending = bytearray()
        self._num_bytes = 0
        self._upload_id: str | None = None
        self._tags: list[str] = []
        self.closed = False

    def write(self, data: bytes | bytearray, /) -> int:
        self._pending += data
        self._num_bytes += len(data)
        while len(self._pending) >= PART_BYTES:
            self._send(bytes(memoryview(self._pending)[:PART_BYTES]))
            del self._pending[:PART_BYTES]
        return len(data)

    def finish(self) -> None:
        if self._upload_id is None:
            self._client.put(self._key, bytes(self._pending))
        else:
            if self._pending:
                self._send(bytes(self._pending))
            self._complete(self._upload_id)
        self.closed = True
        self._pending = bytearray()

    def abandon(self) -> None:
        """The store forgets the parts. If it does not answer now, `remove_abandoned` tells it later."""
        if self.closed:
            return
        self.closed = True
        self._pending = bytearray()
        if self._upload_id is not None:
            with contextlib.suppress(StoreUnavailable):
                self._client.abort_parts(self._key, self._upload_id)

    def _send(self, part: bytes) -> None:
        if self._upload_id is None:
            self._upload_id = self._client.begin_parts(self._key)
        number = len(self._tags) + 1
        self._tags.append(self._client.put_part(self._key, self._upload_id, number, part))

    def _complete(self, upload_id: str) -> None:
        try:
            self._client.complete_parts(self._key, upload_id, self._tags)
        except ObjectMissing:
            # The upload is unknown once it is complete: the answer to an earlier attempt may have been lost.
            if int(self._client.head(self._key).headers["content-length"]) != self._num_bytes:
                raise


class _Reader(io.RawIOBase):
    """Reads one version of an object from the start to the end. A read that fails can be tried again."""

    def __init__(self, client: S3Client, key: str) -> None:
        super().__init__()
        self._client = client
        self._key = key
        self._etag: str | None = None
        self._size: int | None = None
        self._next = 0  # the first byte that is not in `_piece`
        self._piece = memoryview(b"")
        self._fetch()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._piece and (self._size is None or self._next < self._size):
            self._fetch()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._piece))
        target[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def _fetch(self) -> None:
        response = self._client.get_range(self._key, self._next, PIECE_BYTES, self._etag)
        if response.status_code == 416 and self._size is None:
            self._size = 0  # an object without bytes has no range
            return
        placed = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        data = response.content
        if placed is None or int(placed[1]) != self._next or int(placed[2]) + 1 - int(placed[1]) != len(data):
            logger.error("the object store sent another part of an object than it was asked for")
            raise StoreUnavailable("The object store for files sent a wrong answer.", retry_after_s=1.0)
        self._etag, self._size = response.headers.get("etag"), int(placed[3])
        self._next += len(data)
        self._piece = memoryview(data)
