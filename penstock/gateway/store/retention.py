"""What workspaces keep in a table: the oldest of it goes when it is too much, and so does what has expired.

A workspace may have millions of rows. They are added up in a transaction that only reads, and deleted a few at a
time: no other writer waits meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select, true, tuple_

from penstock.core.errors import StoreUnavailable
from penstock.gateway.store.database import Database

_CHECKED_SHARE = 1 / 64  # a workspace is measured again after it has added so much of what it may keep
_DELETED_AT_ONCE = 100
_PLANNED_AT_ONCE = 10_000
_SWEEP_EVERY_S = 600.0


class Retention:
    """Bounds the sum of `size` over the rows of each workspace. Rows with the same `key` are deleted together, those
    with the least `age_column` first; rows for which `may_go` is false stay."""

    def __init__(
        self,
        database: Database,
        table: Table,
        key: ColumnElement[Any],
        size: ColumnElement[int],
        age_column: ColumnElement[Any],
        max_workspace_size: int,
        *,
        may_go: ColumnElement[bool] | None = None,
    ) -> None:
        self._database = database
        self._table = table
        self._key = key
        self._size = size
        columns = tuple(table.primary_key)
        self._row_key: Any = columns[0] if len(columns) == 1 else tuple_(*columns)
        self._age_column = age_column
        self._may_go = true() if may_go is None else may_go
        self.max_workspace_size = max_workspace_size
        self._added: dict[str, int] = {}  # per workspace, since it was last measured
        self._swept_at = -math.inf

    async def note_added(self, workspace_id: str, size: int, *, kept: Collection[str] = ()) -> None:
        """Count what a committed transaction has added, and make room now and then. What was just added, `kept`,
        stays whatever its size."""
        is_known = workspace_id in self._added
        self._added[workspace_id] = added = self._added.get(workspace_id, 0) + size
        if is_known and added < self.max_workspace_size * _CHECKED_SHARE:
            return
        self._added[workspace_id] = 0
        try:
            await self._make_room(workspace_id, kept)
        except StoreUnavailable:  # what was added is stored; the next addition measures again
            self._added.pop(workspace_id, None)

    async def _make_room(self, workspace_id: str, kept: Collection[str]) -> None:
        has_more = True
        while has_more:
            plan = partial(self._surplus, workspace_id, kept)
            row_keys, has_more = await self._database.run(plan, reads_only=True)
            for start in range(0, len(row_keys), _DELETED_AT_ONCE):
                # By the primary key alone: with the workspace, SQLite would go through all its rows.
                some = self._row_key.in_(row_keys[start : start + _DELETED_AT_ONCE])
                await self._delete(self._may_go, some)

    def _surplus(
        self, workspace_id: str, kept: Collection[str], connection: Connection
    ) -> tuple[list[Any], bool]:
        """Return the primary keys of the oldest rows of a workspace that has too much, and whether the workspace must
        be measured again once they are deleted."""
        in_workspace = self._table.c.workspace_id == workspace_id
        measured = select(func.coalesce(func.sum(self._size), 0)).where(in_workspace)
        surplus = connection.execute(measured).scalar_one() - self.max_workspace_size
        if surplus <= 0:
            return [], False
        oldest = select(self._key, func.sum(self._size)).group_by(self._key)
        oldest = oldest.where(in_workspace, self._may_go, self._key.not_in(kept))
        oldest = oldest.order_by(func.min(self._age_column)).limit(_PLANNED_AT_ONCE)
        keys = []
        for key, size in connection.execute(oldest):
            if surplus <= 0:
                break
            keys.append(key)
            surplus -= size
        rows = select(*self._table.primary_key).where(in_workspace, self._may_go, self._key.in_(keys))
        found = connection.execute(rows)
        row_keys = (
            list(found.scalars()) if len(self._table.primary_key) == 1 else [tuple(row) for row in found]
        )
        return row_keys, len(keys) == _PLANNED_AT_ONCE

    async def sweep(self, now: float) -> int:
        """Delete expired rows, unless that was done a short while ago. Returns how many there were."""
        if 0.0 <= now - self._swept_at <= _SWEEP_EVERY_S:  # or else the clock was set back
            return 0
        self._swept_at = now
        expired = select(*self._table.primary_key).where(self._table.c.expires_at <= now)
        expired = expired.limit(_DELETED_AT_ONCE)
        num_deleted = num_more = await self._delete(self._row_key.in_(expired))
        while num_more == _DELETED_AT_ONCE:
            num_more = await self._delete(self._row_key.in_(expired))
            num_deleted += num_more
        return num_deleted

    async def _delete(self, *where: ColumnElement[bool]) -> int:
        """Delete rows in a transaction of their own, and leave the database to other writers for as long as that
        took: SQLite's writers look now and then whether it is free."""
        statement = delete(self._table).where(*where)
        began_s = time.monotonic()
        num_deleted = await self._database.run(lambda connection: connection.execute(statement).rowcount)
        await asyncio.sleep(time.monotonic() - began_s)
        return num_deleted
