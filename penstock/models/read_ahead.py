"""Asks the system to read the files of a checkpoint into the page cache before they are needed: a file that is
opened, and the one after it. The disk then works in parallel with the loader, with many requests at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path


class ReadAhead:
    """Takes the files in the order in which they are read. Each is asked for once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._asked: set[Path] = set()

    def opened(self, file: Path) -> None:
        if not hasattr(os, "posix_fadvise") or file not in self._files:
            return
        index = self._files.index(file)
        wanted = [each for each in self._files[index : index + 2] if each not in self._asked]
        self._asked.update(wanted)
        if wanted:  # the call waits where the disk's queue is full
            threading.Thread(target=_ask_for, args=(wanted,), name="read-ahead", daemon=True).start()


def _ask_for(files: Sequence[Path]) -> None:
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            return  # the loader says what is wrong with the file
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # some file systems know no hints
        finally:
            os.close(descriptor)
