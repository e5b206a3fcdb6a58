"""Batches in the database: their rows, the journal of their results, and the lease of whoever runs them.

What only the runner may do is done under its lease, in one transaction with it: a process that was thought dead and
wakes up again can write nothing. A line's result is recorded once; whoever comes second changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Table, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from penstock.core.errors import Conflict, NotFound
from penstock.gateway.batches.batch import (
    ACTIVE,
    Batch,
    BatchStatus,
    Counts,
    Ending,
    LineResult,
    batch_from_row,
    batch_values,
)
from penstock.gateway.batches.holder import is_dead
from penstock.gateway.files.files import StoredFile, insert_file
from penstock.gateway.files.folder import is_file_id
from penstock.gateway.store import tables
from penstock.gateway.store.database import Database
from penstock.gateway.store.paging import read_page

LEASE_NAME = "batches"
_RESULTS_AT_ONCE = 256


class LeaseLost(Exception):
    """Another process runs the batches now."""


class BatchStore:
    def __init__(self, database: Database, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._wall_clock = wall_clock

    @property
    def exists(self) -> bool:
        """False while nothing was ever stored, and so there can be no batch."""
        return self._database.exists

    async def create(self, batch: Batch) -> None:
        await self._database.run(
            lambda connection: connection.execute(insert(tables.batches).values(batch_values(batch)))
        )

    async def get(self, workspace_id: str, batch_id: str, kind: str) -> Batch:
        return await self._database.run(
            lambda connection: _find(connection, workspace_id, batch_id, kind), reads_only=True
        )

    async def page(
        self,
        workspace_id: str,
        kind: str,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
    ) -> tuple[Sequence[Batch], bool]:
        """Newest first, and whether there are more."""
        query = select(tables.batches).where(
            tables.batches.c.workspace_id == workspace_id, tables.batches.c.kind == kind
        )

        def read(connection: Connection) -> tuple[Sequence[Batch], bool]:
            rows, has_more = read_page(
                connection, query, tables.batches, limit=limit, after=after, before=before
            )
            return [batch_from_row(row) for row in rows], has_more

        return await self._database.run(read, reads_only=True)

    async def cancel(self, workspace_id: str, batch_id: str, kind: str) -> Batch:
        """Ask a running batch to stop. Asking again changes nothing; asking an ended one is a conflict."""

        def change(connection: Connection) -> Batch:
            batch = _find(connection, workspace_id, batch_id, kind, to_change=True)
            if batch.status is BatchStatus.CANCELLING:
                return batch
            if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                raise Conflict(f"The batch {batch_id} cannot be cancelled: it is {batch.status}.")
            cancelling = self._entered(batch, BatchStatus.CANCELLING)
            return _write(connection, msgspec.structs.replace(cancelling, ending="canceled"))

        return await self._database.run(change)

    async def delete(self, workspace_id: str, batch_id: str, kind: str) -> Batch:
        def remove(connection: Connection) -> Batch:
            batch = _find(connection, workspace_id, batch_id, kind, to_change=True)
            if batch.is_active:
                raise Conflict(f"The batch {batch_id} is still running.", hint="Cancel it first.")
            connection.execute(delete(tables.batches).where(tables.batches.c.id == batch_id))
            return batch

        return await self._database.run(remove)

    async def active(self) -> list[Batch]:
        """Every batch that is not over, oldest first."""
        query = (
            select(tables.batches)
            .where(tables.batches.c.status.in_(sorted(ACTIVE)))
            .order_by(tables.batches.c.created_at)
        )
        return await self._database.run(
            lambda connection: [batch_from_row(row) for row in connection.execute(query)], reads_only=True
        )

    async def recorded_lines(self, batch_id: str) -> set[int]:
        results = tables.batch_results
        query = select(results.c.line_number).where(results.c.batch_id == batch_id)
        return await self._database.run(
            lambda connection: set(connection.execute(query).scalars()), reads_only=True
        )

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

    async def take_lease(self, holder: str, duration_s: float) -> bool:
        """Become or stay the one who runs batches. False while another process is."""
        return await self._database.run(lambda connection: self._take_lease(connection, holder, duration_s))

    async def release_lease(self, holder: str) -> None:
        leases = tables.leases
        await self._database.run(
            lambda connection: connection.execute(
                delete(leases).where(leases.c.name == LEASE_NAME, leases.c.holder == holder)
            )
        )

    async def record(self, holder: str, results: Sequence[tuple[str, LineResult]]) -> None:
        """Write (batch id, result) pairs to the journal and count them, or raise LeaseLost."""

        def write(connection: Connection) -> None:
            _check_lease(connection, holder)
            counted: Counter[tuple[str, str]] = Counter()
            for batch_id, result in results:
                values = _result_values(batch_id, result)
                if _insert_once(connection, tables.batch_results, values):
                    counted[batch_id, result.outcome] += 1
            for (batch_id, outcome), count in counted.items():
                column = tables.batches.c[f"num_{outcome}"]
                connection.execute(
                    update(tables.batches)
                    .where(tables.batches.c.id == batch_id)
                    .values({column: column + count})
                )

        await self._database.run(write)

    async def enter(self, holder: str, batch_id: str, status: BatchStatus, **changes: Any) -> Batch:
        """Move a batch on. A cancellation that came in between wins, and what is over stays over: then the batch
        stays as it is."""

        def change(connection: Connection) -> Batch:
            _check_lease(connection, holder)
            batch = _read(connection, batch_id)
            if batch.status is BatchStatus.CANCELLING or not batch.is_active:
                return batch
            changed = msgspec.structs.replace(self._entered(batch, status), **changes)
            return _write(connection, changed, writes_counts="counts" in changes)

        return await self._database.run(change)

    async def current(self, holder: str, batch_id: str) -> Batch:
        """A batch as it is now, for whoever runs it."""

        def read(connection: Connection) -> Batch:
            _check_lease(connection, holder)
            return _read(connection, batch_id)

        return await self._database.run(read)

    async def mark_ending(self, holder: str, batch_id: str, ending: Ending) -> Batch:
        """Note why a batch stops early; the first reason stands."""

        def change(connection: Connection) -> Batch:
            _check_lease(connection, holder)
            batch = _read(connection, batch_id)
            if batch.ending is not None:
                return batch
            return _write(connection, msgspec.structs.replace(batch, ending=ending))

        return await self._database.run(change)

    async def finish(
        self,
        holder: str,
        batch: Batch,
        status: BatchStatus,
        counts: Counts,
        files: Mapping[str, StoredFile],
    ) -> None:
        """End a batch whose output is on the disk. `files` are those that the workspace will see, by the name of the
        detail that holds their id. The journal has done its work."""

        def change(connection: Connection) -> None:
            _check_lease(connection, holder)
            for file in files.values():
                insert_file(connection, file)
            ids = {name: file.id for name, file in files.items()}
            current = _read(connection, batch.id)
            details = msgspec.structs.replace(current.details, **ids)
            ended = msgspec.structs.replace(self._entered(current, status), counts=counts, details=details)
            _write(connection, ended, writes_counts=True)
            connection.execute(
                delete(tables.batch_results).where(tables.batch_results.c.batch_id == batch.id)
            )

        await self._database.run(change)

    def _entered(self, batch: Batch, status: BatchStatus) -> Batch:
        times = {status.value: self._wall_clock(), **batch.times}
        return msgspec.structs.replace(batch, status=status, times=times)

    def _take_lease(self, connection: Connection, holder: str, duration_s: float) -> bool:
        leases, now = tables.leases, self._wall_clock()
        row = connection.execute(select(leases).where(leases.c.name == LEASE_NAME)).one_or_none()
        if row is None:
            values = {"name": LEASE_NAME, "holder": holder, "expires_at": now + duration_s}
            return _insert_once(connection, leases, values)
        if row.holder != holder and row.expires_at > now and not is_dead(row.holder):
            return False
        taken = connection.execute(
            update(leases)
            .where(
                leases.c.name == LEASE_NAME,
                leases.c.holder == row.holder,
                leases.c.expires_at == row.expires_at,
            )
            .values(holder=holder, expires_at=now + duration_s)
        )
        return taken.rowcount == 1


def _check_lease(connection: Connection, holder: str) -> None:
    """Whoever holds the lease keeps others from taking it until this transaction ends."""
    leases = tables.leases
    query = select(leases.c.holder).where(leases.c.name == LEASE_NAME).with_for_update()
    if connection.execute(query).scalar_one_or_none() != holder:
        raise LeaseLost


def _find(
    connection: Connection, workspace_id: str, batch_id: str, kind: str, *, to_change: bool = False
) -> Batch:
    query = select(tables.batches).where(
        tables.batches.c.id == batch_id,
        tables.batches.c.workspace_id == workspace_id,
        tables.batches.c.kind == kind,
    )
    row = None
    if is_file_id(batch_id):
        row = connection.execute(query.with_for_update() if to_change else query).one_or_none()
    if row is None:
        raise NotFound(f"There is no batch {batch_id[:64]!r}.")
    return batch_from_row(row)


def _read(connection: Connection, batch_id: str) -> Batch:
    query = select(tables.batches).where(tables.batches.c.id == batch_id).with_for_update()
    return batch_from_row(connection.execute(query).one())


def _write(connection: Connection, batch: Batch, *, writes_counts: bool = False) -> Batch:
    """Counts are left alone unless said so: the journal adds to them at the same time."""
    values = batch_values(batch)
    if not writes_counts:
        values = {name: value for name, value in values.items() if not name.startswith("num_")}
    connection.execute(update(tables.batches).where(tables.batches.c.id == batch.id).values(values))
    return batch


def _insert_once(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Whether the row is new. Both databases know `ON CONFLICT`, each in a module of its own."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table).values(values).on_conflict_do_nothing()
    # Not every driver counts rows for an insert; all can return them.
    return connection.execute(statement.returning(*table.primary_key)).first() is not None


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
