"""Processes that are copies of one process, which has imported all that ranks and engines need: the imports take
seconds of a core. What the copies leave out, the start of Python itself, is left to a few tests that start engines
and ranks as a server does."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, arbitrary_address, wait
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from penstock.cluster.early import WORKER
from penstock.cluster.local import LocalLauncher, _StartedProcess
from penstock.core.engine_config import EngineConfig

RANK = "penstock.engine.parallel.rank"
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, WORKER, RANK, "tests.engine.parallel.scenario"])
OUTPUT = (1, 2)  # file numbers
# The exit code of a process can be read once. Starting a process asks for the exit codes of all others, too.
_bookkeeping = threading.Lock()


def copy_from_here() -> None:
    """Fork the process that is copied from this one, which has imported all tests and has no threads: processes that
    are forked from this one then share it. Each would start one of its own, which imports everything again."""
    server: Any = multiprocessing.forkserver._forkserver
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        server._forkserver_address = arbitrary_address("AF_UNIX")
        listener.bind(server._forkserver_address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()  # it ends when nobody has the other end
        if os.fork() == 0:
            try:
                os.close(server._forkserver_alive_fd)
                multiprocessing.forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
        os.close(alive)
    server.ensure_running = lambda: None  # would look for a child of the process that asks


class Copy:
    """`python -m MODULE ARGUMENTS`, with the part of subprocess's Popen that is used by those who start one."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        standard_input: bytes = b"",
    ) -> None:
        """The numbers of passed files are the last arguments."""
        passed = [Connection(os.dup(number)) for number in (*OUTPUT, *pass_fds)]
        arguments = arguments[: len(arguments) - len(pass_fds)]
        self._process = CONTEXT.Process(
            target=_run,
            args=(module, arguments, passed, standard_input, dict(os.environ)),
            daemon=True,
        )
        with _bookkeeping:
            self._process.start()
        for connection in passed:
            connection.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        wait([self._process.sentinel])
        with _bookkeeping:
            self._process.join()
            assert self._process.exitcode is not None
            return self._process.exitcode


class CopyingLauncher(LocalLauncher):
    """Launches engines as copies."""

    async def _start(self, arguments: list[str], config: EngineConfig) -> _StartedProcess:
        engine: Any = Copy(WORKER, arguments, standard_input=msgspec.json.encode(config))
        return _StartedProcess(engine)


@contextmanager
def copied_ranks() -> Iterator[None]:
    """Start the ranks of engines as copies."""

    def start(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Copy:
        assert list(command[:3]) == [sys.executable, "-m", RANK]
        return Copy(RANK, command[3:], pass_fds=pass_fds)

    started = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    with patch("penstock.engine.parallel.processes.subprocess", started):
        yield


def _run(
    module: str,
    arguments: Sequence[str],
    passed: Sequence[Connection],
    standard_input: bytes,
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, connection in zip(OUTPUT, passed, strict=False):
        os.dup2(connection.fileno(), number)
    numbers = [os.dup(connection.fileno()) for connection in passed[len(OUTPUT) :]]
    for connection in passed:
        connection.close()
    sys.stdin = io.TextIOWrapper(io.BytesIO(standard_input))
    if module == WORKER:
        parallel = msgspec.json.decode(standard_input, type=EngineConfig).parallel
        waiting = iter([_WaitingRank() for _ in range(1, parallel.num_ranks)])
        started = SimpleNamespace(Popen=lambda _, **given: next(waiting).start(**given), DEVNULL=None)
        import_module("penstock.engine.parallel.processes").subprocess = started  # type: ignore[attr-defined]
        arguments = [*arguments, "--parent-pid", str(os.getppid())]
    sys.exit(_main(module, [*arguments, *map(str, numbers)]))


def _main(module: str, arguments: Sequence[str]) -> int:
    sys.argv = [module, *arguments]
    return int(import_module(module).main())


class _WaitingRank:
    """A rank of an engine that is a copy itself. It is forked before the engine has threads, and waits for its
    files."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._code: int | None = None
        self._waiting = threading.Lock()
        self.pid = os.fork()
        if self.pid != 0:
            theirs.close()
            return
        code = 1
        try:
            self._ours.close()
            _, numbers, *_ = socket.recv_fds(theirs, 1, 2)
            code = _main(RANK, list(map(str, numbers))) if numbers else 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def start(self, *, pass_fds: Sequence[int], **_: Any) -> _WaitingRank:
        socket.send_fds(self._ours, [b"."], pass_fds)
        return self

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._waiting:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._code
