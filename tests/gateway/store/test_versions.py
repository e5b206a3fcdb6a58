"""Documents with versions: no change is lost, and every process hears of a change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest, PreconditionFailed, StoreUnavailable
from penstock.gateway.store import database as database_module
from penstock.gateway.store import versions
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.versions import (
    MAX_BODY_BYTES,
    DocumentVersion,
    Follower,
    append,
    read_current_versions,
    read_history,
    read_latest,
    read_version,
)
from tests.gateway.store.ready_made import ready_made_database


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return ready_made_database(tmp_path)


async def put(
    database: Database, body: bytes, expected: int | None = None, kind: str = "k"
) -> DocumentVersion:
    return await database.run(
        lambda connection: append(connection, kind, body, expected=expected, actor="test")
    )


async def test_versions_count_up_and_stay(database: Database) -> None:
    assert (await put(database, b"one", expected=0)).version == 1
    assert (await put(database, b"two", expected=1)).version == 2
    assert (await put(database, b"other", kind="other")).version == 1
    latest = await database.run(lambda connection: read_latest(connection, "k"))
    assert latest is not None
    assert (latest.version, latest.body) == (2, b"two")
    first = await database.run(lambda connection: read_version(connection, "k", 1))
    assert first is not None
    assert first.body == b"one"
    assert await database.run(read_current_versions) == {"k": 2, "other": 1}
    history = await database.run(lambda connection: read_history(connection, "k", limit=5, before=2))
    assert [row.version for row in history] == [1]


async def test_a_lost_race_changes_nothing(database: Database) -> None:
    await put(database, b"one", expected=0)
    with pytest.raises(PreconditionFailed, match="at version 1, not 0: somebody else"):
        await put(database, b"two", expected=0)
    assert await database.run(read_current_versions) == {"k": 1}


async def test_of_many_changes_at_once_from_one_version_one_wins(tmp_path: Path) -> None:
    one, two = ready_made_database(tmp_path), Database(sqlite_url(tmp_path))
    changes = [put((one, two)[number % 2], b"x", expected=0) for number in range(6)]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert sum(isinstance(outcome, PreconditionFailed) for outcome in outcomes) == 5
    one.close()
    two.close()


async def test_old_versions_are_forgotten_and_bodies_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_NUM_KEPT", 3)
    for number in range(5):
        await put(database, b"%d" % number)
    history = await database.run(lambda connection: read_history(connection, "k", limit=10))
    assert [row.version for row in history] == [5, 4, 3]
    with pytest.raises(InvalidRequest, match="at most"):
        await put(database, bytes(MAX_BODY_BYTES + 1))


async def test_a_follower_of_another_process_hears_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "POLL_S", 0.005)
    ours, theirs = ready_made_database(tmp_path), Database(sqlite_url(tmp_path))
    heard = asyncio.Event()

    async def on_change() -> None:
        heard.set()

    follower = Follower(theirs)
    follower.follow("k", on_change)
    following = asyncio.create_task(follower.run())
    await put(ours, b"x", kind="other")
    await put(ours, b"x")
    async with asyncio.timeout(60):
        await heard.wait()
    heard.clear()
    await follower.look()
    assert not heard.is_set(), "the same version is told once"
    following.cancel()
    ours.close()
    theirs.close()


async def test_a_file_that_nobody_changed_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "POLL_S", 0.001)
    monkeypatch.setattr(database_module, "_SAME_TIME_NS", 20_000_000)
    ours, theirs = ready_made_database(tmp_path), Database(sqlite_url(tmp_path))
    heard = asyncio.Event()
    num_asked = 0
    run = theirs.run

    async def count(*args: object, **options: object) -> object:
        nonlocal num_asked
        num_asked += 1
        return await run(*args, **options)  # type: ignore[arg-type]

    async def on_change() -> None:
        heard.set()

    monkeypatch.setattr(theirs, "run", count)
    follower = Follower(theirs)
    follower.follow("k", on_change)
    following = asyncio.create_task(follower.run())
    while (stamp := theirs.stamp()) is None or follower.checked_at == 0.0:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        num_before = 0
        while num_asked > num_before:  # while the last change was just now
            num_before, checked_at = num_asked, follower.checked_at
            while follower.checked_at < checked_at + 0.05:
                await asyncio.sleep(0.001)
    await put(ours, b"x")
    assert theirs.stamp() != stamp
    async with asyncio.timeout(60):
        await heard.wait()
    following.cancel()
    ours.close()
    theirs.close()


async def test_nothing_is_read_or_made_while_there_is_no_file(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "data"))
    await Follower(database).look()
    assert not (tmp_path / "data").exists()
    database.close()


async def test_an_outage_is_survived(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "POLL_S", 0.001)
    monkeypatch.setattr(versions, "_RETRY_S", 0.001)
    heard = asyncio.Event()
    num_failed = 0
    run = database.run

    async def fail(*args: object, **options: object) -> None:
        nonlocal num_failed
        num_failed += 1
        raise StoreUnavailable("gone") if num_failed < 3 else RuntimeError("odd")

    async def on_change() -> None:
        heard.set()

    await put(database, b"x")
    monkeypatch.setattr(database, "run", fail)
    follower = Follower(database)
    follower.follow("k", on_change)
    following = asyncio.create_task(follower.run())
    while num_failed < 5:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(database, "run", run)
    async with asyncio.timeout(60):
        await heard.wait()
    following.cancel()
