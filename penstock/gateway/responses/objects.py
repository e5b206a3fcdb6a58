"""Objects that clients keep on the server besides responses: conversations with their items, and chat completions.

An object of another workspace looks as if it did not exist. Deleting an object deletes what belongs to it. A
workspace that keeps too much loses its oldest objects first. This module knows no wire format: bodies are bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, literal_column, select, update

from penstock.core.errors import InvalidRequest
from penstock.gateway.responses.store import HistoryBound, is_renewed
from penstock.gateway.store.database import Database, Order, QueryTurns, insert_into, reading, transaction
from penstock.gateway.store.retention import Retention
from penstock.gateway.store.tables import stored_objects as table

CONVERSATION = "conversation"  # the kind of objects that others belong to
ITEM = "item"  # the kind of those others
# Bytes that an object counts besides its body, so that a bound in bytes also bounds the number of objects.
ROW_BYTES = 512
_MAX_ID_CHARS = 128
_READ_AT_ONCE = 500
# Bound on a page with more than one object: a page is in memory several times, and is written on the event loop.
MAX_PAGE_BYTES = 8 << 20


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is the object as its API shows it, `input` what the client sent for it; both JSON."""

    id: str
    workspace_id: str
    kind: str
    created_at: float
    expires_at: float
    parent_id: str = ""
    model: str | None = None
    metadata: dict[str, str] = {}
    body: bytes = b""
    input: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input) + ROW_BYTES


class ObjectPage(msgspec.Struct, frozen=True):
    objects: list[StoredObject]
    has_more: bool


_COLUMNS = [table.c[name] for name in StoredObject.__struct_fields__]
_NUM_BYTES = func.length(table.c.body) + func.length(table.c.input) + ROW_BYTES
# The id of the object to which an object belongs; its own id if it belongs to none.
_OWNER = func.coalesce(func.nullif(table.c.parent_id, literal_column("''")), table.c.id)


class ObjectStore:
    def __init__(
        self, database: Database, *, max_workspace_bytes: int = 1 << 30, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._retention = Retention(
            database, table, _OWNER, _NUM_BYTES, table.c.position, max_workspace_bytes
        )
        self._now = now
        self._searches = QueryTurns("searches of what this workspace stores")

    async def add(self, objects: Sequence[StoredObject]) -> None:
        """Add objects of one workspace in their order. An object that is there already stays as it is, and an object
        whose parent is not there is not added."""
        if not objects:
            return
        await self._retention.sweep(self._now())
        kept = await self._add(objects)
        num_bytes = sum(each.num_bytes for each in objects)
        await self._retention.note_added(objects[0].workspace_id, num_bytes, kept=kept)

    async def find(
        self, workspace_id: str, kind: str, object_id: str, *, parent_id: str = ""
    ) -> StoredObject | None:
        if not self._could_exist(object_id, parent_id):
            return None
        named = self._named(workspace_id, kind, object_id, parent_id)
        row = await self._database.run(
            lambda connection: connection.execute(select(*_COLUMNS).where(named)).first(), reads_only=True
        )
        return None if row is None else _object(row)

    async def known_ids(
        self, workspace_id: str, kind: str, ids: Collection[str], *, parent_id: str
    ) -> set[str]:
        """Return the ids that are taken."""
        could = [object_id for object_id in ids if self._could_exist(object_id, parent_id)]
        query = select(table.c.id).where(self._of(workspace_id, kind, parent_id), table.c.id.in_(could))
        if not could:
            return set()
        return set(
            await self._database.run(
                lambda connection: connection.execute(query).scalars().all(), reads_only=True
            )
        )

    @transaction
    def change(self, connection: Connection, changed: StoredObject) -> bool:
        """Put another body and other metadata in the place of an object's. False when it is not there."""
        named = self._named(changed.workspace_id, changed.kind, changed.id, changed.parent_id)
        statement = update(table).where(named).values(body=changed.body, metadata=changed.metadata)
        return connection.execute(statement).rowcount == 1

    async def delete(self, workspace_id: str, kind: str, object_id: str, *, parent_id: str = "") -> bool:
        if not self._could_exist(object_id, parent_id):
            return False

        return await self._delete(workspace_id, kind, object_id, parent_id)

    async def children(
        self, workspace_id: str, kind: str, parent_id: str, *, keep_until: float, param: str
    ) -> list[StoredObject] | None:
        """Return all that belongs to an object, in order; None when the object is not there. Both are kept until
        about `keep_until`. Raises InvalidRequest when that is more than a conversation may have."""
        if not self._could_exist(parent_id):
            return None
        found = await self._children(workspace_id, kind, parent_id, param)
        if found is not None:
            await self._keep_longer(workspace_id, parent_id, found[0], keep_until)
        return None if found is None else found[1]

    async def num_child_bytes(
        self, workspace_id: str, kind: str, parent_id: str, *, keep_until: float
    ) -> int | None:
        """Return how many bytes belong to an object, as `children` counts them; None when the object is not there."""
        if not self._could_exist(parent_id):
            return None
        found = await self._database.run(
            lambda connection: self._family(connection, workspace_id, kind, parent_id), reads_only=True
        )
        if found is not None:
            await self._keep_longer(workspace_id, parent_id, found[0], keep_until)
        return None if found is None else found[1]

    async def page(
        self,
        workspace_id: str,
        kind: str,
        *,
        parent_id: str = "",
        limit: int,
        order: Order,
        after: str | None = None,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectPage:
        """Return the objects after the cursor that have this model and at least these metadata: fewer than `limit`
        if they are large. Raises RateLimited when too many searches of the workspace wait."""

        def read(connection: Connection) -> ObjectPage:
            of_kind = self._of(workspace_id, kind, parent_id)
            query = select(table.c.position, table.c.metadata, _NUM_BYTES).where(of_kind)
            if model is not None:
                query = query.where(table.c.model == model)
            if after is not None:
                cursor = connection.execute(
                    select(table.c.position).where(of_kind, table.c.id == after)
                ).scalar_one_or_none()
                if cursor is None:
                    raise InvalidRequest(f"The list has no {after[:64]!r} to go on from.", param="after")
                position = table.c.position
                query = query.where(position > cursor if order == "asc" else position < cursor)
            query = query.order_by(table.c.position if order == "asc" else table.c.position.desc())
            wanted = (metadata or {}).items()
            if not wanted:
                query = query.limit(limit + 1)
            matches: list[int] = []
            room, has_more = MAX_PAGE_BYTES, False
            found = connection.execute(query.execution_options(yield_per=_READ_AT_ONCE))
            for position, labels, num_bytes in found:
                if not wanted <= labels.items():
                    continue
                room -= num_bytes
                if len(matches) == limit or (matches and room < 0):
                    has_more = True
                    break
                matches.append(position)
            rows = connection.execute(
                select(table.c.position, *_COLUMNS).where(table.c.position.in_(matches))
            ).all()
            by_position = {row.position: row for row in rows}
            return ObjectPage([_object(by_position[each]) for each in matches], has_more)

        if not self._database.exists:
            return ObjectPage([], has_more=False)
        # A search may read all objects. Several at once would occupy all threads of the database, and every request
        # needs one to look up its key.
        is_search = bool(metadata) or model is not None
        async with self._searches.turn(workspace_id) if is_search else contextlib.nullcontext():
            return await self._database.run(read, reads_only=True)

    def _could_exist(self, *ids: str) -> bool:
        """Not every database can even look for a NUL."""
        return self._database.exists and all("\0" not in each and len(each) <= _MAX_ID_CHARS for each in ids)

    def _of(self, workspace_id: str, kind: str, parent_id: str) -> ColumnElement[bool]:
        return and_(
            table.c.workspace_id == workspace_id,
            table.c.kind == kind,
            table.c.parent_id == parent_id,
            table.c.expires_at > self._now(),
        )

    def _named(self, workspace_id: str, kind: str, object_id: str, parent_id: str) -> ColumnElement[bool]:
        return and_(self._of(workspace_id, kind, parent_id), table.c.id == object_id)

    @transaction
    def _delete(
        self, connection: Connection, workspace_id: str, kind: str, object_id: str, parent_id: str
    ) -> bool:
        named = self._named(workspace_id, kind, object_id, parent_id)
        exists = connection.execute(delete(table).where(named)).rowcount == 1
        if exists and kind == CONVERSATION:
            connection.execute(delete(table).where(_is_child(workspace_id, object_id)))
        return exists

    @reading
    def _children(
        self, connection: Connection, workspace_id: str, kind: str, parent_id: str, param: str
    ) -> tuple[float, list[StoredObject]] | None:
        """Return when the first of the family expires, and what belongs to the parent."""
        family = self._family(connection, workspace_id, kind, parent_id)
        if family is None:
            return None
        expires_at, num_bytes = family
        HistoryBound(param).add(num_bytes)
        of_parent = self._of(workspace_id, kind, parent_id)
        rows = connection.execute(select(*_COLUMNS).where(of_parent).order_by(table.c.position))
        return expires_at, [_object(row) for row in rows]

    def _family(
        self, connection: Connection, workspace_id: str, kind: str, parent_id: str
    ) -> tuple[float, int] | None:
        """Return when a parent or the first of its children expires, and the bytes of the children."""
        is_alive = _is_parent(workspace_id, parent_id), table.c.expires_at > self._now()
        expires_at = connection.execute(select(table.c.expires_at).where(*is_alive)).scalar()
        if expires_at is None:
            return None
        of_parent = self._of(workspace_id, kind, parent_id)
        children = select(func.min(table.c.expires_at), func.sum(_NUM_BYTES)).where(of_parent)
        first, num_bytes = connection.execute(children).one()
        return min(expires_at, expires_at if first is None else first), num_bytes or 0

    async def _keep_longer(
        self, workspace_id: str, parent_id: str, expires_at: float, keep_until: float
    ) -> None:
        if is_renewed(expires_at, keep_until, self._now()):
            await self._keep(workspace_id, parent_id, keep_until)

    @transaction
    def _keep(self, connection: Connection, workspace_id: str, parent_id: str, keep_until: float) -> None:
        is_due = table.c.expires_at > self._now(), table.c.expires_at < keep_until
        for member in (_is_parent(workspace_id, parent_id), _is_child(workspace_id, parent_id)):
            connection.execute(update(table).where(member, *is_due).values(expires_at=keep_until))

    @transaction
    def _add(self, connection: Connection, objects: Sequence[StoredObject]) -> set[str]:
        """Return the ids of what was added, and of what it belongs to."""
        workspace_id = objects[0].workspace_id
        own_ids = {each.id for each in objects if not each.parent_id}
        parent_ids = {each.parent_id for each in objects if each.parent_id} - own_ids
        known = {
            each
            for each in parent_ids
            if connection.execute(select(table.c.id).where(_is_parent(workspace_id, each))).first()
        }
        rows = [
            msgspec.structs.asdict(each)
            for each in objects
            if not each.parent_id or each.parent_id in known | own_ids
        ]
        if rows:
            connection.execute(insert_into(connection, table).on_conflict_do_nothing(), rows)
        return own_ids | known


# Both name all columns of an index up to the last one: a workspace has millions of rows, and writers wait meanwhile.
def _is_parent(workspace_id: str, parent_id: str) -> ColumnElement[bool]:
    of_kind = table.c.workspace_id == workspace_id, table.c.kind == CONVERSATION, table.c.parent_id == ""
    return and_(*of_kind, table.c.id == parent_id)


def _is_child(workspace_id: str, parent_id: str) -> ColumnElement[bool]:
    return and_(table.c.workspace_id == workspace_id, table.c.kind == ITEM, table.c.parent_id == parent_id)


def _object(row: Row[Any]) -> StoredObject:
    return StoredObject(**{name: row._mapping[name] for name in StoredObject.__struct_fields__})
