"""Blobs as objects of a bucket. All gateways see the same ones.

A blob is sent in parts while it is written, and becomes visible when the last one is confirmed. It is read in pieces,
each with a request of its own, so that a slow reader holds no connection. A writer and a reader each hold one part in
memory, however large the blob is.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, Any, cast
from urllib.parse import quote, urlsplit

import httpx

from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.gateway.blobs.blobs import ABANDONED_AFTER_S, Blobs, BlobWriter, check_blob_id

logger = logging.getLogger(__name__)


_TIMEOUT = httpx.Timeout(connect=3.0, read=15.0, write=15.0, pool=15.0)
_NUM_ATTEMPTS = 4
_FIRST_WAIT_S = 0.1
_PAUSE_S = 1.0  # after all attempts failed, before the store is asked again
_REPEATED = frozenset({408, 425, 429, 500, 502, 503, 504})
_NO_BYTES = hashlib.sha256(b"").hexdigest()
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class S3Access:
    """The credentials for an object store, and its address. Without an endpoint, the store is Amazon's."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    endpoint: str | None = None


class ObjectMissing(FileNotFoundError):
    pass


class S3Client:
    """The objects of one bucket under one prefix. Safe to use from several threads, and synchronous, because its
    callers are threads: ten requests, signed (Signature Version 4), repeated after failures.

    A library would be far larger: boto3 has descriptions of all of Amazon's services and its own HTTP client. Every
    body that is sent is signed with its SHA-256, so that a store refuses bytes that were damaged on the way. Errors
    of the store are one StoreUnavailable for callers; the log has the store's own code.
    """

    def __init__(self, url: str, access: S3Access, transport: httpx.BaseTransport | None = None) -> None:
        """`url` is s3://BUCKET/PREFIX. Raises ConfigError."""
        self.bucket, self._prefix = _parsed(url)
        self._access = access
        self._host, self._root = _address(self.bucket, access)
        self._client = httpx.Client(timeout=_TIMEOUT, transport=transport, follow_redirects=False)
        self._paused_until = 0.0  # on the monotonic clock

    def close(self) -> None:
        self._client.close()

    def get_range(self, key: str, start: int, length: int, etag: str | None = None) -> httpx.Response:
        """Part of an object. With `etag` only of that version of the object."""
        headers = {"range": f"bytes={start}-{start + length - 1}"}
        if etag is not None:
            headers["if-match"] = etag
        return self._ask("GET", key, headers=headers, expected=(206, 416))

    def head(self, key: str) -> httpx.Response:
        return self._ask("HEAD", key)

    def put(self, key: str, body: bytes) -> None:
        self._ask("PUT", key, body=body)

    def copy(self, source: str, target: str) -> None:
        place = f"/{self.bucket}/{quote(self._prefix + source)}"
        self._refuse_error(self._ask("PUT", target, headers={"x-amz-copy-source": place}))

    def delete(self, key: str) -> None:
        self._ask("DELETE", key, expected=(200, 204, 404))

    def begin_parts(self, key: str) -> str:
        """Return the id of an upload in parts."""
        return _element(self._ask("POST", key, {"uploads": ""}).text, "UploadId")

    def put_part(self, key: str, upload_id: str, number: int, body: bytes) -> str:
        """Return the tag of the part, for `complete_parts`."""
        query = {"partNumber": str(number), "uploadId": upload_id}
        return str(self._ask("PUT", key, query, body=body).headers["etag"])

    def complete_parts(self, key: str, upload_id: str, tags: Sequence[str]) -> None:
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, start=1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self._refuse_error(self._ask("POST", key, {"uploadId": upload_id}, body=body))

    def abort_parts(self, key: str, upload_id: str) -> None:
        self._ask("DELETE", key, {"uploadId": upload_id}, expected=(200, 204, 404))

    def unfinished_parts(self) -> list[tuple[str, str, float]]:
        """Return the keys and ids of uploads in parts that were not completed, with the Unix times of their
        beginnings; at most a thousand."""
        page = self._ask("GET", None, {"prefix": self._prefix, "uploads": ""}).text
        found = []
        for upload in re.findall(r"<Upload>(.*?)</Upload>", page, re.DOTALL):
            begun = datetime.fromisoformat(_element(upload, "Initiated").replace("Z", "+00:00"))
            key = _element(upload, "Key").removeprefix(self._prefix)
            found.append((key, _element(upload, "UploadId"), begun.timestamp()))
        return found

    def check(self) -> None:
        """Raise ConfigError if there is no such bucket. A store that does not answer may answer later."""
        try:
            self._ask("GET", None, {"list-type": "2", "max-keys": "1", "prefix": self._prefix})
        except FileNotFoundError:
            raise ConfigError(
                f"The object store has no bucket '{self.bucket}'.", hint="Make it, or change --files-url."
            ) from None
        except StoreUnavailable:
            logger.warning("files cannot be read or written until the object store answers")

    def _ask(
        self,
        method: str,
        key: str | None,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        expected: tuple[int, ...] = (200, 204),
    ) -> httpx.Response:
        """Send a request, and repeat it after network errors. `key` None asks for the bucket itself. Every request
        may be repeated: each gives the same result the second time."""
        path = f"{self._root}/" if key is None else f"{self._root}/{quote(self._prefix + key)}"
        if time.monotonic() < self._paused_until:
            raise _unavailable()
        cause = ""
        for attempt in range(_NUM_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_WAIT_S * 2**attempt * (0.5 + random.random()))
            try:
                request = self._signed(method, path, dict(query or {}), dict(headers or {}), body)
                response = self._client.send(request)
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in expected:
                return response
            if response.status_code == 404:
                raise ObjectMissing(key or self.bucket)
            cause = f"{response.status_code} {_code(response)}"
            if response.status_code not in _REPEATED:
                break
        else:
            self._paused_until = time.monotonic() + _PAUSE_S
        logger.error("the object store %s cannot be used: %s", self._host, cause)
        raise _unavailable()

    def _refuse_error(self, response: httpx.Response) -> None:
        """Long requests are answered with 200 before their outcome is known."""
        if "<Error>" in response.text:
            logger.error("the object store %s refused: %s", self._host, _code(response))
            raise _unavailable()

    def _signed(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> httpx.Request:
        access = self._access
        now = datetime.now(UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        digest = hashlib.sha256(body).hexdigest() if body else _NO_BYTES
        headers |= {"host": urlsplit(self._host).netloc, "x-amz-date": stamp, "x-amz-content-sha256": digest}
        if access.token is not None:
            headers["x-amz-security-token"] = access.token
        names = ";".join(sorted(headers))
        encoded_query = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
        )
        canonical = "\n".join(
            (
                method,
                path,
                encoded_query,
                *(f"{name}:{headers[name].strip()}" for name in sorted(headers)),
                "",
                names,
                digest,
            )
        )
        scope = f"{day}/{access.region}/s3/aws4_request"
        text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        key = f"AWS4{access.secret}".encode()
        for step in (day, access.region, "s3", "aws4_request"):
            key = hmac.digest(key, step.encode(), "sha256")
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        url = f"{self._host}{path}" + (f"?{encoded_query}" if encoded_query else "")
        return self._client.build_request(method, url, headers=headers, content=body)


def _parsed(url: str) -> tuple[str, str]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not url.startswith("s3://") or not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"'{url[:80]}' is no place for files.", hint="It looks like s3://bucket or s3://bucket/prefix."
        )
    return bucket, f"{prefix}/" if prefix else ""


def _address(bucket: str, access: S3Access) -> tuple[str, str]:
    """Return the address of the server, and the beginning of every path. Self-hosted servers expect the bucket in the
    path."""
    if access.endpoint is None:
        return f"https://{bucket}.s3.{access.region}.amazonaws.com", ""
    parts = urlsplit(access.endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"The endpoint of the object store, '{access.endpoint[:80]}', is no URL.",
            hint="It looks like https://minio.example:9000.",
        )
    return f"{parts.scheme}://{parts.netloc}", f"{parts.path.rstrip('/')}/{bucket}"


def _unavailable() -> StoreUnavailable:
    return StoreUnavailable(
        "The object store for files cannot be used at the moment; the log says why.", retry_after_s=_PAUSE_S
    )


def _element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    if found is None:
        logger.error("the object store's answer has no %s", name)
        raise _unavailable()
    return found[1]


def _code(response: httpx.Response) -> str:
    found = re.search(r"<Code>([^<]{1,80})</Code>", response.text)
    return found[1] if found else ""


PART_BYTES = 8 << 20  # at least 5 MiB; 10,000 of them are the largest blob
PIECE_BYTES = 4 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Bucket(Blobs):
    def __init__(self, client: S3Client) -> None:
        self._client = client

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

    def copy(self, source_id: str, target_id: str) -> None:
        self._client.copy(check_blob_id(source_id), check_blob_id(target_id))

    def remove(self, blob_id: str) -> None:
        self._client.delete(check_blob_id(blob_id))

    def remove_abandoned(self) -> None:
        oldest = time.time() - ABANDONED_AFTER_S
        for key, upload_id, begun_at in self._client.unfinished_parts():
            if begun_at < oldest:
                self._client.abort_parts(key, upload_id)


class _Writer(BlobWriter):
    closed = False

    def __init__(self, client: S3Client, key: str) -> None:
        self._client = client
        self._key = key
        self._pending = bytearray()
        self._num_bytes = 0
        self._upload_id: str | None = None
        self._tags: list[str] = []

    def write(self, data: bytes | bytearray, /) -> int:
        self._pending += data
        self._num_bytes += len(data)
        while len(self._pending) >= PART_BYTES:
            self._send(bytes(memoryview(self._pending)[:PART_BYTES]))
            del self._pending[:PART_BYTES]
        return len(data)

    def publish(self) -> None:
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
