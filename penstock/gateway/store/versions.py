"""Documents that all gateways of one database share, with versions: the settings, the adapters.

A change adds a row with the next version. It names the version that it was made from, and is refused if another
change came first, so that no change is lost unseen. `Follower` tells a gateway of new versions: PostgreSQL announces
them (LISTEN and NOTIFY), and any database is asked for them in short intervals. Does not know what documents say.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import Connection, Row, delete, func, insert, select

from penstock.core.errors import InvalidRequest, PreconditionFailed, StoreUnavailable
from penstock.core.tasks import running
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import document_versions as table

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
_NUM_KEPT = 1000  # versions of one kind; older ones are forgotten
_MAX_NOTE_CHARS = 512
_CHANNEL = "penstock_versions"


class DocumentVersion(msgspec.Struct, frozen=True):
    kind: str
    version: int
    created_at: float
    actor: str
    note: str
    body: bytes | None


def read_latest(connection: Connection, kind: str) -> DocumentVersion | None:
    query = select(table).where(table.c.kind == kind).order_by(table.c.version.desc()).limit(1)
    return _version(connection.execute(query).one_or_none())


def read_version(connection: Connection, kind: str, version: int) -> DocumentVersion | None:
    query = select(table).where(table.c.kind == kind, table.c.version == version)
    return _version(connection.execute(query).one_or_none())


def read_history(
    connection: Connection, kind: str, *, limit: int, before: int | None = None
) -> list[DocumentVersion]:
    """At most `limit` versions, newest first."""
    query = select(table).where(table.c.kind == kind).order_by(table.c.version.desc()).limit(limit)
    if before is not None:
        query = query.where(table.c.version < before)
    return [DocumentVersion(**row._mapping) for row in connection.execute(query)]


def read_current_versions(connection: Connection) -> dict[str, int]:
    query = select(table.c.kind, func.max(table.c.version).label("version")).group_by(table.c.kind)
    return {row.kind: row.version for row in connection.execute(query)}


def lock_kind(connection: Connection, kind: str) -> None:
    """Until the transaction ends, no other one changes this kind. SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        digest = hashlib.blake2b(f"{_CHANNEL}:{kind}".encode(), digest_size=8).digest()
        connection.execute(select(func.pg_advisory_xact_lock(int.from_bytes(digest, signed=True))))


def append(
    connection: Connection,
    kind: str,
    body: bytes | None,
    *,
    expected: int | None,
    actor: str,
    note: str = "",
    at: float | None = None,
) -> DocumentVersion:
    """Make `body` the current version, if the current one is `expected`; None replaces whatever there is, and 0 is
    the version of a database without any. Raises PreconditionFailed after a lost race."""
    if body is not None and len(body) > MAX_BODY_BYTES:
        raise InvalidRequest(f"The {kind} take {len(body)} bytes; at most {MAX_BODY_BYTES} are kept.")
    lock_kind(connection, kind)
    newest = connection.execute(select(func.max(table.c.version)).where(table.c.kind == kind)).scalar() or 0
    if expected is not None and expected != newest:
        raise PreconditionFailed(
            f"The {kind} are at version {newest}, not {expected}: somebody else changed them.",
            hint="Read them again, and repeat the change.",
        )
    made = DocumentVersion(
        kind,
        newest + 1,
        time.time() if at is None else at,
        actor[:256],
        note[:_MAX_NOTE_CHARS].replace("\0", ""),
        body,
    )
    connection.execute(insert(table).values(msgspec.structs.asdict(made)))
    connection.execute(delete(table).where(table.c.kind == kind, table.c.version <= made.version - _NUM_KEPT))
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(_CHANNEL, kind)))  # delivered when the transaction commits
    return made


def _version(row: Row[Any] | None) -> DocumentVersion | None:
    return None if row is None else DocumentVersion(**row._mapping)


POLL_S = 0.25  # without announcements; a change arrives within a second
SLOW_POLL_S = 10.0  # beside announcements that are known to arrive
_RETRY_S = 2.0  # after a failure, so that an outage does not fill the log
_PROOF_TIMEOUT_S = 2.0
# A connection that only listens would not notice a server that is cut off.
_KEEPALIVE: dict[str, Any] = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}

# Called when a kind has another version than before. It must not raise.
OnChange: TypeAlias = Callable[[], Awaitable[object]]


class Follower:
    """Call `run` once all kinds are followed. Nothing is read while a SQLite database has no file."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._on_change: dict[str, OnChange] = {}
        self._seen: dict[str, int] = {}
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._hears = False  # announcements arrive
        self.checked_at = 0.0  # Unix time of the last successful look

    def follow(self, kind: str, on_change: OnChange, seen: int = 0) -> None:
        """`seen` is the version that the caller has read already."""
        self._on_change[kind] = on_change
        self._seen[kind] = seen

    async def look(self) -> None:
        """Ask for the current versions, and report the new ones. Raises StoreUnavailable."""
        async with self._looking:
            if not self._database.exists:
                return
            versions = await self._database.run(read_current_versions, reads_only=True)
            self.checked_at = time.time()
            for kind, on_change in self._on_change.items():
                version = versions.get(kind, 0)
                if version != self._seen[kind]:
                    self._seen[kind] = version
                    await on_change()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            if self._database.dialect == "postgresql":
                await stack.enter_async_context(running(self._hear()))
            stamp: tuple[int, ...] | None = None
            looked_at = -SLOW_POLL_S
            while True:
                wait_s = SLOW_POLL_S if self._hears else POLL_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                self._wake.clear()
                try:
                    before, stamp = stamp, self._stamp()
                    now = time.monotonic()
                    if stamp is not None and stamp == before and now - looked_at < SLOW_POLL_S:
                        self.checked_at = time.time()
                        continue
                    await self.look()
                    looked_at = now
                except StoreUnavailable:
                    stamp = None
                    await asyncio.sleep(_RETRY_S)  # the database has said why in the log
                except Exception:
                    stamp = None
                    logger.exception("new versions could not be looked for")
                    await asyncio.sleep(_RETRY_S)

    def _stamp(self) -> tuple[int, ...] | None:
        """Return the stamp of the database; None where only a query tells whether it is as before."""
        try:
            return self._database.stamp()
        except OSError:  # the query says what is wrong
            return None

    async def _hear(self) -> None:
        """Listen for announcements. A connection counts once its own announcement came back, because a pooler between
        may swallow them; without a connection that counts, `run` asks in short intervals."""
        import psycopg

        while True:
            try:
                await self._hear_once()
            except (psycopg.Error, OSError, TimeoutError) as error:
                logger.debug("announcements of the database do not arrive: %s", error)
            finally:
                self._hears = False
            await asyncio.sleep(SLOW_POLL_S)

    async def _hear_once(self) -> None:
        import psycopg

        token = f"proof:{secrets.token_hex(8)}"
        async with await psycopg.AsyncConnection.connect(
            self._database.driver_url, autocommit=True, connect_timeout=10, **_KEEPALIVE
        ) as connection:
            await connection.execute(f"LISTEN {_CHANNEL}")
            await connection.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, token))
            async for notice in connection.notifies(timeout=_PROOF_TIMEOUT_S):
                self._wake.set()  # also for what changed before the connection was there
                if notice.payload == token:
                    self._hears = True
                    break
            if not self._hears:
                raise TimeoutError("its own announcement did not come back")
            async for _ in connection.notifies():
                self._wake.set()
