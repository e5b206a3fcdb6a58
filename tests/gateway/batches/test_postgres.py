"""Batches on a real PostgreSQL server, with two gateways at work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.batches.batch import BatchStatus, LineResult
from penstock.gateway.store.database import Database
from tests.gateway.batches.scripted import Server, Wall
from tests.gateway.store.postgres_server import running_postgres

pytest.importorskip("psycopg", reason="needs the extra postgres")
pytestmark = pytest.mark.slow

TEXTS = [f"line-{number}" for number in range(1, 41)]


@pytest.fixture(scope="module")
def databases() -> Iterator[tuple[Database, Database]]:
    with running_postgres() as server:
        first, second = Database(server.url), Database(server.url)
        yield first, second
        first.close()
        second.close()


async def test_two_gateways_run_each_line_once(databases: tuple[Database, Database], tmp_path: Path) -> None:
    wall = Wall()
    servers = [Server(tmp_path, database, wall) for database in databases]
    await servers[0].hand_in(list(TEXTS), "batch_both")
    for server in servers:
        server.runner.start()
    batch = await servers[1].until_over("batch_both")
    for server in servers:
        await server.runner.stop()
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts.succeeded == 40
    assert [line[0] for line in servers[0].output(batch)] == list(range(1, 41))
    asked = servers[0].dialect.asked + servers[1].dialect.asked
    assert set(asked.values()) == {1}


async def test_a_cancellation_loses_no_count(databases: tuple[Database, Database], tmp_path: Path) -> None:
    """Results are counted while another gateway writes the same row."""
    first, second = (Server(tmp_path, database, Wall()) for database in databases)
    await first.hand_in(["x"], "batch_race")
    assert await first.store.take_lease("a", 1000)
    records = [
        first.store.record("a", [("batch_race", LineResult(number, str(number), "succeeded"))])
        for number in range(1, 31)
    ]
    cancel = second.store.cancel("w1", "batch_race", "scripted")
    await asyncio.gather(*records[:15], cancel, *records[15:])
    batch = await second.get("batch_race")
    assert batch.status is BatchStatus.CANCELLING
    assert batch.counts.succeeded == 30
    await first.store.release_lease("a")
