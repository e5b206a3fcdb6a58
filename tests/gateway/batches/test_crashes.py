"""Whenever a process dies, no line is lost and none is answered twice in the output."""

from __future__ import annotations

import asyncio
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest
from penstock.gateway.batches.batch import BatchLine, BatchStatus, LineResult
from penstock.gateway.batches.store import BatchStore, LeaseLost
from penstock.gateway.store.database import Database
from tests.gateway.batches.scripted import ScriptedDialect, Server, Wall

NUM_LINES = 15


def flaky(seed: int) -> ScriptedDialect:
    """Lines end in an order of their own, and every fifth is refused."""
    chance = random.Random(seed)

    async def script(line: BatchLine) -> bytes:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if line.number % 5 == 0:
            raise InvalidRequest("No.")
        return line.body

    return ScriptedDialect(script)


@settings(max_examples=15, deadline=None)
@given(
    kill_points=st.lists(st.integers(0, 60), max_size=4),
    cancels_after=st.none() | st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_every_line_ends_exactly_once(kill_points: list[int], cancels_after: int | None, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_survive(Path(folder), kill_points, cancels_after, seed))


async def _survive(folder: Path, kill_points: list[int], cancels_after: int | None, seed: int) -> None:
    database, wall = Database("sqlite://"), Wall()
    database._threads = threads = ThreadPoolExecutor(1)  # one thread for everything that is written
    asyncio.get_running_loop().set_default_executor(threads)
    texts = [f"line-{number}" for number in range(1, NUM_LINES + 1)]
    await Server(folder, database, wall).hand_in(list(texts))
    for life, num_turns in enumerate(kill_points):
        server = Server(folder, database, wall, flaky(seed + life))
        recorded = await server.store.recorded_lines("batch_1")
        if cancels_after == life and (await server.get()).status in ("validating", "in_progress"):
            await server.store.cancel("w1", "batch_1", "scripted")
        server.runner.start()
        for _ in range(num_turns):
            await asyncio.sleep(0.0005)
        await server.kill()
        await asyncio.to_thread(lambda: None)  # what the thread was writing is written
        assert not {f"line-{number}" for number in recorded} & server.dialect.asked.keys()
        wall.now += 31  # until the dead process's lease is over
    survivor = Server(folder, database, wall, flaky(seed))
    survivor.runner.start()
    batch = await survivor.until_over()
    await survivor.runner.stop()
    lines = survivor.output(batch) + survivor.output(batch, "error")
    counts = batch.counts
    if batch.status is BatchStatus.CANCELLED and not counts.lines:
        assert lines == []  # cancelled before it was validated
        return
    assert sorted(line[0] for line in lines) == list(range(1, NUM_LINES + 1))  # type: ignore[type-var]
    assert counts.lines == counts.recorded == NUM_LINES
    for number, custom_id, outcome, body in lines:
        assert custom_id == f"line-{number}"
        if outcome == "succeeded":
            assert body == custom_id
        elif outcome == "errored":
            assert number % 5 == 0  # type: ignore[operator]
        else:
            assert batch.status is BatchStatus.CANCELLED
    if batch.status is BatchStatus.COMPLETED:
        assert (counts.succeeded, counts.errored) == (12, 3)
    assert await survivor.store.recorded_lines("batch_1") == set()


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.lists(st.integers(1, 6), max_size=5)), max_size=8
    )
)
def test_a_result_is_counted_once_and_only_under_the_lease(groups: list[tuple[str, list[int]]]) -> None:
    """Two processes write, taking turns with the lease by letting it run out."""
    asyncio.run(_write(groups))


async def _write(groups: list[tuple[str, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wall = Wall()
        server = Server(Path(folder), Database("sqlite://"), wall)
        await server.hand_in(["x"])
        store: BatchStore = server.store
        holder = "a"
        assert await store.take_lease("a", 30)
        written: dict[int, str] = {}
        for writer, numbers in groups:
            if numbers and numbers[0] == 6:  # the lease runs out, and this writer takes it
                wall.now += 31
                assert await store.take_lease(writer, 30)
                holder = writer
            results = [("batch_1", LineResult(n, str(n), "succeeded", body=writer.encode())) for n in numbers]
            try:
                await store.record(writer, results)
            except LeaseLost:
                assert writer != holder
            else:
                assert writer == holder
                for number in numbers:
                    written.setdefault(number, writer)
        kept = {result.number: result.body.decode() for result in store.read_results("batch_1", 1)}
        assert kept == written
        assert (await server.get()).counts.succeeded == len(written)
