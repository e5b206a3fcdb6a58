"""Lists read page by page, ordered by creation. The cursor is the id of a row that the reader has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, or_

from penstock.core.errors import InvalidRequest

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
    """The rows of `query` that come after the cursor, or just before it, and whether there are more that way.

    `table` has the columns `id` and `created_at`. The cursor must be among the rows of the query."""
    ascends = (order == "asc") == (before is None)
    cursor = after if before is None else before
    if cursor is not None:
        seen = connection.execute(query.where(table.c.id == cursor)).one_or_none()
        if seen is None:
            raise InvalidRequest(f"The list has no {cursor[:64]!r} to go on from.", param="after")
        query = query.where(_beyond(table, seen, ascends=ascends))
    columns = (table.c.created_at, table.c.id)
    ordered = query.order_by(*(column if ascends else column.desc() for column in columns))
    rows = connection.execute(ordered.limit(limit + 1)).all()
    page = rows[:limit]
    return (page if before is None else page[::-1]), len(rows) > limit


def _beyond(table: Table, seen: Row[Any], *, ascends: bool) -> ColumnElement[bool]:
    time, row_id = table.c.created_at, table.c.id
    at, name = seen._mapping["created_at"], seen._mapping["id"]
    if ascends:
        return or_(time > at, and_(time == at, row_id > name))
    return or_(time < at, and_(time == at, row_id < name))
