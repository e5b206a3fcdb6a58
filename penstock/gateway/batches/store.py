"""Batches in the database: their rows, the results of their lines, and the lease that decides which process runs
batches.

A process takes the lease for some seconds and renews it. Another process may take the lease over when it has expired,
or earlier when its holder is known to be dead. The name of a holder says where its process id is valid, because the
same process id means another process in another container.

A process changes a running batch only under its lease, in the transaction that checks the lease: a process that was
thought dead and wakes up again can write nothing. A line's result is recorded once; a second result changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, case, delete, func, insert, select, update

from penstock.core.errors import Conflict, NotFound, RateLimited
from penstock.gateway.batches.batch import (
    ACTIVE,
    CANCELLABLE,
    Batch,
    BatchStatus,
    Counts,
    Ending,
    LineResult,
    batch_from_row,
    batch_values,
)
from penstock.gateway.blobs.blobs import is_blob_id
from penstock.gateway.files import StoredFile, insert_file
from penstock.gateway.store import tables
from penstock.gateway.store.database import (
    Database,
    database_time,
    insert_once,
    read_page,
    reading,
    transaction,
)
from penstock.gateway.store.retention import Retention
from penstock.gateway.store.tables import leases
from penstock.gateway.tenants.keyring import IS_ARCHIVED

LEASE_NAME = "batches"


class LeaseLost(Exception):
    """Another process runs the batches now."""


def new_holder() -> str:
    return f"{_process_namespace()}:{os.getpid()}:{secrets.token_hex(6)}"


def is_dead(holder: str) -> bool:
    """True only if the holder's process id is valid in this process's namespace and names no process any more."""
    namespace, _, rest = holder.partition(":")
    pid = rest.partition(":")[0]
    if namespace != _process_namespace() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process belongs to another user
        return False
    return False


def take_lease(connection: Connection, holder: str, now: float, duration_s: float) -> bool:
    """Take or renew the lease. False while another process holds it. Nobody leases for longer than `duration_s`: a
    longer lease was taken before the clock was set back, and is shortened, because its holder may have died since."""
    row = connection.execute(select(leases).where(leases.c.name == LEASE_NAME)).one_or_none()
    if row is None:
        values = {"name": LEASE_NAME, "holder": holder, "expires_at": now + duration_s}
        return insert_once(connection, leases, values)
    is_held = row.holder != holder and row.expires_at > now and not is_dead(row.holder)
    if is_held and row.expires_at <= now + duration_s:
        return False
    is_unchanged = leases.c.holder == row.holder, leases.c.expires_at == row.expires_at
    changed = connection.execute(
        update(leases)
        .where(leases.c.name == LEASE_NAME, *is_unchanged)
        .values(holder=row.holder if is_held else holder, expires_at=now + duration_s)
    )
    return changed.rowcount == 1 and not is_held


def release_lease(connection: Connection, holder: str) -> None:
    connection.execute(delete(leases).where(leases.c.name == LEASE_NAME, leases.c.holder == holder))


def check_lease(connection: Connection, holder: str) -> None:
    """Raises LeaseLost. While the holder's transaction lasts, no other process can take the lease."""
    query = select(leases.c.holder).where(leases.c.name == LEASE_NAME).with_for_update()
    if connection.execute(query).scalar_one_or_none() != holder:
        raise LeaseLost


def _process_namespace() -> str:
    """Return a name for the space in which this process's id is valid: one boot of one machine, and on Linux one
    container. A process that cannot tell gets a name of its own, so that no other process ever takes it for dead."""
    if sys.platform != "linux":
        parts = [os.uname().nodename]  # no containers share this kernel
    else:
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            parts = [boot_id, str(os.stat("/proc/self/ns/pid").st_ino)]
        except OSError:
            parts = [_UNIQUE]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


_UNIQUE = secrets.token_hex(16)


# Batches of a workspace that are not over: the runner looks at all of them every few seconds.
MAX_ACTIVE = 1000
MAX_OVER = 50_000  # batches of a workspace that are over; OpenAI's clients cannot delete them
RETRY_AFTER_S = 60.0
_RESULTS_AT_ONCE = 256
_MAX_GROUP = 256


class BatchStore:
    def __init__(
        self,
        database: Database,
        *,
        wall_clock: Callable[[], float] = time.time,
        lease_clock: Callable[[Connection], float] = database_time,
    ) -> None:
        self._database = database
        self._wall_clock = wall_clock
        self._lease_clock = lease_clock
        batches = tables.batches
        is_over = batches.c.status.not_in(sorted(ACTIVE))
        counted = case((is_over, 1), else_=0)
        self._retention = Retention(
            database, batches, batches.c.id, counted, batches.c.created_at, MAX_OVER, may_go=is_over
        )

    @property
    def exists(self) -> bool:
        """False as long as nothing was ever stored, so that there can be no batch."""
        return self._database.exists

    async def create(self, batch: Batch) -> None:
        """Raises RateLimited if the workspace has too many batches that are not over."""
        await self._create(batch)
        await self._retention.note_added(batch.workspace_id, 1)

    @transaction
    def _create(self, connection: Connection, batch: Batch) -> None:
        active = select(func.count()).where(
            tables.batches.c.workspace_id == batch.workspace_id, tables.batches.c.status.in_(sorted(ACTIVE))
        )
        if connection.execute(active).scalar_one() >= MAX_ACTIVE:
            raise RateLimited(
                f"This workspace has {MAX_ACTIVE} batches that are not over, which is the limit.",
                hint="Put more requests into each batch.",
                retry_after_s=RETRY_AFTER_S,
            )
        connection.execute(insert(tables.batches).values(batch_values(batch)))

    @reading
    def get(self, connection: Connection, workspace_id: str, batch_id: str, kind: str) -> Batch:
        return _find(connection, workspace_id, batch_id, kind)

    @reading
    def page(
        self,
        connection: Connection,
        workspace_id: str,
        kind: str,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
    ) -> tuple[Sequence[Batch], bool]:
        """Return a page of batches, newest first, and whether there are more."""
        query = select(tables.batches).where(
            tables.batches.c.workspace_id == workspace_id, tables.batches.c.kind == kind
        )
        rows, has_more = read_page(connection, query, tables.batches, limit=limit, after=after, before=before)
        return [batch_from_row(row) for row in rows], has_more

    @transaction
    def cancel(self, connection: Connection, workspace_id: str, batch_id: str, kind: str) -> Batch:
        """Ask a running batch to stop. Asking again changes nothing; asking an ended one is a conflict."""
        batch = _find(connection, workspace_id, batch_id, kind, to_change=True)
        if batch.status is BatchStatus.CANCELLING:
            return batch
        if batch.status not in CANCELLABLE:
            raise Conflict(f"The batch {batch_id} cannot be cancelled: it is {batch.status}.")
        cancelling = self._entered(batch, BatchStatus.CANCELLING)
        return _write(connection, msgspec.structs.replace(cancelling, ending="canceled"))

    @transaction
    def delete(self, connection: Connection, workspace_id: str, batch_id: str, kind: str) -> Batch:
        batch = _find(connection, workspace_id, batch_id, kind, to_change=True)
        if batch.is_active:
            raise Conflict(f"The batch {batch_id} is still running.", hint="Cancel it first.")
        connection.execute(delete(tables.batches).where(tables.batches.c.id == batch_id))
        return batch

    @reading
    def active(self, connection: Connection) -> list[Batch]:
        """Return every batch that is not over, oldest first."""
        query = (
            select(tables.batches)
            .where(tables.batches.c.status.in_(sorted(ACTIVE)))
            .order_by(tables.batches.c.created_at)
        )
        return [batch_from_row(row) for row in connection.execute(query)]

    @reading
    def abandoned(self, connection: Connection) -> frozenset[str]:
        """Return the ids of running batches whose workspace was archived, so that no key is left to cancel them."""
        query = (
            select(tables.batches.c.id)
            .join(tables.workspaces, tables.batches.c.workspace_id == tables.workspaces.c.id)
            .join(tables.organizations, tables.workspaces.c.organization_id == tables.organizations.c.id)
            .where(tables.batches.c.status.in_(CANCELLABLE), IS_ARCHIVED)
        )
        return frozenset(connection.execute(query).scalars())

    @reading
    def recorded_lines(self, connection: Connection, batch_id: str) -> set[int]:
        results = tables.batch_results
        query = select(results.c.line_number).where(results.c.batch_id == batch_id)
        return set(connection.execute(query).scalars())

    @reading
    def recorded_bytes(self, connection: Connection, batch_id: str) -> int:
        """Return how many bytes the results of a running batch have."""
        results = tables.batch_results
        query = select(func.coalesce(func.sum(func.length(results.c.body)), 0))
        return int(connection.execute(query.where(results.c.batch_id == batch_id)).scalar_one())

    def read_results(self, batch_id: str, first_line: int) -> list[LineResult]:
        """Some results from `first_line` on, in order; none when there are no more. For a thread."""
        results = tables.batch_results
        query = (
            select(results)
            .where(results.c.batch_id == batch_id, results.c.line_number >= first_line)
            .order_by(results.c.line_number)
            .limit(_RESULTS_AT_ONCE)
        )
        rows = self._database.run_now(lambda connection: connection.execute(query).all(), reads_only=True)
        return [
            LineResult(row.line_number, row.custom_id, row.outcome, row.request_id, row.status_code, row.body)
            for row in rows
        ]

    @transaction
    def take_lease(self, connection: Connection, holder: str, duration_s: float) -> bool:
        """Take or renew the right to run batches. False while another process has it."""
        return take_lease(connection, holder, self._lease_clock(connection), duration_s)

    @transaction
    def release_lease(self, connection: Connection, holder: str) -> None:
        release_lease(connection, holder)

    @transaction
    def record(self, connection: Connection, holder: str, results: Sequence[tuple[str, LineResult]]) -> None:
        """Write (batch id, result) pairs and count them, or raise LeaseLost."""
        check_lease(connection, holder)
        counted: Counter[tuple[str, str]] = Counter()
        for batch_id, result in results:
            if insert_once(connection, tables.batch_results, _result_values(batch_id, result)):
                counted[batch_id, result.outcome] += 1
        for (batch_id, outcome), count in counted.items():
            column = tables.batches.c[f"num_{outcome}"]
            of_batch = update(tables.batches).where(tables.batches.c.id == batch_id)
            connection.execute(of_batch.values({column: column + count}))

    @transaction
    def enter(
        self, connection: Connection, /, holder: str, batch_id: str, status: BatchStatus, **changes: Any
    ) -> Batch:
        """Move a batch to its next status. A batch that was cancelled meanwhile, or is over, stays as it is."""
        check_lease(connection, holder)
        batch = _read(connection, batch_id)
        if batch.status is BatchStatus.CANCELLING or not batch.is_active:
            return batch
        changed = msgspec.structs.replace(self._entered(batch, status), **changes)
        if not changed.is_active:
            _forget_input(connection, batch)
        return _write(connection, changed, writes_counts="counts" in changes)

    @transaction
    def current(self, connection: Connection, holder: str, batch_id: str) -> Batch:
        """Return the batch as it is now, for the process that runs it."""
        check_lease(connection, holder)
        return _read(connection, batch_id)

    @transaction
    def mark_ending(self, connection: Connection, holder: str, batch_id: str, ending: Ending) -> Batch:
        """Note why a batch stops early; the first reason is kept."""
        check_lease(connection, holder)
        batch = _read(connection, batch_id)
        if batch.ending is not None:
            return batch
        return _write(connection, msgspec.structs.replace(batch, ending=ending))

    @transaction
    def finish(
        self,
        connection: Connection,
        holder: str,
        batch: Batch,
        status: BatchStatus,
        counts: Counts,
        files: Mapping[str, StoredFile],
        hidden: Sequence[StoredFile] = (),
    ) -> None:
        """End a batch whose output is on the disk, and delete its results from the database. `files` are the files
        that the workspace will see, by the name of the detail that holds their id, and `hidden` those that only count
        in its quota."""
        check_lease(connection, holder)
        for file in (*files.values(), *hidden):
            insert_file(connection, file)
        _forget_input(connection, batch)
        ids = {name: file.id for name, file in files.items()}
        current = _read(connection, batch.id)
        details = msgspec.structs.replace(current.details, **ids)
        ended = msgspec.structs.replace(self._entered(current, status), counts=counts, details=details)
        _write(connection, ended, writes_counts=True)
        connection.execute(delete(tables.batch_results).where(tables.batch_results.c.batch_id == batch.id))

    def _entered(self, batch: Batch, status: BatchStatus) -> Batch:
        times = {status.value: self._wall_clock(), **batch.times}
        return msgspec.structs.replace(batch, status=status, times=times)


class ResultWriter:
    """Writes results in groups: each group holds the results that came while the last group was being written. One
    event loop uses the writer; `holder` is the name under which the process holds the lease."""

    def __init__(self, store: BatchStore, holder: str) -> None:
        self._store = store
        self._holder = holder
        self._waiting: list[tuple[str, LineResult, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def record(self, batch_id: str, result: LineResult) -> None:
        """Returns once the result survives a crash. Raises LeaseLost, or the error of the database."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch_id, result, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_groups())
        await done

    async def settle(self) -> None:
        """Returns once every result given so far is written or has failed."""
        while self._writer is not None:
            await asyncio.wait((self._writer,))

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
                await self._write(group)
        finally:
            self._writer = None

    async def _write(self, group: list[tuple[str, LineResult, asyncio.Future[None]]]) -> None:
        error: Exception | None = None
        try:
            await self._store.record(self._holder, [(batch_id, result) for batch_id, result, _ in group])
        except Exception as failure:
            error = failure
        for _, _, done in group:
            if done.done():  # its line was cancelled while it waited
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def _find(
    connection: Connection, workspace_id: str, batch_id: str, kind: str, *, to_change: bool = False
) -> Batch:
    query = select(tables.batches).where(
        tables.batches.c.id == batch_id,
        tables.batches.c.workspace_id == workspace_id,
        tables.batches.c.kind == kind,
    )
    row = None
    if is_blob_id(batch_id):
        row = connection.execute(query.with_for_update() if to_change else query).one_or_none()
    if row is None:
        raise NotFound(f"There is no batch {batch_id[:64]!r}.")
    return batch_from_row(row)


def _read(connection: Connection, batch_id: str) -> Batch:
    query = select(tables.batches).where(tables.batches.c.id == batch_id).with_for_update()
    return batch_from_row(connection.execute(query).one())


def _forget_input(connection: Connection, batch: Batch) -> None:
    """Give back the room of the lines of a batch that is over. Their bytes are removed afterwards."""
    connection.execute(delete(tables.files).where(tables.files.c.id == batch.input_id))


def _write(connection: Connection, batch: Batch, *, writes_counts: bool = False) -> Batch:
    """Write a batch. Counts are written only on demand, because `record` adds to them at the same time."""
    values = batch_values(batch)
    if not writes_counts:
        values = {name: value for name, value in values.items() if not name.startswith("num_")}
    connection.execute(update(tables.batches).where(tables.batches.c.id == batch.id).values(values))
    return batch


def _result_values(batch_id: str, result: LineResult) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "line_number": result.number,
        "custom_id": result.custom_id,
        "outcome": result.outcome,
        "status_code": result.status_code,
        "request_id": result.request_id,
        "body": result.body,
    }
