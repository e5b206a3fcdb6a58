"""Batches from their first line to their output: the ordinary way, the early endings, and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from penstock.core.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
)
from penstock.core.errors import RateLimited as TooFast
from penstock.gateway.batches import store as batch_store
from penstock.gateway.batches.batch import MAX_BLANK_LINES, BatchLine, BatchStatus
from penstock.gateway.batches.run import Backoff, BatchRun, _next_lines
from penstock.gateway.batches.runner import MAX_RUNS_OF_WORKSPACE, BatchRunner, StoredWork
from penstock.gateway.store import tables
from penstock.gateway.store.database import Database
from tests.gateway.batches.scripted import ScriptedDialect, Server, Wall

_OWNERS = ("organizations", "workspaces")
TEXTS = [f"line-{number}" for number in range(1, 21)]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path, Database("sqlite://"), Wall())
    yield server
    await server.runner.stop()


def hold(server: Server, after: int) -> asyncio.Event:
    """Lines beyond the first `after` wait for the event."""
    released = asyncio.Event()
    num_answered = 0

    async def script(line: BatchLine) -> bytes:
        nonlocal num_answered
        num_answered += 1
        if num_answered > after:
            await released.wait()
        return line.body

    server.dialect.script = script
    return released


async def test_every_line_is_answered_in_order(server: Server) -> None:
    await server.hand_in(list(TEXTS))
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts.lines == batch.counts.succeeded == 20
    assert server.output(batch) == [[n, text, "succeeded", text] for n, text in enumerate(TEXTS, 1)]
    assert batch.details.error_file_id is None
    assert list(batch.times) == ["completed", "finalizing", "in_progress"]
    assert server.dialect.most_in_flight <= 4
    assert set(server.dialect.asked.values()) == {1}


async def test_the_output_is_a_file_of_the_workspace(server: Server) -> None:
    await server.hand_in(["a"])
    server.runner.start()
    batch = await server.until_over()
    assert batch.details.output_file_id is not None
    file = await server.files.get("w1", batch.details.output_file_id)
    assert file.purpose == "batch_output"
    assert file.num_bytes == server.files.blobs.path(file.id).stat().st_size
    assert not server.files.blobs.exists(batch.input_id)
    with pytest.raises(NotFound):
        await server.files.get("w2", file.id)
    with pytest.raises(NotFound):
        await server.store.get("w2", batch.id, "scripted")
    with pytest.raises(NotFound):
        await server.store.get("w1", batch.id, "another kind")


async def test_a_line_that_fails_spoils_no_other(server: Server) -> None:
    async def script(line: BatchLine) -> bytes:
        if line.custom_id == "line-3":
            raise InvalidRequest("No.")
        if line.custom_id == "line-4":
            raise QuotaExceeded("Spent.")
        if line.custom_id == "line-5":
            raise RuntimeError("a bug")
        return line.body

    server.dialect.script = script
    await server.hand_in(list(TEXTS))
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.counts.succeeded, batch.counts.errored) == (17, 3)
    assert [line[0] for line in server.output(batch, "error")] == [3, 4, 5]
    assert server.output(batch, "error")[0] == [3, "line-3", "errored", "No."]
    assert "a bug" not in str(server.output(batch, "error")[2])


@pytest.mark.parametrize("error", [EngineUnavailable("Not yet."), TooFast("Slowly.", retry_after_s=0.01)])
async def test_what_passes_is_tried_again(
    server: Server, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.batches.run._MIN_WAIT_S", 0.001)

    async def script(line: BatchLine) -> bytes:
        if line.custom_id == "b" and server.dialect.asked["b"] < 3:
            raise error
        return line.body

    server.dialect.script = script
    await server.hand_in(["a", "b", "c"])
    server.runner.start()
    batch = await server.until_over()
    assert batch.counts.succeeded == 3
    assert server.dialect.asked == {"a": 1, "b": 3, "c": 1}
    assert server.runner.metrics.retries == 2
    assert server.runner.metrics.lines == {"succeeded": 3, "errored": 0}


async def test_a_refused_batch_pauses_as_a_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand lines meet a rate limit: the batch tries as many as it has slots, then waits once for all."""
    monkeypatch.setattr("penstock.gateway.batches.run._MIN_WAIT_S", 0.02)
    is_limited = True
    most_tasks = 0

    async def script(line: BatchLine) -> bytes:
        nonlocal most_tasks
        most_tasks = max(most_tasks, len(asyncio.all_tasks()))
        if is_limited:
            raise TooFast("Slowly.")
        return line.body

    server.dialect.script = script
    await server.hand_in([f"{number}" for number in range(1000)])
    server.runner.start()
    async with asyncio.timeout(60):
        while server.runner.metrics.retries < 13:  # several waves
            await asyncio.sleep(0.002)
    assert len(server.dialect.asked) <= 5  # the same few lines again, and the one that the feeder holds
    is_limited = False
    batch = await server.until_over()
    assert batch.counts.succeeded == 1000
    assert most_tasks < 16


async def test_a_line_refused_while_the_end_of_the_file_is_read_runs_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.batches.run._MIN_WAIT_S", 0.001)
    refused = asyncio.Event()
    read_lines = BatchRun._pending_lines

    async def slow_to_end(run: BatchRun, recorded: set[int]) -> AsyncIterator[BatchLine]:
        async for line in read_lines(run, recorded):
            yield line
        await refused.wait()
        while run._in_flight:
            await asyncio.sleep(0)

    async def script(line: BatchLine) -> bytes:
        if refused.is_set():
            return line.body
        refused.set()
        raise TooFast("Slowly.")

    monkeypatch.setattr(BatchRun, "_pending_lines", slow_to_end)
    server.dialect.script = script
    await server.hand_in(["a"])
    server.runner.start()
    assert (await server.until_over()).counts.succeeded == 1


async def test_pauses_double_until_a_line_succeeds() -> None:
    loop, backoff = asyncio.get_running_loop(), Backoff()
    now, clock = 100.0, loop.time
    loop.time = lambda: now  # type: ignore[method-assign]
    try:
        waits = []
        for at_least_s in (0.0, 0.0, 0.0, 60.0):
            backoff.begin(at_least_s)
            backoff.begin(0.0)  # of the same wave
            start = now
            while backoff.is_on():
                now += 0.25
            waits.append(now - start)
        assert waits == [0.5, 1.0, 2.0, 60.0]
        backoff.reset()
        backoff.begin(0.0)
        now += 0.5
        assert not backoff.is_on()
    finally:
        loop.time = clock  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        ([b"", b"  "], "empty_file", None),
        (["a", b"{", "b"], "invalid_line", 2),
        (["a", "b", "a"], "duplicate_custom_id", 3),
        ([f"{number}" for number in range(1001)], "too_many_lines", 1001),
        (["a", b"\n" * MAX_BLANK_LINES], "too_many_lines", None),
    ],
)
async def test_a_batch_that_is_not_valid_fails_whole(
    server: Server, lines: list[str | bytes], code: str, number: int | None
) -> None:
    await server.hand_in(lines)
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.FAILED
    assert [(error.code, error.line) for error in batch.details.errors] == [(code, number)]
    assert not server.dialect.asked
    assert not server.files.blobs.exists(batch.input_id)


async def test_a_batch_whose_lines_are_gone_fails(server: Server) -> None:
    batch = await server.hand_in(["a"])
    server.files.blobs.remove(batch.input_id)
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.details.errors] == ["input_gone"]


async def test_a_batch_with_a_line_that_no_run_can_read_fails(server: Server) -> None:
    """It was found to be valid when it came, and nobody would gain by reading it again and again."""
    batch = await server.hand_in(["a", b"no JSON"], status=BatchStatus.IN_PROGRESS)
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.FAILED
    assert [(error.code, error.message) for error in batch.details.errors] == [
        ("invalid_line", "This line is not JSON.")
    ]


async def test_a_cancelled_batch_whose_lines_are_gone(tmp_path: Path) -> None:
    database, wall = Database("sqlite://"), Wall()
    first = Server(tmp_path, database, wall)
    hold(first, after=1)
    batch = await first.hand_in(["a", "b"])
    first.runner.start()
    await first.until(lambda batch: batch.counts.succeeded == 1)
    await first.runner.stop()
    await first.store.cancel("w1", "batch_1", "scripted")
    first.files.blobs.remove(batch.input_id)
    second = Server(tmp_path, database, wall)
    second.runner.start()
    assert (await second.until_over()).status is BatchStatus.CANCELLED
    await second.runner.stop()


async def test_what_is_over_stays_over(server: Server) -> None:
    """A runner that saw the batch before its end must not run it again."""
    seen = await server.hand_in(["a"])
    server.runner.start()
    over = await server.until_over()
    server.runner._begin(seen)
    await server.until_true(lambda: not server.runner.num_running)
    assert await server.get() == over
    assert server.dialect.asked == {"a": 1}


async def test_blank_lines_do_not_count(server: Server) -> None:
    await server.hand_in(["a", b"", "b"])
    server.runner.start()
    assert [line[0] for line in server.output(await server.until_over())] == [1, 2]


async def test_cancelling_lets_lines_in_flight_finish(server: Server) -> None:
    released = hold(server, after=6)
    await server.hand_in(list(TEXTS))
    server.runner.start()
    await server.until(lambda batch: batch.counts.succeeded == 6)
    assert (await server.store.cancel("w1", "batch_1", "scripted")).status is BatchStatus.CANCELLING
    assert (await server.store.cancel("w1", "batch_1", "scripted")).status is BatchStatus.CANCELLING
    await server.looked()
    assert (await server.get()).status is BatchStatus.CANCELLING
    assert server.dialect.in_flight == 4
    released.set()
    batch = await server.until_over()
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.counts.succeeded, batch.counts.canceled) == (10, 10)
    assert len(server.output(batch)) == 10
    assert {line[2] for line in server.output(batch, "error")} == {"canceled"}
    with pytest.raises(Conflict):
        await server.store.cancel("w1", "batch_1", "scripted")


@pytest.mark.parametrize("archived", ["organizations", "workspaces"])
async def test_a_batch_of_an_archived_workspace_is_cancelled(server: Server, archived: str) -> None:
    """Its keys are dead with it, so nobody else could cancel the batch."""
    released = hold(server, after=6)
    await server.hand_in(list(TEXTS))
    owner = {"name": "w", "created_at": 0.0, "revision": 1}

    def archive(connection: Connection) -> None:
        times = {name: {"archived_at": 1.0 if name == archived else None} for name in _OWNERS}
        connection.execute(tables.organizations.insert().values(id="o1", **owner, **times["organizations"]))
        connection.execute(
            tables.workspaces.insert().values(id="w1", organization_id="o1", **owner, **times["workspaces"])
        )

    server.runner.start()
    await server.until(lambda batch: batch.counts.succeeded == 6)
    await server.database.run(archive)
    await server.looked()
    released.set()
    batch = await server.until_over()
    assert batch.status is BatchStatus.CANCELLED
    assert (batch.counts.succeeded, batch.counts.canceled) == (10, 10)


async def test_an_expired_batch_keeps_what_it_has(server: Server) -> None:
    hold(server, after=6)
    await server.hand_in(list(TEXTS))
    server.runner.start()
    await server.until(lambda batch: batch.counts.succeeded == 6)
    server.wall.now += 25 * 3600
    batch = await server.until_over()
    assert batch.status is BatchStatus.EXPIRED
    assert (batch.counts.succeeded, batch.counts.expired) == (6, 14)
    assert server.dialect.in_flight == 0


async def test_a_batch_cancelled_before_it_was_validated(server: Server) -> None:
    await server.hand_in([b"not json"])
    await server.store.cancel("w1", "batch_1", "scripted")
    server.runner.start()
    batch = await server.until_over()
    assert batch.status is BatchStatus.CANCELLED
    assert batch.counts.lines == 0


async def test_batches_share_the_slots(server: Server) -> None:
    released = hold(server, after=0)
    await server.hand_in(list(TEXTS), "batch_1")
    await server.hand_in(list(TEXTS), "batch_2")
    server.runner.start()
    await server.until_true(lambda: server.dialect.in_flight == 4)
    released.set()
    await server.until_over("batch_1")
    assert server.dialect.most_in_flight == 4


async def test_a_workspace_with_many_batches_leaves_room_to_others(server: Server) -> None:
    released = hold(server, after=0)
    for number in range(MAX_RUNS_OF_WORKSPACE + 4):
        await server.hand_in(["a", "b"], f"batch_{number}")
    await server.hand_in(["c"], "batch_other", workspace_id="w2")
    server.runner.start()
    await server.looked()
    assert server.runner.num_running == MAX_RUNS_OF_WORKSPACE + 1
    last = f"batch_{MAX_RUNS_OF_WORKSPACE + 3}"
    await server.store.cancel("w1", last, "scripted")
    await server.until(lambda batch: batch.status is BatchStatus.CANCELLED, last)
    released.set()
    await server.until_over()
    for number in range(MAX_RUNS_OF_WORKSPACE + 3):
        assert (await server.get(f"batch_{number}")).status is BatchStatus.COMPLETED
    other = await server.store.get("w2", "batch_other", "scripted")
    assert other.status is BatchStatus.COMPLETED


async def test_a_workspace_cannot_hand_in_batches_without_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_ACTIVE", 2)
    for number in range(2):
        await server.hand_in(["a"], f"batch_{number}")
    with pytest.raises(TooFast, match="2 batches that are not over"):
        await server.hand_in(["a"], "batch_2")
    await server.hand_in(["a"], "batch_3", workspace_id="w2")
    server.runner.start()
    await server.until_over("batch_0")
    await server.until_over("batch_1")
    await server.hand_in(["a"], "batch_2")


def test_few_large_lines_are_read_at_once() -> None:
    small, large = BatchLine(1, "s", b"{}"), BatchLine(2, "l", bytes(600 << 10))
    lines = iter([small] * 200 + [large] * 5)
    assert [len(_next_lines(lines)) for _ in range(5)] == [128, 74, 2, 1, 0]


async def test_a_pause_records_what_is_in_flight_and_leaves_the_rest(tmp_path: Path) -> None:
    database, wall = Database("sqlite://"), Wall()
    first = Server(tmp_path, database, wall)
    released = hold(first, after=6)
    await first.hand_in(list(TEXTS))
    first.runner.start()
    await first.until(lambda batch: batch.counts.succeeded == 6 and first.dialect.in_flight == 4)
    stopping = asyncio.create_task(first.runner.stop(timeout_s=60))
    await asyncio.sleep(0)  # runs the first step of `stop`, which pauses the batch
    released.set()
    await stopping
    assert (await first.get()).counts.succeeded == 10
    assert (await first.get()).status is BatchStatus.IN_PROGRESS
    second = Server(tmp_path, database, wall)  # the lease was given back: it need not wait
    second.runner.start()
    batch = await second.until_over()
    assert batch.counts.succeeded == 20
    assert [line[0] for line in second.output(batch)] == list(range(1, 21))
    assert not first.dialect.asked & second.dialect.asked
    await second.runner.stop()


async def test_the_lines_of_a_batch_that_cannot_be_recorded_are_removed(server: Server) -> None:
    batch = await server.hand_in(["a"])
    work = StoredWork(server.database, server.files.blobs)
    with pytest.raises(IntegrityError):
        await work.add(batch)  # a second time
    assert not server.files.blobs.exists(batch.input_id)


async def test_a_database_that_is_away_is_told_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> bool:
        raise StoreUnavailable("away")

    await server.hand_in(["line-1"])
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "take_lease", fail)
        server.runner.start()
        await server.until_true(lambda: server.store.num_asked >= 4)
    assert (await server.until_over()).status is BatchStatus.COMPLETED
    assert [each.message for each in caplog.records] == ["batches wait: away"]


async def test_only_the_holder_of_the_lease_runs(tmp_path: Path) -> None:
    database, wall = Database("sqlite://"), Wall()
    first, second = Server(tmp_path, database, wall), Server(tmp_path, database, wall)
    released = hold(first, after=3)
    await first.hand_in(list(TEXTS))
    first.runner.start()
    await first.until(lambda batch: batch.counts.succeeded == 3)
    second.runner.start()
    await second.looked()
    assert not second.dialect.asked
    assert not second.runner.num_running
    released.set()
    await first.until_over()
    assert not second.dialect.asked
    await first.runner.stop()
    await second.runner.stop()


async def test_a_process_that_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    """A process stalls, another takes over and finishes; then the first wakes up with its old answers."""
    database, wall = Database("sqlite://"), Wall()
    first, second = Server(tmp_path, database, wall), Server(tmp_path, database, wall)
    released = hold(first, after=3)
    await first.hand_in(list(TEXTS))
    first.runner.start()
    await first.until(lambda batch: batch.counts.succeeded == 3)
    first.stall()
    wall.now += 31
    second.runner.start()
    batch = await second.until_over()
    assert batch.counts.succeeded == 20
    assert first.dialect.in_flight == 4
    released.set()
    await first.until_true(lambda: not first.dialect.in_flight and not first.runner.num_running)
    assert (await second.get()).counts == batch.counts
    assert await second.store.recorded_lines("batch_1") == set()
    await first.runner.stop()
    await second.runner.stop()


async def test_nothing_is_written_while_nothing_is_used(tmp_path: Path) -> None:
    server = Server(tmp_path, Database(f"sqlite:///{tmp_path / 'penstock.db'}"), Wall())
    server.runner.start()
    await server.until_true(lambda: server.store.num_asked >= 3)
    await server.runner.stop()
    assert list(tmp_path.iterdir()) == []


async def test_one_results_file_that_the_workspace_does_not_list(tmp_path: Path) -> None:
    dialect = ScriptedDialect(lists_output_files=False)
    server = Server(tmp_path, Database("sqlite://"), Wall(), dialect)
    await server.hand_in(["a", "b"])
    server.runner.start()
    batch = await server.until_over()
    assert (await server.files.page("w1")).files == []
    assert len(server.files.blobs.path(batch.results_id).read_bytes().splitlines()) == 2
    await server.runner.stop()


def test_a_clock_that_is_set_back_postpones_no_sweep() -> None:
    runner = BatchRunner.__new__(BatchRunner)
    runner._wall_clock = lambda: 1000.0
    assert [runner._is_due(at, 60.0) for at in (990.0, 1000.0, 1030.0, 1060.0, 1061.0, 90_000.0)] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
