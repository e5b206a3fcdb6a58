"""Runs the other ranks of an engine as child processes. Imports no torch.

A rank that ends takes the engine with it, because its part of every step is lost. No rank outlives the engine: each
rank dies with its parent, and leaves when its connection closes.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import EngineUnavailable, PenstockError, error_from_code
from penstock.core.log_format import JsonFormatter
from penstock.engine.parallel.messages import (
    Begin,
    Failed,
    Leave,
    Present,
    Sampled,
    ToRank,
    decode_from_rank,
    encode,
)

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0  # how long after a lost connection the reason may still arrive
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection


def rank_config(config: EngineConfig) -> EngineConfig:
    """Return the config of every rank, with its share of the cores."""
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    return msgspec.structs.replace(config, num_threads=max(1, num_threads // config.parallel.num_ranks))


class RankProcesses:
    """Runs ranks 1 and up; the caller's process is rank 0."""

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        # Only this user can enter the folder in which the ranks find each other.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self.meeting_place = self._folder / "store"
        self.sampled: queue.SimpleQueue[Sampled | None] = queue.SimpleQueue()  # None: look at `failure`
        self.failure: PenstockError | None = None
        self._failed = threading.Event()
        self._is_closing = False
        self._present = threading.Semaphore(0)
        self._num_ranks = config.parallel.num_ranks
        root = logging.getLogger()
        is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
        self._children = tuple(self._start(rank) for rank in range(1, self._num_ranks))
        for child in self._children:
            begin = Begin(
                rank=child.rank,
                config=config,
                model_path=str(model_path),
                meeting_place=str(self.meeting_place),
                log_level=root.getEffectiveLevel(),
                log_format="json" if is_json else "text",
            )
            self._send(child, encode(begin))
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._listener.start()

    @property
    def pids(self) -> Sequence[int]:
        return [child.process.pid for child in self._children]

    def wait_until_present(self) -> None:
        """Wait until every rank is about to meet the others."""
        for _ in self._children:
            self._present.acquire()
        self.check()

    def tell(self, message: ToRank) -> None:
        data = encode(message)
        for child in self._children:
            self._send(child, data)

    def check(self) -> None:
        """Raise the reason when a rank has gone."""
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the reason why a rank has gone, if common work of the ranks fails because of that."""
        try:
            yield
        except (RuntimeError, OSError):
            self._failed.wait(_LAST_WORDS_S)
            self.check()
            raise

    def close(self) -> None:
        """Let the ranks leave after their last step, or kill them if one has failed: the others may never end their
        step."""
        self._is_closing = True
        if self.failure is None:
            for child in self._children:
                self._send(child, encode(Leave()))
            for child in self._children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(_LEAVE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        self._is_closing = True
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
        self._listener.join()
        for child in self._children:
            child.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> _Child:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "penstock.engine.parallel.rank", str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        return _Child(rank, process, ours)

    def _send(self, child: _Child, data: bytes) -> None:
        try:
            child.connection.send_bytes(data)
        except OSError:
            if not self._is_closing:
                self._failed.wait(_LAST_WORDS_S)
                self.check()
                raise

    def _listen(self) -> None:
        """Handle messages, in a thread of its own, until the last rank has gone."""
        children = {child.connection: child for child in self._children}
        while children:
            for ready in wait(list(children)):
                assert isinstance(ready, Connection)
                try:
                    message = decode_from_rank(ready.recv_bytes())
                except (EOFError, OSError):
                    self._lost(children.pop(ready))
                    continue
                match message:
                    case Present():
                        self._present.release()
                    case Sampled():
                        self.sampled.put(message)
                    case Failed(code=code, message=sentence, hint=hint):
                        error = error_from_code(code, sentence)
                        error.hint = hint
                        self._fail(error)

    def _lost(self, child: _Child) -> None:
        if self._is_closing:
            return
        code = child.process.wait()
        ended = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        sentence = f"Rank {child.rank} of {self._num_ranks} (process {child.process.pid}) ended {ended}."
        logger.error("%s", sentence)
        self._fail(EngineUnavailable(sentence, retry_after_s=5.0))

    def _fail(self, error: PenstockError) -> None:
        if self.failure is None:  # later failures follow from the first
            self.failure = error
            self._failed.set()
        self.sampled.put(None)
        for _ in self._children:
            self._present.release()
