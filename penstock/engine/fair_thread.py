"""One thread that works for several tenants in turns, a step of one job at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class FairThread(Generic[T]):
    """A job is a generator: each step ends with a `yield`, and the job's result is what the generator returns. The
    jobs of a tenant go one after the other, in the order of `submit`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: dict[
            str, deque[_Job[T]]
        ] = {}  # of jobs, by tenant; the tenant whose turn is next comes first

    def submit(self, tenant: str, steps: Generator[None, None, T]) -> Future[T]:
        job = _Job(steps)
        with self._lock:
            self._lines.setdefault(tenant, deque()).append(job)
        self._thread.submit(self._take_turn)
        return job.result

    def close(self) -> None:
        with self._lock:
            self._lines.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_turn(self) -> None:
        """Do one step of the first job of the tenant whose turn it is."""
        with self._lock:
            tenant = next(iter(self._lines), None)
            if tenant is None:
                return
            line = self._lines[tenant]
            job = line[0]
        is_over = job.step()
        with self._lock:
            if self._lines.pop(tenant, None) is None:  # closed meanwhile
                return
            if is_over:
                line.popleft()
            if line:
                self._lines[tenant] = line
        if not is_over:
            with suppress(RuntimeError):  # closed meanwhile
                self._thread.submit(self._take_turn)


class _Job(Generic[T]):
    def __init__(self, steps: Generator[None, None, T]) -> None:
        self.result: Future[T] = Future()
        self._steps = steps
        self._is_begun = False

    def step(self) -> bool:
        """Do the next step. Returns whether the job is over."""
        if not self._is_begun and not self.result.set_running_or_notify_cancel():
            return True
        self._is_begun = True
        try:
            next(self._steps)
        except StopIteration as end:
            self.result.set_result(end.value)
        except BaseException as error:
            self.result.set_exception(error)
        else:
            return False
        return True
