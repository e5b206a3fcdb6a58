"""Blobs as files of a folder, which several gateways may share over a network file system.

Bytes are written to a temporary file, flushed to the disk and then renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from penstock.gateway.blobs.blobs import BlobWriter, check_blob_id

_UNFINISHED = ".part"
# Longer than any upload may take; what is older was left behind by a process that died.
ABANDONED_AFTER_S = 24 * 3600.0


class FileFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, file_id: str) -> Path:
        return self._path / check_blob_id(file_id)

    def local_path(self, blob_id: str) -> Path | None:
        return self.path(blob_id)

    def exists(self, blob_id: str) -> bool:
        return self.path(blob_id).exists()

    def open(self, blob_id: str) -> IO[bytes]:
        return self.path(blob_id).open("rb")

    def num_bytes(self, blob_id: str) -> int:
        return self.path(blob_id).stat().st_size

    def begin(self, blob_id: str) -> BinaryIO:
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.path(blob_id).with_suffix(f".{secrets.token_hex(6)}{_UNFINISHED}")
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def publish(self, blob_id: str, writer: BlobWriter) -> None:
        file = cast(BinaryIO, writer)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(file.name, self.path(blob_id))
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self, writer: BlobWriter) -> None:
        file = cast(BinaryIO, writer)
        file.close()
        Path(file.name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, blob_id: str) -> Iterator[BlobWriter]:
        file = self.begin(blob_id)
        try:
            yield file
        except BaseException:
            self.abandon(file)
            raise
        self.publish(blob_id, file)

    def copy(self, source_id: str, target_id: str) -> None:
        target = self.path(target_id)
        target.unlink(missing_ok=True)
        os.link(self.path(source_id), target)

    def remove(self, blob_id: str) -> None:
        self.path(blob_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        oldest = time.time() - ABANDONED_AFTER_S
        for path in self._path.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
