"""Copies the database of a server to a file and back, while the server runs or before it starts again.

SQLite is copied by its own backup interface, which gives a consistent copy while others write. PostgreSQL has
`pg_dump` and `pg_restore`, which are called. Files of uploads and batches are not in the database."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import DatabaseError

from penstock.core.errors import UsageError
from penstock.core.gateway_config import StoreConfig
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import refuse_unknown
from penstock.serve.environment import open_database

SQLITE_MAGIC = b"SQLite format 3\0"
POSTGRES_MAGIC = b"PGDMP"


def back_up(store: StoreConfig, target: Path) -> None:
    """Write a copy of the database. Raises UsageError; a file that exists is not replaced."""
    if target.exists():
        raise UsageError(f"{target} exists already.", hint="Name another file.")
    with contextlib.closing(open_database(store)) as database:
        if not database.exists:
            raise UsageError(f"There is no database at {database.description}.")
        unfinished = target.with_name(target.name + ".unfinished")
        os.close(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))  # it holds hashes of keys
        try:
            if database.file is not None:
                _copy(database.file, unfinished)
            else:
                _call("pg_dump", ["--format=custom", f"--file={unfinished}"], store)
            unfinished.rename(target)
        finally:
            unfinished.unlink(missing_ok=True)


def restore(store: StoreConfig, source: Path, *, replace: bool = False) -> None:
    """Bring back a copy. A database with tables is only replaced with `replace`. Raises UsageError."""
    try:
        with source.open("rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}.") from error
    with contextlib.closing(open_database(store)) as database:
        expected = SQLITE_MAGIC if database.file is not None else POSTGRES_MAGIC
        if not head.startswith(expected):
            raise UsageError(
                f"{source} is no backup of a {database.dialect} database.",
                hint="A backup goes back to the kind of database that it came from.",
            )
        if not replace and database.has_tables():
            raise UsageError(
                f"There is a database at {database.description} already.",
                hint="Stop all servers that use it, then give --replace.",
            )
        if database.file is not None:
            database.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            database.close()  # its own connection is not another's
            _replace_file(source, database.file)
        else:
            refuse_unknown(_postgres_revision(source, store))
            options = ["--clean", "--if-exists", "--no-owner", "--single-transaction", "--exit-on-error"]
            _call("pg_restore", [*options, "--dbname", _postgres_url(store), str(source)], store)
        database.migrate()  # a copy of an older version


def _replace_file(source: Path, target: Path) -> None:
    """Migrate a copy of `source` first: a backup of a newer release, or one that is damaged, replaces nothing."""
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        _copy(source, unfinished)
        unfinished.chmod(0o600)
        with contextlib.closing(Database(f"sqlite:///{unfinished}")) as copied:
            copied.migrate()
        _check_unused(target)
        _copy(unfinished, target)
        target.chmod(0o600)
    except DatabaseError as error:
        raise UsageError(f"{source} is damaged: {error.orig}.") from error
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{unfinished}{suffix}").unlink(missing_ok=True)


def _check_unused(file: Path) -> None:
    """Refuse a database that a process has open. SQLite leaves the write-ahead log for the only connection alone."""
    with contextlib.closing(sqlite3.connect(file, timeout=1.0)) as connection:
        try:
            connection.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise UsageError(f"The database {file} cannot be replaced: {error}.") from error
            raise UsageError(
                f"The database {file} is in use.", hint="Stop all servers that use it, and try again."
            ) from error


def _copy(source: Path, target: Path) -> None:
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as from_,
            contextlib.closing(sqlite3.connect(target)) as to,
        ):
            from_.backup(to)
    except sqlite3.Error as error:
        raise UsageError(f"The database {source} cannot be copied: {error}.") from error


def _postgres_revision(source: Path, store: StoreConfig) -> str:
    """Return the version of the tables in a backup, without a database."""
    script = _call("pg_restore", ["--data-only", "--table=alembic_version", "--file=-", str(source)], store)
    _, _, rows = script.partition("\nCOPY ")
    lines = rows.splitlines()
    if len(lines) < 2:
        raise UsageError(f"{source} is no backup of Penstock's database.")
    return lines[1]


def _postgres_url(store: StoreConfig) -> str:
    """Return the URL without the password. The password is passed in the environment, because process lists show
    arguments."""
    url = make_url(store.database_url or "").set(drivername="postgresql", password=None)
    return url.render_as_string(hide_password=False)


def _call(program: str, arguments: list[str], store: StoreConfig) -> str:
    path = shutil.which(program)
    if path is None:
        raise UsageError(f"{program} is not installed.", hint="It comes with the PostgreSQL client package.")
    password = make_url(store.database_url or "").password
    environment = {**os.environ, **({"PGPASSWORD": str(password)} if password else {})}
    if program == "pg_dump":
        arguments = [*arguments, "--dbname", _postgres_url(store)]
    done = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UsageError(f"{program} failed: {lines[-1] if lines else f'exit code {done.returncode}'}.")
    return done.stdout
