"""What workspaces keep in a table: the oldest of it goes when it is too much, and so does what has expired."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select, true

_CHECKED_SHARE = 1 / 64  # a workspace is measured again after it has added so much of what it may keep
_DELETED_AT_ONCE = 100
_SWEEP_EVERY_S = 600.0


class Retention:
    """Bounds the sum of `size` over the rows of each workspace. Rows with the same `key` are deleted together, those
    with the least `age_column` first; rows for which `may_go` is false stay."""

    def __init__(
        self,
        table: Table,
        key: ColumnElement[Any],
        size: ColumnElement[int],
        age_column: ColumnElement[Any],
        max_workspace_size: int,
        *,
        may_go: ColumnElement[bool] | None = None,
    ) -> None:
        self._table = table
        self._key = key
        self._size = size
        self._age_column = age_column
        self._may_go = true() if may_go is None else may_go
        self.max_workspace_size = max_workspace_size
        self._added: dict[str, int] = {}  # per workspace, since it was last measured
        self._swept_at = 0.0

    def note_added(
        self, connection: Connection, workspace_id: str, size: int, *, kept: Collection[str] = ()
    ) -> None:
        """Count what was added, and make room now and then: measuring a workspace reads all its rows. What was just
        added, `kept`, stays whatever its size."""
        is_known = workspace_id in self._added
        added = self._added.get(workspace_id, 0) + size
        is_due = not is_known or added >= self.max_workspace_size * _CHECKED_SHARE
        self._added[workspace_id] = 0 if is_due else added
        if is_due:
            self.make_room(connection, workspace_id, kept)

    def make_room(self, connection: Connection, workspace_id: str, kept: Collection[str] = ()) -> None:
        in_workspace = self._table.c.workspace_id == workspace_id
        measured = select(func.coalesce(func.sum(self._size), 0)).where(in_workspace)
        total = connection.execute(measured).scalar_one()
        may_go = in_workspace, self._may_go, self._key.not_in(kept)
        oldest = select(self._key, func.sum(self._size)).where(*may_go).group_by(self._key)
        oldest = oldest.order_by(func.min(self._age_column)).limit(_DELETED_AT_ONCE)
        while total > self.max_workspace_size and (rows := connection.execute(oldest).all()):
            keys = []
            for key, size in rows:
                if total <= self.max_workspace_size:
                    break
                keys.append(key)
                total -= size
            connection.execute(delete(self._table).where(*may_go, self._key.in_(keys)))

    def sweep(self, connection: Connection, now: float) -> None:
        """Delete expired rows, unless that was done a short while ago."""
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = now
            connection.execute(delete(self._table).where(self._table.c.expires_at <= now))
