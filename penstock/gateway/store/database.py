"""The gateway's database: SQLite in a file by default, PostgreSQL by URL.

Work is a plain function of a SQLAlchemy connection. It runs in one transaction, in a thread of a small pool, so that
the event loop never waits for a disk: `await database.run(work)`. Commands without a loop use `run_now`. Nothing is
touched before the first work: a server that stores nothing leaves no file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, Table, and_, event, or_
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import StaticPool

from penstock.core.errors import ConfigError, InvalidRequest, RateLimited, StoreUnavailable
from penstock.core.machine import install_command
from penstock.gateway.store.tables import migrate, version_table
from penstock.gateway.turns import FairSlots

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[[Connection], T]

DATABASE_FILE = "penstock.db"
# For writers, and as many for readers: while writers wait for another process's lock, keys are still checked.
NUM_THREADS = 4
_QUIET_S = 5.0  # without a failure, after which an outage is over
_SAME_TIME_NS = 100_000_000  # file systems' clocks tick every few milliseconds
# A connection to PostgreSQL whose other end is silently gone, such as behind a cut network, ends after this on both
# sides. The server then rolls back, so that locks of rows (a lease, for example) do not outlive their holder.
_GONE_S = 10
_BUSY_TIMEOUT_MS = 10_000  # how long a writer of SQLite waits for another process
_OUTAGE_TIMEOUT_MS = 1000  # the same during an outage: many writers would else wait one after the other
_READS_ONLY = "penstock_reads_only"
_IN_OUTAGE = "penstock_in_outage"
# PostgreSQL's codes for errors that pass: an idle transaction was ended; the server became a standby, on which a
# transaction cannot write (25006) or cannot begin to (0A000).
_READ_ONLY = "25006"
_STANDBY_CODES = frozenset({_READ_ONLY, "0A000"})
_PASSING_CODES = _STANDBY_CODES | {"25P03"}
_SERVER_SETTINGS = {
    "idle_in_transaction_session_timeout": _GONE_S * 1000,
    "tcp_keepalives_idle": _GONE_S // 2,
    "tcp_keepalives_interval": 2,
    "tcp_keepalives_count": 2,
    "tcp_user_timeout": _GONE_S * 1000,
}


def sqlite_url(data_dir: Path) -> str:
    """Return the URL of the database that a server keeps in its data folder."""
    return f"sqlite:///{data_dir / DATABASE_FILE}"


class SharedThreads:
    """A pool of threads that workspaces share."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, FairSlots] = WeakKeyDictionary()

    async def run(self, work: Callable[[], T]) -> T:
        slots = self._slots.setdefault(asyncio.get_running_loop(), FairSlots(NUM_THREADS))
        return await slots.in_thread(self._threads, work)

    def close(self) -> None:
        """Let work that has begun finish."""
        self._threads.shutdown()


class Database:
    """Safe to use from any thread. Several processes may share one database."""

    def __init__(self, url: str) -> None:
        self._engine = _create_engine(url)
        self._is_in_memory = isinstance(self._engine.pool, StaticPool)
        # All of an in-memory database lives in one connection, so its work takes turns.
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if self._is_in_memory else contextlib.nullcontext()
        )
        self._writers = SharedThreads("penstock-database")
        self._readers = SharedThreads("penstock-database-reads")
        self._migrating = threading.Lock()
        self._outage: set[str] = set()  # the causes of the present outage, each of which was logged
        self._failed_at = 0.0  # by the monotonic clock: the last failure
        self._is_migrated = False
        self._file_id: tuple[int, int] | None = None  # of the SQLite file that is in use

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    @property
    def exists(self) -> bool:
        """False while a SQLite file has not been written; a server's database always counts as there."""
        return (
            self.dialect != "sqlite" or self._is_migrated or (self.file is not None and _is_there(self.file))
        )

    def has_tables(self) -> bool:
        """Return whether there are tables. Creates none."""
        return self.exists and self._transaction(
            lambda connection: sqlalchemy.inspect(connection).has_table(version_table.name), reads_only=True
        )

    @property
    def file(self) -> Path | None:
        """Return the file of a SQLite database; None for other databases."""
        is_file = self.dialect == "sqlite" and not self._is_in_memory
        return Path(self._engine.url.database or "") if is_file else None

    @property
    def description(self) -> str:
        """Return the address of the database for people to read, without the password."""
        return str(self.file) if self.file else self._engine.url.render_as_string(hide_password=True)

    @property
    def driver_url(self) -> str:
        """Return the address with its password, as PostgreSQL's own clients take it. Not for logs."""
        return self._engine.url.set(drivername=self.dialect).render_as_string(hide_password=False)

    async def run(self, work: Work[T], *, reads_only: bool = False) -> T:
        """Run `work` and return its result. The work is committed as a whole, or rolled back when it raises.

        With `reads_only`, the work waits for no writer: SQLite lets the work run concurrently with one, and readers
        have threads of their own. Workspaces share the threads, and a key is looked up for none of them: however much
        one workspace asks for, the others wait for a free thread only."""
        threads = self._readers if reads_only else self._writers
        return await threads.run(lambda: self.run_now(work, reads_only=reads_only))

    def run_now(self, work: Work[T], *, reads_only: bool = False) -> T:
        """Do the same as `run`, in the calling thread."""
        self.migrate()
        return self._transaction(work, reads_only=reads_only)

    def migrate(self) -> None:
        """Bring the tables to what this release needs, once per process. Raises ConfigError when the database comes
        from a newer release."""
        with self._migrating:
            if not self._is_migrated:
                self._make_private_file()
                self._transaction(migrate, reads_only=False)
                self._file_id = self._present_file_id()
                self._is_migrated = True

    def close(self) -> None:
        """Let work that has begun finish, then disconnect."""
        for threads in (self._writers, self._readers):
            threads.close()
        self._engine.dispose()

    def _transaction(self, work: Work[T], *, reads_only: bool) -> T:
        options = {_READS_ONLY: reads_only, _IN_OUTAGE: bool(self._outage), "postgresql_readonly": reads_only}
        if self._file_id is not None and self._present_file_id() != self._file_id:
            raise self._outage_of(
                "its file was removed or replaced; put the file back, or restart this server"
            )
        try:
            with self._turn, self._engine.connect() as connection:
                connection = connection.execution_options(**options)
                try:
                    with connection.begin():
                        result = work(connection)
                except sqlalchemy.exc.DBAPIError as error:
                    if _code(error) in _STANDBY_CODES and not reads_only:
                        connection.invalidate()  # a standby: the next connection may reach the new primary
                    raise
            self._note_return()
            return result
        except (sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError) as error:
            if not _is_outage(error, reads_only=reads_only):
                raise
            raise self._outage_of(_cause(error)) from error

    def _outage_of(self, cause: str) -> StoreUnavailable:
        """Return the error of an outage. Callers of an API read the error, so the address of the database and the
        cause go to the log only. Many parts ask several times a second: an outage is one line of the log for each
        cause."""
        self._failed_at = time.monotonic()
        if cause not in self._outage:
            self._outage.add(cause)
            logger.error("the database %s cannot be used: %s", self.description, cause)
        return StoreUnavailable(
            "The database cannot be used at the moment; the log says why.", retry_after_s=1.0
        )

    def _present_file_id(self) -> tuple[int, int] | None:
        """Return what tells the file of SQLite from another or a missing one; None for other databases. A process
        goes on writing into a file that was removed, and all that it writes there is lost."""
        if self.file is None:
            return None
        try:
            found = os.stat(self.file)
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino

    def stamp(self) -> tuple[int, ...] | None:
        """Return numbers that any change of a SQLite file changes, by whichever process, for the cost of a look at
        two files. None where only a query can tell: for other databases, and right after a change, because two
        changes may have the same time."""
        if self.file is None:
            return None
        found = [os.stat(self.file)]
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(f"{self.file}-wal"))
        if time.time_ns() - max(each.st_mtime_ns for each in found) < _SAME_TIME_NS:
            return None
        return tuple(number for each in found for number in (each.st_ino, each.st_size, each.st_mtime_ns))

    def _note_return(self) -> None:
        """On a full disk reads succeed, and so does a write into free pages: one success does not end an outage."""
        if self._outage and time.monotonic() - self._failed_at >= _QUIET_S:
            self._outage = set()
            logger.warning("the database %s can be used again", self.description)

    def _make_private_file(self) -> None:
        if self.file is None or _is_there(self.file):
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise ConfigError(
                f"The database {self.file} cannot be written: {error.strerror}.",
                hint="Choose another folder with --data-dir, or a server's database with --database-url.",
            ) from error


class _Store(Protocol):
    _database: Database


StoreT = TypeVar("StoreT", bound=_Store)


def transaction(
    method: Callable[Concatenate[StoreT, Connection, P], T],
) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, T]]:
    """Run a method of a store in a transaction of the store's database: callers await it, and pass no connection."""

    @functools.wraps(method)
    async def run(self: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.run(lambda connection: method(self, connection, *args, **kwargs))

    return run


def reading(
    method: Callable[Concatenate[StoreT, Connection, P], T],
) -> Callable[Concatenate[StoreT, P], Coroutine[Any, Any, T]]:
    """Like `transaction`, for a method that only reads."""

    @functools.wraps(method)
    async def run(self: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._database.run(
            lambda connection: method(self, connection, *args, **kwargs), reads_only=True
        )

    return run


def _is_there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:  # PermissionError: the folder may not be searched
        raise ConfigError(
            f"The database {file} cannot be read: {error.strerror}.",
            hint="Choose another folder with --data-dir, or run as the user that it belongs to.",
        ) from error


def _create_engine(url: str) -> Engine:
    try:
        parsed = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        # The URL may hold a password, so it is not repeated.
        raise ConfigError(
            "The database URL cannot be understood.",
            hint="It looks like sqlite:////path/to/file.db or postgresql://user:password@host/name.",
        ) from error
    if parsed.get_backend_name() == "sqlite":
        return _create_sqlite(parsed)
    if parsed.get_backend_name() == "postgresql":
        return _create_postgresql(parsed.set(drivername="postgresql+psycopg"))
    raise ConfigError(
        f"The database is of the kind '{parsed.get_backend_name()}', which Penstock does not know.",
        hint="Use a URL that begins with sqlite:/// or postgresql://.",
    )


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging, so that readers and one writer do not wait for each other. The switch ignores
    the busy timeout, so a process that switches at the same moment as another must try again."""
    give_up_at = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up_at:
                raise
        time.sleep(0.01)


def _create_sqlite(url: sqlalchemy.URL) -> Engine:
    options: dict[str, Any] = {}
    if url.database in (None, "", ":memory:"):
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    engine = sqlalchemy.create_engine(url, hide_parameters=True, **options)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver does not begin transactions by itself
        _switch_to_wal(connection)
        # Survives a killed process; WAL keeps the file consistent.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        waits_ms = _OUTAGE_TIMEOUT_MS if options.get(_IN_OUTAGE) else _BUSY_TIMEOUT_MS
        if connection.info.get("busy_timeout") != waits_ms:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {waits_ms}")
            connection.info["busy_timeout"] = waits_ms
        # A transaction that reads first and writes later can fail where it would only have had to wait.
        connection.exec_driver_sql("BEGIN" if options.get(_READS_ONLY) else "BEGIN IMMEDIATE")

    return engine


def _create_postgresql(url: sqlalchemy.URL) -> Engine:
    try:
        engine = sqlalchemy.create_engine(
            url,
            hide_parameters=True,
            pool_size=2 * NUM_THREADS,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _GONE_S,
                "keepalives_idle": _GONE_S // 2,
                "keepalives_interval": 2,
                "keepalives_count": 2,
                "tcp_user_timeout": _GONE_S * 1000,
            },
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            "PostgreSQL needs a driver that is not installed.", hint=f"Run: {install_command('postgres')}"
        ) from error

    # The driver warns of every failed batch of rows again, once a second during an outage.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    refused: set[str] = set()  # settings, each of which was logged

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            for name, value in _SERVER_SETTINGS.items():
                try:
                    cursor.execute("SELECT set_config(%s, %s, false)", (name, str(value)))
                    connection.commit()
                except engine.dialect.loaded_dbapi.Error as error:
                    connection.rollback()  # servers that are not Linux lack tcp_user_timeout
                    if name not in refused:
                        refused.add(name)
                        logger.warning(
                            "the database server refuses %s = %s (%s): a gateway that is cut off may hold its locks "
                            "for more than %d s",
                            *(name, value, _cause(error), _GONE_S),
                        )

    return engine


def _is_outage(error: Exception, *, reads_only: bool) -> bool:
    """Return whether an error means that the database is away, rather than that the statement is wrong."""
    outages = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError, sqlalchemy.exc.TimeoutError)
    code = _code(error)
    if code in _PASSING_CODES and not (reads_only and code == _READ_ONLY):
        return True
    # SQLite reports a file that is no database with the general class alone.
    return isinstance(error, outages) or type(error) is sqlalchemy.exc.DatabaseError


def _code(error: Exception) -> str | None:
    """Return PostgreSQL's code of an error."""
    return getattr(getattr(error, "orig", None), "sqlstate", None)


def _cause(error: Exception) -> str:
    """Return the first line of what the driver said. The statement's parameters, which may be private, are left
    out."""
    original = getattr(error, "orig", None) or error
    return str(original).strip().partition("\n")[0].rstrip(".") or type(original).__name__


_UNIX_EPOCH_DAY = 2_440_587.5  # as SQLite counts days


def database_time(connection: Connection) -> float:
    """Return the Unix time on the clock of the database. Leases end by this clock: clocks of gateways may differ."""
    if connection.dialect.name == "sqlite":
        days = sqlalchemy.func.julianday("now") - _UNIX_EPOCH_DAY
        return float(connection.scalar(sqlalchemy.select(days * 86_400)) or 0.0)
    seconds = sqlalchemy.func.extract("epoch", sqlalchemy.func.clock_timestamp())
    return float(connection.scalar(sqlalchemy.select(sqlalchemy.cast(seconds, sqlalchemy.Double))) or 0.0)


def insert_into(connection: Connection, table: Table) -> Any:
    """Return an INSERT statement with `ON CONFLICT`, which SQLAlchemy has for each database separately."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # takes a tenth of a second

        return postgresql.insert(table)
    return sqlite.insert(table)


def insert_once(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless its key is taken, and return whether the row is new."""
    statement = insert_into(connection, table).values(values).on_conflict_do_nothing()
    # Not every driver counts the rows of an insert; all drivers return them.
    return connection.execute(statement.returning(*table.primary_key)).first() is not None


Order = Literal["asc", "desc"]


def read_page(
    connection: Connection,
    query: Select[Any],
    table: Table,
    *,
    limit: int,
    order: Order = "desc",
    after: str | None = None,
    before: str | None = None,
) -> tuple[Sequence[Row[Any]], bool]:
    """Return the rows of `query` that come after the cursor, or just before it, and whether there are more that way.

    `table` has the columns `id` and `created_at`. The cursor must be among the rows of the query."""
    ascends = (order == "asc") == (before is None)
    if (cursor := after if before is None else before) is not None:
        seen = connection.execute(query.where(table.c.id == cursor)).one_or_none()
        if seen is None:
            raise InvalidRequest(f"The list has no {cursor[:64]!r} to go on from.", param="after")
        query = query.where(_beyond(table, seen, ascends=ascends))
    columns = (each if ascends else each.desc() for each in (table.c.created_at, table.c.id))
    rows = connection.execute(query.order_by(*columns).limit(limit + 1)).all()
    return rows[:limit][:: 1 if before is None else -1], len(rows) > limit


def _beyond(table: Table, seen: Row[Any], *, ascends: bool) -> ColumnElement[bool]:
    time, row_id = table.c.created_at, table.c.id
    at, name = seen._mapping["created_at"], seen._mapping["id"]
    if ascends:
        return or_(time > at, and_(time == at, row_id > name))
    return or_(time < at, and_(time == at, row_id < name))


MAX_QUERIES = 2  # that this process runs at once: fewer than the database has threads
MAX_QUERIES_OF_WORKSPACE = 8  # that run or wait
RETRY_AFTER_S = 2.0


class QueryTurns:
    """One query of a workspace runs at a time, so that no workspace keeps others from asking."""

    def __init__(self, noun: str) -> None:
        self._noun = noun  # what is asked for
        self._slots = FairSlots(MAX_QUERIES, most_each=1)
        self._num_asked: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, workspace_id: str | None) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. Queries over all workspaces share one turn. Raises RateLimited when too many
        queries of the workspace wait."""
        name = workspace_id or ""
        if self._num_asked[name] >= MAX_QUERIES_OF_WORKSPACE:
            raise RateLimited(
                f"{MAX_QUERIES_OF_WORKSPACE} requests for {self._noun} run or wait, which is the limit.",
                hint="Wait for their answers.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_asked[name] += 1
        try:
            async with self._slots.slot(name):
                yield
        finally:
            self._num_asked[name] -= 1
            if not self._num_asked[name]:
                del self._num_asked[name]
