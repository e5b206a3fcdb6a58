"""The directory of organisations, workspaces and keys: every change is one transaction with its audit entry.

The admin API and the commands work through the directory. It does not decide who may do so. The audit log says who
changed what, with the values before and after but never a secret. An entry is written in the same transaction as the
change, so that neither exists without the other; the log line follows once both are committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, insert, select

from penstock.core.errors import Conflict, InvalidRequest
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import audit_log, keys, workspaces
from penstock.gateway.tenants.records import (
    DEFAULT_ID,
    KEYS,
    ORGANIZATIONS,
    WORKSPACES,
    IssuedKey,
    Key,
    KeyChanges,
    Kind,
    NewKey,
    Organization,
    Page,
    Record,
    Workspace,
    add,
    alter,
    check_limit,
    checked_expiry,
    checked_models,
    checked_name,
    checked_scopes,
    equals,
    find,
    new_secret,
    page,
)

logger = logging.getLogger("penstock.audit")


class Actor(msgspec.Struct, frozen=True):
    """The author of a change: a key's id, a token's subject, or the user who runs a command."""

    name: str
    request_id: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    at: float
    actor: str
    action: str  # such as key.create
    target: str  # the id of what changed
    request_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def write_entry(
    connection: Connection,
    actor: Actor,
    action: str,
    target: str,
    *,
    at: float,
    before: msgspec.Struct | None = None,
    after: msgspec.Struct | None = None,
) -> AuditEntry:
    """Write one entry of the audit log. An entry of a change keeps only the fields that differ."""
    old, new = _differences(before, after)
    values: dict[str, Any] = {
        "at": at,
        "actor": actor.name,
        "action": action,
        "target": target,
        "request_id": actor.request_id,
        "before": old,
        "after": new,
    }
    result = connection.execute(insert(audit_log).values(values))
    assert result.inserted_primary_key is not None
    return AuditEntry(id=result.inserted_primary_key[0], **values)


def announce(entry: AuditEntry) -> None:
    """Write the entry as one structured log line."""
    logger.info("audit %s", msgspec.json.encode(entry).decode())


def read_entries(
    connection: Connection, *, limit: int, before_id: int | None, where: tuple[ColumnElement[bool], ...]
) -> Page[AuditEntry]:
    """Read a page of the audit log, newest entries first."""
    query = select(audit_log).where(*where).order_by(audit_log.c.id.desc()).limit(limit + 1)
    if before_id is not None:
        query = query.where(audit_log.c.id < before_id)
    rows = [AuditEntry(**row) for row in connection.execute(query).mappings()]
    return Page(tuple(rows[:limit]), len(rows) > limit)


def _differences(
    before: msgspec.Struct | None, after: msgspec.Struct | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    old = msgspec.to_builtins(before) if before is not None else None
    new = msgspec.to_builtins(after) if after is not None else None
    if old is None or new is None:
        return old, new
    changed = [name for name in new if old[name] != new[name]]
    return {name: old[name] for name in changed}, {name: new[name] for name in changed}


T = TypeVar("T")
Archived = TypeVar("Archived", Organization, Workspace)
DEFAULT_PAGE = 20


class Directory:
    """`wall_time` gives Unix seconds. `on_change` is called after each change that was made through this object."""

    def __init__(
        self,
        database: Database,
        wall_time: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self.wall_time = wall_time
        self._on_change = on_change

    async def has_keys(self, *, only_live: bool = False) -> bool:
        """Return whether any key was ever made; with `only_live`, whether any key still works. The method does not
        create a database that does not exist."""
        if not self._database.exists:
            return False
        query = select(keys.c.id).limit(1)
        if only_live:
            is_unexpired = keys.c.expires_at.is_(None) | (keys.c.expires_at > self.wall_time())
            query = query.where(keys.c.revoked_at.is_(None), is_unexpired)
        return await self._read(lambda connection: connection.execute(query).first() is not None)

    async def find(self, kind: Kind[Record], row_id: str) -> Record:
        return await self._read(lambda connection: find(connection, kind, row_id))

    async def rename(self, actor: Actor, kind: Kind[Record], row_id: str, name: str) -> Record:
        return await self._alter(actor, kind, row_id, "update", {"name": checked_name(name)})

    async def archive(self, actor: Actor, kind: Kind[Archived], row_id: str) -> Archived:
        """End all workspaces of an organisation and their keys, or all keys of a workspace, at once. Nothing is
        deleted."""
        change = {"archived_at": self.wall_time()}
        return await self._alter(actor, kind, row_id, "archive", change, _refuse_unless_archivable)

    async def organizations(
        self, *, limit: int = DEFAULT_PAGE, after: str | None = None
    ) -> Page[Organization]:
        return await self._page(ORGANIZATIONS, limit, after)

    async def create_organization(self, actor: Actor, name: str) -> Organization:
        made = Organization(
            id=ORGANIZATIONS.new_id(), name=checked_name(name), created_at=self.wall_time(), archived_at=None
        )
        return await self._create(actor, ORGANIZATIONS, made)

    async def workspaces(
        self, *, limit: int = DEFAULT_PAGE, after: str | None = None, organization_id: str | None = None
    ) -> Page[Workspace]:
        where = equals(workspaces.c.organization_id, organization_id)
        return await self._page(WORKSPACES, limit, after, *where)

    async def create_workspace(self, actor: Actor, name: str, organization_id: str = DEFAULT_ID) -> Workspace:
        made = Workspace(
            id=WORKSPACES.new_id(),
            organization_id=organization_id,
            name=checked_name(name),
            created_at=self.wall_time(),
            archived_at=None,
        )
        return await self._create(
            actor,
            WORKSPACES,
            made,
            lambda connection: _refuse_archived(find(connection, ORGANIZATIONS, organization_id)),
        )

    async def keys(
        self, *, limit: int = DEFAULT_PAGE, after: str | None = None, workspace_id: str | None = None
    ) -> Page[Key]:
        return await self._page(KEYS, limit, after, *equals(keys.c.workspace_id, workspace_id))

    async def create_key(self, actor: Actor, new_key: NewKey) -> IssuedKey:
        """Make a key. The secret is returned here and never again."""
        now = self.wall_time()
        secret = new_secret()
        key = Key(
            id=KEYS.new_id(),
            workspace_id=new_key.workspace_id,
            name=checked_name(new_key.name),
            prefix=secret.prefix,
            scopes=checked_scopes(new_key.scopes),
            allowed_models=checked_models(new_key.allowed_models),
            best_tier=new_key.best_tier,
            caches_responses=new_key.caches_responses,
            created_at=now,
            created_by=actor.name,
            expires_at=checked_expiry(new_key.expires_at, now),
            revoked_at=None,
            last_used_at=None,
        )

        def refuse_dead_workspace(connection: Connection) -> None:
            workspace = find(connection, WORKSPACES, new_key.workspace_id)
            _refuse_archived(workspace)
            _refuse_archived(find(connection, ORGANIZATIONS, workspace.organization_id))

        await self._create(actor, KEYS, key, refuse_dead_workspace, digest=secret.digest)
        return IssuedKey(key, secret.secret)

    async def update_key(self, actor: Actor, key_id: str, changes: KeyChanges) -> Key:
        values = _checked_changes(changes, self.wall_time())
        return await self._alter(actor, KEYS, key_id, "update", values, _refuse_revoked)

    async def revoke_key(self, actor: Actor, key_id: str) -> Key:
        """Revoke a key. Every gateway refuses the key within seconds. The key stays in lists, because usage refers to
        it."""
        change = {"revoked_at": self.wall_time()}
        return await self._alter(actor, KEYS, key_id, "revoke", change, _refuse_revoked)

    async def audit(
        self, *, limit: int = DEFAULT_PAGE, before_id: int | None = None, target: str | None = None
    ) -> Page[AuditEntry]:
        check_limit(limit)
        where = equals(audit_log.c.target, target)
        return await self._read(
            lambda connection: read_entries(connection, limit=limit, before_id=before_id, where=where)
        )

    async def _page(
        self, kind: Kind[Record], limit: int, after: str | None, *where: ColumnElement[bool]
    ) -> Page[Record]:
        return await self._read(
            lambda connection: page(connection, kind, limit=limit, after=after, where=where)
        )

    async def _create(
        self,
        actor: Actor,
        kind: Kind[Record],
        record: Record,
        check: Callable[[Connection], None] | None = None,
        **unseen: Any,
    ) -> Record:
        target: str = record.id  # type: ignore[attr-defined]  # every record has one

        def work(connection: Connection) -> AuditEntry:
            if check is not None:
                check(connection)
            add(connection, kind, record, **unseen)
            action = f"{kind.action}.create"
            return write_entry(connection, actor, action, target, at=self.wall_time(), after=record)

        self._changed(await self._database.run(work))
        return record

    async def _alter(
        self,
        actor: Actor,
        kind: Kind[Record],
        row_id: str,
        verb: str,
        values: dict[str, Any],
        check: Callable[[Record], None] | None = None,
    ) -> Record:
        def work(connection: Connection) -> tuple[Record, AuditEntry]:
            before = find(connection, kind, row_id)
            if check is not None:
                check(before)
            alter(connection, kind, row_id, values)
            after = find(connection, kind, row_id)
            action = f"{kind.action}.{verb}"
            entry = write_entry(
                connection, actor, action, row_id, at=self.wall_time(), before=before, after=after
            )
            return after, entry

        altered, entry = await self._database.run(work)
        self._changed(entry)
        return altered

    def _changed(self, entry: AuditEntry) -> None:
        announce(entry)
        self._on_change()

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, reads_only=True)


def _refuse_archived(record: Organization | Workspace) -> None:
    if record.archived_at is not None:
        noun = "organisation" if isinstance(record, Organization) else "workspace"
        raise Conflict(f"The {noun} {record.id} is archived.")


def _refuse_unless_archivable(record: Organization | Workspace) -> None:
    _refuse_archived(record)
    if record.id == DEFAULT_ID:
        # Callers without a key in the database, such as those with --api-key, belong to the default workspace.
        raise Conflict("The default organisation and workspace cannot be archived.")


def _refuse_revoked(key: Key) -> None:
    if key.revoked_at is not None:
        raise Conflict(f"The key {key.id} is revoked, and stays as it is.")


def _checked_changes(changes: KeyChanges, now: float) -> dict[str, Any]:
    values = {
        name: value for name, value in msgspec.structs.asdict(changes).items() if value is not msgspec.UNSET
    }
    if not values:
        raise InvalidRequest("Nothing to change was given.")
    checks: dict[str, Callable[[Any], Any]] = {
        "name": checked_name,
        "scopes": checked_scopes,
        "allowed_models": checked_models,
        "expires_at": lambda expires_at: checked_expiry(expires_at, now),
    }
    return {name: checks[name](value) if name in checks else value for name, value in values.items()}
