"""Work runs in transactions, off the event loop, on a file that nobody else can read."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import Connection, func, insert, select, text
from sqlalchemy.exc import OperationalError

from penstock.core.errors import ConfigError, StoreUnavailable
from penstock.gateway.store import database as database_module
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.tables import tenant_revision, workspaces
from penstock.gateway.turns import working_for
from tests.gateway.fake_engine import let_begin, until


def rename_default(connection: Connection, name: str) -> None:
    connection.execute(workspaces.update().values(name=name))


def name_of_default(connection: Connection) -> str:
    return str(connection.execute(select(workspaces.c.name)).scalar_one())


def test_nothing_is_written_before_the_first_use(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "deep" / "data"))
    assert not database.exists
    assert list(tmp_path.iterdir()) == []
    assert database.run_now(name_of_default) == "Default"
    assert database.exists
    database.close()


def test_the_file_and_its_folder_are_private(tmp_path: Path, database: Database) -> None:
    database.migrate()
    assert database.file is not None
    assert stat.S_IMODE(database.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(database.file.parent.stat().st_mode) == 0o700


async def test_work_runs_in_another_thread(database: Database) -> None:
    threads = {await database.run(lambda connection: threading.get_ident()) for _ in range(3)}
    assert threading.get_ident() not in threads


async def test_work_that_raises_leaves_no_trace(database: Database) -> None:
    def fail(connection: Connection) -> None:
        rename_default(connection, "half done")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.run(fail)
    assert await database.run(name_of_default) == "Default"


async def test_writers_that_read_first_take_turns(database: Database) -> None:
    """A deferred transaction would fail with "database is locked" here instead of waiting."""

    def count_up(connection: Connection) -> None:
        seen = connection.execute(select(tenant_revision.c.revision)).scalar_one()
        connection.execute(tenant_revision.update().values(revision=seen + 1))

    before = await database.run(lambda connection: connection.scalar(select(tenant_revision.c.revision)))
    await asyncio.gather(*(database.run(count_up) for _ in range(50)))
    after = await database.run(lambda connection: connection.scalar(select(tenant_revision.c.revision)))
    assert (before, after) == (1, 51)


def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    database.migrate()

    def write(connection: Connection) -> None:
        rename_default(connection, "new")
        assert database.run_now(name_of_default, reads_only=True) == "Default"

    database.run_now(write)
    assert database.run_now(name_of_default, reads_only=True) == "new"


def test_writers_wait_less_for_another_process_once_one_has_waited_in_vain(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time wait: with the whole time for each, the hundredth would wait for minutes."""

    def longest_wait(connection: Connection) -> int:
        return int(connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one())

    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_MS", 60)
    monkeypatch.setattr(database_module, "_OUTAGE_TIMEOUT_MS", 7)
    assert database.run_now(longest_wait) == 60
    other = sqlite3.connect(database.file or "", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable):
        database.run_now(longest_wait)
    assert database.run_now(longest_wait, reads_only=True) == 7
    other.execute("ROLLBACK")
    assert database.run_now(longest_wait) == 7
    monkeypatch.setattr(database_module, "_QUIET_S", 0.0)
    assert [database.run_now(longest_wait) for _ in range(2)] == [7, 60]


async def test_readers_go_on_while_writers_wait_for_a_lock_of_another_process(database: Database) -> None:
    database.migrate()
    other = sqlite3.connect(database.file or "", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writers = [
        asyncio.create_task(database.run(lambda connection: rename_default(connection, "new")))
        for _ in range(20)  # more than there are threads
    ]
    await asyncio.sleep(0)
    assert await database.run(name_of_default, reads_only=True) == "Default"
    assert not any(writer.done() for writer in writers)
    other.execute("ROLLBACK")
    await asyncio.gather(*writers)
    assert await database.run(name_of_default, reads_only=True) == "new"
    other.close()


async def test_workspaces_share_the_threads(database: Database) -> None:
    """A caller whose key is not known yet would otherwise wait behind everything that a workspace asks for."""
    database.migrate()
    may_end = threading.Semaphore(0)
    begun: list[str] = []

    async def work_for(workspace_id: str) -> None:
        def slow(connection: Connection) -> None:
            begun.append(workspace_id)
            assert may_end.acquire(timeout=60)

        working_for.set(workspace_id)
        await database.run(slow, reads_only=True)

    greedy = [asyncio.create_task(work_for("greedy")) for _ in range(40)]
    await until(lambda: len(begun) == database_module.NUM_THREADS)
    late = asyncio.create_task(work_for("late"))
    await asyncio.sleep(0)
    await let_begin(begun, "late", may_end)
    assert begun.index("late") <= 2 * database_module.NUM_THREADS
    may_end.release(41)
    await asyncio.gather(late, *greedy)


def test_foreign_keys_are_enforced(database: Database) -> None:
    orphan = insert(workspaces).values(
        id="ws", organization_id="nobody", name="x", created_at=0.0, revision=1
    )
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        database.run_now(lambda connection: connection.execute(orphan))


async def test_an_in_memory_database_is_one_database_for_all_threads() -> None:
    database = Database("sqlite://")
    await asyncio.gather(*(database.run(lambda c: rename_default(c, "shared")) for _ in range(20)))
    assert database.run_now(name_of_default) == "shared"
    database.close()


def test_several_processes_start_on_an_empty_database_at_once(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path)
    script = (
        "import sys; from penstock.gateway.store import database as module; "
        "module._BUSY_TIMEOUT_MS = 240_000; "  # on a busy machine the other process may hold the lock for long
        "database = module.Database(sys.argv[1]); database.migrate(); database.close()"
    )
    starting = [subprocess.Popen([sys.executable, "-c", script, url]) for _ in range(2)]
    assert [process.wait() for process in starting] == [0, 0]
    database = Database(url)
    assert (
        database.run_now(lambda connection: connection.scalar(select(func.count()).select_from(workspaces)))
        == 1
    )
    database.close()


def test_a_database_of_a_newer_release_is_refused(database: Database, tmp_path: Path) -> None:
    newer = text("UPDATE alembic_version SET version_num = '9999_from_the_future'")
    database.run_now(lambda connection: connection.execute(newer))
    again = Database(sqlite_url(tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"newer Penstock.*9999_from_the_future") as caught:
        again.run_now(name_of_default)
    assert "Upgrade" in (caught.value.hint or "")
    again.close()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        Database(sqlite_url(tmp_path / "file" / "data")).migrate()


def test_a_file_that_is_no_database_is_said_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "penstock.db").write_text("just some text, certainly not a database" * 100)
    with pytest.raises(StoreUnavailable) as caught:
        Database(sqlite_url(tmp_path)).migrate()
    assert f"the database {tmp_path / 'penstock.db'} cannot be used: file is not a database" in caplog.text
    assert str(tmp_path) not in caught.value.message, "callers of an API read this"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_removed_is_an_outage(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_replaced: bool
) -> None:
    """What is written into a removed file is lost, and no other process would see it: a revoked key would live."""
    database.run_now(lambda connection: rename_default(connection, "kept"))
    assert database.file is not None
    away = tmp_path / "away.db"
    database.file.rename(away)
    if is_replaced:
        database.file.touch()
    for reads_only in (True, False):
        with pytest.raises(StoreUnavailable):
            database.run_now(name_of_default, reads_only=reads_only)
    assert [record.message for record in caplog.records if "removed or replaced" in record.message] == [
        f"the database {database.file} cannot be used: its file was removed or replaced; put the file back, or "
        "restart this server"
    ]
    away.replace(database.file)
    assert database.run_now(name_of_default) == "kept"


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://root:hunter2@host/x", "postgresql://u:hunter2@host:port/x"]
)
def test_a_wrong_url_is_refused_without_repeating_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Database(url)
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"


def test_a_server_that_is_not_there_is_said_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("psycopg")
    database = Database("postgresql://user:hunter2@127.0.0.1:1/penstock")
    assert database.dialect == "postgresql"
    with pytest.raises(StoreUnavailable) as caught:
        database.run_now(name_of_default)
    assert "127.0.0.1:1/penstock cannot be used" in caplog.text
    assert "127.0.0.1" not in caught.value.message
    assert "hunter2" not in f"{database.description} {caught.value.message} {caplog.text}"
    database.close()


def test_an_outage_is_told_once_and_so_is_its_end(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_QUIET_S", 3600.0)
    database.run_now(name_of_default)
    caplog.clear()

    def broken(_: Connection) -> None:
        raise OperationalError("", {}, sqlite3.OperationalError("disk I/O error"))

    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            database.run_now(broken)
        database.run_now(name_of_default)  # reads succeed while a disk is full
    monkeypatch.setattr(database_module, "_QUIET_S", 0.0)
    for _ in range(2):
        database.run_now(name_of_default)
    lines = [record.message.partition("penstock.db ")[2] for record in caplog.records]
    assert lines == ["cannot be used: disk I/O error", "can be used again"]


def test_a_file_that_may_not_be_looked_for_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_not(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    database = Database(sqlite_url(tmp_path))
    monkeypatch.setattr(Path, "exists", may_not)
    with pytest.raises(ConfigError, match=r"penstock.db cannot be read: Permission denied"):
        assert database.exists
    database.close()
