"""The servers that run on this machine, for `penstock ps`: a file for each, which the server's process holds locked.

The lock ends with the process, however it ends, so that a file without a lock belongs to a server that has ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.serve.environment import state_dir

logger = logging.getLogger(__name__)


class RunningServer(msgspec.Struct, frozen=True):
    pid: int
    url: str
    models: tuple[str, ...]
    started_at: float  # Unix time


_decode = msgspec.json.Decoder(RunningServer).decode

Announce = Callable[[str, Sequence[str]], None]


@contextmanager
def announced(folder: Path | None = None) -> Iterator[Announce]:
    """Yield a function that tells the server's URL and models to `penstock ps`, until the block ends."""
    files: list[tuple[Path, BinaryIO]] = []

    def announce(url: str, models: Sequence[str]) -> None:
        try:
            files.append(_write(_folder(folder), RunningServer(os.getpid(), url, tuple(models), time.time())))
        except OSError as error:  # the server can run without this file
            logger.debug("penstock ps will not list this server: %s", error)

    try:
        yield announce
    finally:
        for path, file in files:
            path.unlink(missing_ok=True)
            file.close()


def running_servers(folder: Path | None = None) -> list[RunningServer]:
    """Return the servers that run now, oldest first. Files of servers that were killed are removed."""
    found = []
    for path in _folder(folder).glob("*.json"):
        with suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with suppress(msgspec.MsgspecError):
                    found.append(_decode(file.read()))
            else:
                path.unlink()
    return sorted(found, key=lambda server: server.started_at)


def _write(folder: Path, server: RunningServer) -> tuple[Path, BinaryIO]:
    """Write the file. It appears under its name only when it is complete and locked."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, unfinished = folder / f"{server.pid}.json", folder / f"{server.pid}.new"
    file = unfinished.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(msgspec.json.encode(server))
        file.flush()
        unfinished.replace(path)
    except BaseException:
        file.close()
        raise
    return path, file


def _folder(folder: Path | None) -> Path:
    return folder or state_dir() / "servers"
