from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError

import pytest

from penstock.engine.images import FairThread


@pytest.fixture
def thread() -> Iterator[FairThread[str]]:
    thread: FairThread[str] = FairThread("fair")
    yield thread
    thread.close()


class Log:
    """The steps of all jobs, in order. Jobs wait until `go` is set."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Event()

    def job(self, name: str, num_steps: int) -> Generator[None, None, str]:
        for step in range(num_steps):
            assert self.go.wait(60)
            self.done.append(f"{name}{step}")
            yield
        return name


def test_tenants_have_turns_and_jobs_of_a_tenant_go_in_order(thread: FairThread[str]) -> None:
    log = Log()
    jobs = [
        thread.submit(tenant, log.job(name, num_steps))
        for tenant, name, num_steps in (
            ("greedy", "a", 3),
            ("greedy", "b", 2),
            ("late", "c", 2),
            ("late", "d", 0),
        )
    ]
    log.go.set()
    assert [job.result(60) for job in jobs] == ["a", "b", "c", "d"]
    assert log.done[:4] == ["a0", "c0", "a1", "c1"]
    assert [step for step in log.done if step[0] in "ab"] == ["a0", "a1", "a2", "b0", "b1"]


def test_cancelled_and_failing_jobs_keep_no_other_waiting(thread: FairThread[str]) -> None:
    log = Log()

    def failing() -> Generator[None, None, str]:
        yield
        raise ValueError("odd image")

    first = thread.submit("a", log.job("first", 1))
    cancelled = thread.submit("a", log.job("cancelled", 1))
    failed = thread.submit("a", failing())
    last = thread.submit("b", log.job("last", 1))
    assert cancelled.cancel()
    log.go.set()
    assert (first.result(60), last.result(60)) == ("first", "last")
    with pytest.raises(ValueError, match="odd image"):
        failed.result(60)
    with pytest.raises(CancelledError):
        cancelled.result(60)
    assert "cancelled0" not in log.done


def test_jobs_end_with_the_thread(thread: FairThread[str]) -> None:
    log = Log()
    thread.submit("a", log.job("a", 2))
    waiting = thread.submit("b", log.job("b", 1))
    thread.close()
    log.go.set()
    assert not waiting.done()
