"""Backup and restore of the database, SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import func, insert, select, text

from penstock.cli.commands import penstock
from penstock.core.gateway_config import StoreConfig
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import fleet_documents
from penstock.serve.backup import back_up
from tests.gateway.store.postgres_server import PostgresServer, running_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(penstock, ["database", *arguments])


def add(url: str, name: str) -> None:
    database = Database(url)
    values = {"name": name, "document": b"\0\xff"}
    database.run_now(lambda connection: connection.execute(insert(fleet_documents).values(**values)))
    database.close()


def count(url: str) -> int:
    database = Database(url)
    found = database.run_now(
        lambda connection: connection.scalar(select(func.count()).select_from(fleet_documents))
    )
    database.close()
    return int(found or 0)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_backup_brings_everything_back(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    if kind == "postgresql":
        url = request.getfixturevalue("postgres").url
    where = ["--database-url", url]
    add(url, "one")
    copy = tmp_path / "copy"
    done = run("backup", str(copy), *where)
    assert done.exit_code == 0, done.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert "exists already" in run("backup", str(copy), *where).stderr
    add(url, "two")
    assert "already" in run("restore", str(copy), *where).stderr
    assert count(url) == 2
    done = run("restore", str(copy), "--replace", *where)
    assert done.exit_code == 0, done.stderr
    assert count(url) == 1


def test_what_cannot_be_restored_or_backed_up(tmp_path: Path) -> None:
    where = ["--database-url", f"sqlite:///{tmp_path / 'fleet.db'}"]
    assert "There is no database" in run("backup", str(tmp_path / "copy"), *where).stderr
    assert "cannot be read" in run("restore", str(tmp_path / "absent"), *where).stderr
    (tmp_path / "dump").write_bytes(b"PGDMP and so on")
    assert "no backup of a sqlite database" in run("restore", str(tmp_path / "dump"), *where).stderr
    assert not (tmp_path / "fleet.db").exists()


def test_a_backup_that_cannot_be_used_replaces_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    add(url, "one")
    newer, damaged = tmp_path / "newer", tmp_path / "damaged"
    assert run("backup", str(newer), "--database-url", url).exit_code == 0
    with contextlib.closing(sqlite3.connect(newer)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_later'")
        connection.commit()
    damaged.write_bytes(newer.read_bytes()[:16] + b"\xff" * 8192)
    for source, sentence in [(newer, "written by a newer Penstock"), (damaged, "Error: ")]:
        refused = run("restore", str(source), "--replace", "--database-url", url)
        assert refused.exit_code != 0
        assert sentence in refused.stderr
        assert "did not expect" not in refused.stderr
        assert count(url) == 1
    assert not list(tmp_path.glob("*.unfinished*"))


def test_a_database_that_a_server_uses_is_not_replaced(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    add(url, "one")
    assert run("backup", str(tmp_path / "copy"), "--database-url", url).exit_code == 0
    server = Database(url)
    values = {"name": "two", "document": b""}
    server.run_now(lambda connection: connection.execute(insert(fleet_documents).values(**values)))
    refused = run("restore", str(tmp_path / "copy"), "--replace", "--database-url", url)
    assert refused.exit_code != 0
    assert "is in use" in refused.stderr
    server.run_now(lambda connection: connection.execute(select(fleet_documents)).all())
    server.close()
    assert count(url) == 2
    assert run("restore", str(tmp_path / "copy"), "--replace", "--database-url", url).exit_code == 0
    assert count(url) == 1


def test_a_newer_backup_of_postgresql_replaces_nothing(tmp_path: Path, postgres: PostgresServer) -> None:
    database = Database(postgres.url)

    def stamp(revision: str) -> None:
        statement = text("UPDATE alembic_version SET version_num = :revision")
        database.run_now(lambda connection: connection.execute(statement, {"revision": revision}))

    add(postgres.url, "before")
    revision = database.run_now(
        lambda connection: connection.scalar(text("SELECT version_num FROM alembic_version"))
    )
    before = count(postgres.url)
    stamp("9999_later")
    back_up(StoreConfig(database_url=postgres.url), tmp_path / "newer")
    stamp(revision)
    add(postgres.url, "after")
    refused = run("restore", str(tmp_path / "newer"), "--replace", "--database-url", postgres.url)
    assert refused.exit_code != 0
    assert "written by a newer Penstock" in refused.stderr
    assert count(postgres.url) == before + 1
    database.close()
