"""Where the bytes of files lie: one folder, one file per id. Knows no database, no workspace and no event loop.

A file appears under its id whole or not at all: it is written beside, flushed to the disk and then renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
