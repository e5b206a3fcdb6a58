"""Reading and writing the rows of tenants, on a connection that is in a transaction. Checks nothing about callers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, Table, false, insert, select, tuple_, update

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.identity import Scope
from penstock.core.request import Tier
from penstock.gateway.store.tables import keys, organizations, tenant_revision, workspaces
from penstock.gateway.tenants.records import MAX_PAGE, Key, Organization, Page, Workspace, could_be_id

Record = TypeVar("Record", bound=msgspec.Struct)

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 20


@dataclass(frozen=True, slots=True)
class Kind(Generic[Record]):
    """A table of tenants and the records that its rows are."""

    noun: str  # in sentences
    action: str  # in the audit log, before the verb
    id_prefix: str
    table: Table
    record_of: Callable[[RowMapping], Record]

    def new_id(self) -> str:
        return f"{self.id_prefix}_{''.join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))}"


def _key_of(row: RowMapping) -> Key:
    fields = {name: row[name] for name in Key.__struct_fields__}
    fields["scopes"] = tuple(map(Scope, row["scopes"]))
    fields["best_tier"] = Tier(row["best_tier"])
    if row["allowed_models"] is not None:
        fields["allowed_models"] = tuple(row["allowed_models"])
    return Key(**fields)


ORGANIZATIONS = Kind(
    "organisation",
    "organization",
    "org",
    organizations,
    lambda row: Organization(**{name: row[name] for name in Organization.__struct_fields__}),
)
WORKSPACES = Kind(
    "workspace",
    "workspace",
    "ws",
    workspaces,
    lambda row: Workspace(**{name: row[name] for name in Workspace.__struct_fields__}),
)
KEYS = Kind("key", "key", "key", keys, _key_of)


def next_revision(connection: Connection) -> int:
    """The number of this change. Its row stays locked until the transaction ends, so numbers rise in the order of
    commits, and a reader that has seen number N has seen every change up to N."""
    bump = update(tenant_revision).values(revision=tenant_revision.c.revision + 1)
    return int(connection.execute(bump.returning(tenant_revision.c.revision)).scalar_one())


def add(connection: Connection, kind: Kind[Record], record: Record, **unseen: Any) -> None:
    """`unseen` are columns that no record shows."""
    values = {**msgspec.to_builtins(record), **unseen, "revision": next_revision(connection)}
    connection.execute(insert(kind.table).values(values))


def alter(connection: Connection, kind: Kind[Record], row_id: str, values: Mapping[str, Any]) -> None:
    changed = {**msgspec.to_builtins(values), "revision": next_revision(connection)}
    connection.execute(update(kind.table).where(kind.table.c.id == row_id).values(changed))


def find(connection: Connection, kind: Kind[Record], row_id: str) -> Record:
    row = None
    if could_be_id(row_id):
        query = select(kind.table).where(kind.table.c.id == row_id)
        row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"There is no {kind.noun} with the id {row_id[:80]!r}.")
    return kind.record_of(row)


def page(
    connection: Connection,
    kind: Kind[Record],
    *,
    limit: int,
    after: str | None,
    where: tuple[ColumnElement[bool], ...],
) -> Page[Record]:
    """At most `limit` records that were made before the one with the id `after`, newest first."""
    check_limit(limit)
    table = kind.table
    query = select(table).where(*where)
    if after is not None:
        found = select(table.c.created_at, table.c.id).where(table.c.id == after)
        place = connection.execute(found).first() if could_be_id(after) else None
        if place is None:
            raise InvalidRequest("after is not the id of anything in this list.", param="after")
        query = query.where(tuple_(table.c.created_at, table.c.id) < tuple_(*place))
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1)
    records = [kind.record_of(row) for row in connection.execute(query).mappings()]
    return Page(tuple(records[:limit]), len(records) > limit)


def equals(column: ColumnElement[str], row_id: str | None) -> tuple[ColumnElement[bool], ...]:
    """The condition that a column holds this id; None asks for no condition."""
    if row_id is None:
        return ()
    return (column == row_id,) if could_be_id(row_id) else (false(),)


def check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is a whole number from 1 to {MAX_PAGE}.", param="limit")
