"""KV blocks in files, one for each block, within a size. Knows bytes and hashes; no engine and no request.

    DIRECTORY/MODEL/ab/abcd….kv     a header with a checksum, then the bytes of a block

MODEL is a digest of all that the bytes depend on: weights, dtypes, layout and version. Files of another model
are never read, but count in the size, and the oldest files go first whichever model they belong to. A file appears
under its name only when it is complete. Errors of reads and writes are logged, and never raised.
Only the user of the process can read the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from penstock.core.figures import format_bytes
from penstock.core.hashing import BlockHash

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_HEADER = struct.Struct("<4s16s32sIQ")  # magic, model, block, checksum, bytes that follow
_MAGIC = b"PKV%d" % FORMAT_VERSION
_REST_S = 60.0  # after a failed write, before the next attempt
_STALE_S = 3600.0  # of a file that was never completed


def model_digest(*facts: object) -> bytes:
    """Return the digest of what the bytes of a block depend on."""
    return blake2b(repr((FORMAT_VERSION, facts)).encode(), digest_size=16).digest()


class BlockFiles:
    """All methods may be called from any thread."""

    def __init__(self, directory: Path, max_bytes: int, model: bytes, block_bytes: int) -> None:
        """Raises OSError if files cannot be written there."""
        self._directory = directory / model.hex()
        self._max_bytes = max_bytes
        self._model = model
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._own: set[BlockHash] = set()
        self._rests_until = 0.0
        self.num_written = 0
        self.num_read = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        probe = self._directory / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
        self._scan(directory)

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._own

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read(self, block_hash: BlockHash) -> bytes | None:
        """Return the bytes of a block; None if there is no such file, or it is damaged and was removed."""
        path = self._path(block_hash)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            self._forget(path, block_hash)
            return None
        except OSError as error:
            logger.warning("the KV block %s cannot be read: %s", path, error.strerror)
            self._forget(path, block_hash)
            return None
        problem = self._problem(data, block_hash)
        if problem:
            logger.warning("the KV block %s is damaged (%s) and was removed", path, problem)
            self._remove(path, block_hash)
            return None
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
            self.num_read += 1
        return data[_HEADER.size :]

    def write(self, block_hash: BlockHash, contents: bytes) -> bool:
        """Write a block, and remove the oldest files that have no room any more. Returns whether that succeeded."""
        size = _HEADER.size + len(contents)
        if block_hash in self._own or size > self._max_bytes or time.monotonic() < self._rests_until:
            return False
        header = _HEADER.pack(_MAGIC, self._model, block_hash, zlib.crc32(contents), len(contents))
        path = self._path(block_hash)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            self._make_room(size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(header)
                file.write(contents)
            part.replace(path)
        except OSError as error:
            self._rests_until = time.monotonic() + _REST_S
            logger.warning(
                "KV blocks cannot be written to %s: %s; the next attempt is in %.0f s",
                self._directory,
                error.strerror,
                _REST_S,
            )
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        with self._lock:
            self._sizes[path] = size
            self._num_bytes += size
            self._own.add(block_hash)
            self.num_written += 1
        return True

    def _problem(self, data: bytes, block_hash: BlockHash) -> str:
        if len(data) < _HEADER.size:
            return "it is cut off"
        magic, model, name, checksum, length = _HEADER.unpack_from(data)
        if magic != _MAGIC or model != self._model or name[: len(block_hash)] != block_hash:
            return "it belongs to another block, model or version"
        if length != self._block_bytes or len(data) != _HEADER.size + length:
            return f"it has {len(data) - _HEADER.size} bytes of {self._block_bytes}"
        return "" if zlib.crc32(memoryview(data)[_HEADER.size :]) == checksum else "its checksum is wrong"

    def _scan(self, directory: Path) -> None:
        """Find the files of earlier runs, of this model and of others."""
        found = []
        for path in directory.glob("*/*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == ".kv":
                    found.append((status.st_mtime, path, status.st_size))
                elif path.suffix == ".part" and time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
        for _, path, size in sorted(found):
            self._sizes[path] = size
            self._num_bytes += size
            if path.parent.parent == self._directory:
                with contextlib.suppress(ValueError):
                    self._own.add(bytes.fromhex(path.stem))
        self._make_room(0)
        if found:
            logger.info(
                "%d KV blocks of this model are on disk, in %s of %s",
                len(self._own),
                format_bytes(self._num_bytes),
                format_bytes(self._max_bytes),
            )

    def _make_room(self, size: int) -> None:
        while self._sizes and self._num_bytes + size > self._max_bytes:
            path = next(iter(self._sizes))
            with contextlib.suppress(ValueError):
                self._remove(path, bytes.fromhex(path.stem))

    def _remove(self, path: Path, block_hash: BlockHash) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        self._forget(path, block_hash)

    def _forget(self, path: Path, block_hash: BlockHash) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(path, 0)
            if path.parent.parent == self._directory:
                self._own.discard(block_hash)

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self._directory / name[:2] / f"{name}.kv"
