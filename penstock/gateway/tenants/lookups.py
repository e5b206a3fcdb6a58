"""What the database says about a caller: one key, one workspace, or what changed since a gateway last looked.

Each look-up reads the number of the last change first. A change that commits meanwhile is then reported once more,
rather than missed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlalchemy import Connection, bindparam, or_, select, update

from penstock.core.identity import Principal, Scope
from penstock.core.request import Tier
from penstock.gateway.store.tables import keys, organizations, tenant_revision, workspaces
from penstock.gateway.tenants.lookup_cache import Loaded

_MAX_CHANGES = 10_000
_WORKSPACE_AND_OWNER = workspaces.join(organizations, workspaces.c.organization_id == organizations.c.id)
_KEY_AND_OWNERS = keys.join(_WORKSPACE_AND_OWNER, keys.c.workspace_id == workspaces.c.id)
_IS_ARCHIVED = or_(workspaces.c.archived_at.is_not(None), organizations.c.archived_at.is_not(None))


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key as it is checked. `is_dead` once it was revoked, or what it belongs to was archived."""

    principal: Principal
    digest: bytes = field(repr=False)
    expires_at: float | None
    is_dead: bool


@dataclass(frozen=True, slots=True)
class KnownWorkspace:
    organization_id: str
    is_dead: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """The names are None when there are too many to list, or no way to tell."""

    revision: int
    key_prefixes: tuple[str, ...] | None
    workspace_ids: tuple[str, ...] | None


def read_key(connection: Connection, prefix: str) -> Loaded[KnownKey]:
    revision = _read_revision(connection)
    is_dead = or_(keys.c.revoked_at.is_not(None), _IS_ARCHIVED).label("is_dead")
    query = (
        select(keys, workspaces.c.organization_id, is_dead)
        .select_from(_KEY_AND_OWNERS)
        .where(keys.c.prefix == prefix)
    )
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return Loaded(None, revision)
    models = row["allowed_models"]
    principal = Principal(
        organization_id=row["organization_id"],
        workspace_id=row["workspace_id"],
        key_id=row["id"],
        scopes=frozenset(map(Scope, row["scopes"])),
        allowed_models=None if models is None else frozenset(models),
        best_tier=Tier(row["best_tier"]),
        caches_responses=row["caches_responses"],
    )
    return Loaded(KnownKey(principal, row["digest"], row["expires_at"], bool(row["is_dead"])), revision)


def read_workspace(connection: Connection, workspace_id: str) -> Loaded[KnownWorkspace]:
    revision = _read_revision(connection)
    query = (
        select(workspaces.c.organization_id, _IS_ARCHIVED.label("is_dead"))
        .select_from(_WORKSPACE_AND_OWNER)
        .where(workspaces.c.id == workspace_id)
    )
    row = connection.execute(query).one_or_none()
    known = None if row is None else KnownWorkspace(row.organization_id, bool(row.is_dead))
    return Loaded(known, revision)


def read_changes(connection: Connection, since: int | None) -> Changes:
    """What changed after the change number `since`; None stands for someone who remembers nothing yet."""
    revision = _read_revision(connection)
    if since is None or revision == since:
        return Changes(revision, (), ())
    if revision < since:  # another database took the place of the one we knew
        return Changes(revision, None, None)
    owners_changed = or_(workspaces.c.revision > since, organizations.c.revision > since)
    key_query = (
        select(keys.c.prefix)
        .select_from(_KEY_AND_OWNERS)
        .where(or_(keys.c.revision > since, owners_changed))
        .limit(_MAX_CHANGES + 1)
    )
    workspace_query = (
        select(workspaces.c.id)
        .select_from(_WORKSPACE_AND_OWNER)
        .where(owners_changed)
        .limit(_MAX_CHANGES + 1)
    )
    prefixes = tuple(connection.execute(key_query).scalars())
    workspace_ids = tuple(connection.execute(workspace_query).scalars())
    return Changes(
        revision,
        prefixes if len(prefixes) <= _MAX_CHANGES else None,
        workspace_ids if len(workspace_ids) <= _MAX_CHANGES else None,
    )


def write_uses(connection: Connection, uses: dict[str, float]) -> None:
    """When keys were last used. Never backwards: another gateway may have seen a later use."""
    statement = (
        update(keys)
        .where(keys.c.id == bindparam("key_id"))
        .where(or_(keys.c.last_used_at.is_(None), keys.c.last_used_at < bindparam("used_at")))
        .values(last_used_at=bindparam("used_at"))
    )
    # In one order everywhere, so that two gateways cannot wait for each other's rows.
    rows = [{"key_id": key_id, "used_at": used_at} for key_id, used_at in sorted(uses.items())]
    connection.execute(statement, rows)


def _read_revision(connection: Connection) -> int:
    return int(connection.execute(select(tenant_revision.c.revision)).scalar_one())
