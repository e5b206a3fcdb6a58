"""`pytest --workers N` runs tests in N processes, which are forked once one process has imported and collected all
tests: that takes twenty seconds of a core. A worker takes whole files, so that the fixtures of a module are built
once. It sends its results to the process that collected, which reports them."""

from __future__ import annotations

import atexit
import gc
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from warnings import WarningMessage

import pytest

FORK = get_context("fork")
# A worker that is told to end tears down its fixtures first, for example servers.
END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Result:
    """What became of the test with this number."""

    number: int
    reports: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection
    prefers_waiting: bool = False
    assigned: deque[int] = field(default_factory=deque)  # the first of them runs


class Workers:
    """The collecting process's side: assigns files, and reports results."""

    def __init__(
        self,
        session: pytest.Session,
        count: int,
        together: Sequence[str] = (),
        begin: Callable[[], None] = lambda: None,
        waits: Callable[[str], bool] = lambda file: False,
    ) -> None:
        """One worker takes all of the files in `together`. Each worker calls `begin` first. Every second worker
        takes files that mostly wait for processes first, and the others take those last, so that the cores always
        have work."""
        self._session = session
        self._count = count
        self._begin = begin
        groups: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            file = item.nodeid.partition("::")[0]
            groups.setdefault(together[0] if file in together else file, []).append(number)
        # Files that mostly wait for processes, and those that compute.
        self._queues: dict[bool, deque[list[int]]] = {True: deque(), False: deque()}
        for file, numbers in groups.items():
            self._queues[waits(file)].append(numbers)
        self._workers: dict[Connection, Worker] = {}
        self._num_started = 0

    def run(self) -> bool:
        try:
            for _ in range(min(self._count, sum(map(len, self._queues.values())))):
                self._start()
            while self._workers:
                for connection in wait(list(self._workers)):
                    self._hear(self._workers[cast(Connection, connection)])
                if self._session.shouldfail or self._session.shouldstop:
                    break
        finally:
            self._end_all()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)
        return True

    def _start(self) -> None:
        ours, theirs = FORK.Pipe()
        folder = self._session.config._tmp_path_factory.getbasetemp() / f"worker{self._num_started}"  # type: ignore[attr-defined]
        folder.mkdir(mode=0o700)
        self._num_started += 1
        others = [ours, *self._workers]
        num_waiting = sum(worker.prefers_waiting for worker in self._workers.values())

        def work() -> None:
            for each in others:
                each.close()
            self._begin()
            _work(self._session, theirs, folder)

        process = FORK.Process(target=work)
        process.start()
        theirs.close()
        self._workers[ours] = Worker(process, ours, prefers_waiting=2 * num_waiting < len(self._workers))

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
            if message is None:  # it is about to run the last of its tests
                numbers = self._next_file(worker.prefers_waiting)
                worker.assigned.extend(numbers)
                worker.connection.send(numbers)
            else:
                assert worker.assigned.popleft() == message.number
                self._report(message)
        except (EOFError, ConnectionError):
            self._remove(worker)

    def _next_file(self, prefers_waiting: bool) -> list[int]:
        queue = self._queues[prefers_waiting] or self._queues[not prefers_waiting]
        return queue.popleft() if queue else []

    def _report(self, result: Result) -> None:
        hook = self._session.config.hook
        item = self._session.items[result.number]
        for each in result.warnings:
            hook.pytest_warning_recorded.call_historic(kwargs=each)
        for data in result.reports:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _remove(self, worker: Worker) -> None:
        """After its last test, or because it died: another worker then takes what is left of its files."""
        del self._workers[worker.connection]
        worker.connection.close()
        worker.process.join()
        if not worker.assigned:
            if worker.process.exitcode != 0:
                raise RuntimeError(f"a worker ended with code {worker.process.exitcode}")
            return
        item = self._session.items[worker.assigned.popleft()]
        problem = f"the worker ended with code {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", problem, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if worker.assigned:
            self._queues[worker.prefers_waiting].appendleft(list(worker.assigned))
        self._start()

    def _end_all(self) -> None:
        for connection in self._workers:
            connection.close()
        for worker in self._workers.values():
            worker.process.join(END_TIMEOUT_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


class _Results:
    """Collects what becomes of the test that runs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = WarningMessage(
            UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
        )
        self._warnings.append(
            {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        )

    def take(self, number: int) -> Result:
        result = Result(number, self._reports, self._warnings)
        self._reports, self._warnings = [], []
        return result


def _work(session: pytest.Session, connection: Connection, folder: Path) -> None:
    """The worker's side. It ends when it has no more tests, or when the other side closes the connection."""
    atexit._clear()  # those of the process that collected
    _separate(session.config, folder)
    results = _Results(session.config)
    session.config.pluginmanager.register(results)
    try:
        with suppress(EOFError, ConnectionError, KeyboardInterrupt):
            numbers = _assigned(connection)
            number = next(numbers, None)
            while number is not None:
                following = next(numbers, None)  # tells pytest which fixtures the next test needs
                item = session.items[number]
                next_item = None if following is None else session.items[following]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                connection.send(results.take(number))
                number = following
    finally:
        session._setupstate.teardown_exact(None)
        gc.unfreeze()  # native libraries report what is still alive after that
        atexit._run_exitfuncs()


def _assigned(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(None)
        numbers = connection.recv()
        if not numbers:
            return
        yield from numbers


def _separate(config: pytest.Config, folder: Path) -> None:
    """Share neither temporary folders nor files of captured output with other workers, and print nothing."""
    manager = config.pluginmanager
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    manager.getplugin("terminalreporter")._tw._file = io.StringIO()
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
