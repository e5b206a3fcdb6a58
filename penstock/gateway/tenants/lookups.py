"""Look-ups of callers in the database, and a bounded cache of the results, so that recognising a caller costs
microseconds.

Each look-up reads the number of the last change first. A change that commits meanwhile is then reported once more,
rather than missed.

The cache keeps a result, found or not, for a while, or until the owner of the cache says that it changed. Names that
exist and names that do not exist have separate room: a flood of invented keys cannot push real keys out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sqlalchemy import Connection, bindparam, or_, select, update

from penstock.core.clock import Clock
from penstock.core.errors import Overloaded, StoreUnavailable
from penstock.core.identity import Principal, Scope
from penstock.core.request import Tier
from penstock.gateway.store.tables import keys, organizations, tenant_revision, workspaces

T = TypeVar("T")

MAX_ENTRIES = 10_000  # of those found, and again of those not found
MAX_LOADING = 256
PATIENCE_S = 10.0  # for one look-up; a database that needs longer counts as away


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """The record of a name in the database, and the number of the last change before the look-up."""

    value: T | None
    revision: int


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T | None
    stale_at_s: float


class LookupCache(Generic[T]):
    def __init__(
        self,
        load: Callable[[str], Awaitable[Loaded[T]]],
        clock: Clock,
        *,
        keep_s: float,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        self._load = load
        self._clock = clock
        self._keep_s = keep_s
        self._max_entries = max_entries
        self._found: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._absent: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._loading: dict[str, asyncio.Task[T | None]] = {}
        self._revision = 0

    def __len__(self) -> int:
        return len(self._found) + len(self._absent)

    def peek(self, name: str) -> T | None:
        """Return the cached value of a name; None if it is unknown or absent. Asks no database."""
        entry = self._found.get(name)
        if entry is None or self._clock.now() >= entry.stale_at_s:
            return None
        self._found.move_to_end(name)
        return entry.value

    async def get(self, name: str) -> T | None:
        """Return the value of a name, or None. Raises StoreUnavailable when it is not cached and cannot be looked
        up."""
        known = self.peek(name)
        if known is not None:
            return known
        entry = self._found.get(name) or self._absent.get(name)
        if entry is not None and self._clock.now() < entry.stale_at_s:
            return entry.value
        try:
            return await self._load_once(name)
        except StoreUnavailable:
            # The owner decides how long an outage may last; until then the cached value is used.
            if entry is None or entry.value is None:
                raise
            return entry.value

    def forget(self, names: Iterable[str] | None, revision: int) -> None:
        """Forget names that changed, or with None all names. Absent names are always forgotten."""
        if names is None:
            self._found.clear()
        else:
            for name in names:
                self._found.pop(name, None)
        self._absent.clear()
        self._revision = revision

    async def _load_once(self, name: str) -> T | None:
        """Callers who ask for the same name meanwhile share one look-up."""
        task = self._loading.get(name)
        if task is None:
            if len(self._loading) >= MAX_LOADING:
                raise Overloaded("Too many unknown callers are being looked up.", retry_after_s=1.0)
            task = self._loading[name] = asyncio.create_task(self._load_and_keep(name))
            task.add_done_callback(lambda task: self._forget_look_up(name, task))
        if not (await asyncio.wait((task,), timeout=PATIENCE_S))[0]:
            raise StoreUnavailable("Keys cannot be looked up at the moment.", retry_after_s=1.0)
        return task.result()

    def _forget_look_up(self, name: str, task: asyncio.Task[T | None]) -> None:
        self._loading.pop(name, None)
        if not task.cancelled():
            task.exception()  # callers who still wait raise the error; asyncio logs one that nobody has seen

    async def _load_and_keep(self, name: str) -> T | None:
        loaded = await self._load(name)
        # An answer from before a change that we already know of is true no longer than this call.
        if loaded.revision >= self._revision:
            entries, others = (
                (self._found, self._absent) if loaded.value is not None else (self._absent, self._found)
            )
            others.pop(name, None)
            entries[name] = _Entry(loaded.value, self._clock.now() + self._keep_s)
            entries.move_to_end(name)
            if len(entries) > self._max_entries:
                entries.popitem(last=False)
        return loaded.value


_MAX_CHANGES = 10_000
_WORKSPACE_AND_OWNER = workspaces.join(organizations, workspaces.c.organization_id == organizations.c.id)
_KEY_AND_OWNERS = keys.join(_WORKSPACE_AND_OWNER, keys.c.workspace_id == workspaces.c.id)
IS_ARCHIVED = or_(workspaces.c.archived_at.is_not(None), organizations.c.archived_at.is_not(None))


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
    """The changes since a change number. Names are None when there are too many to list, or when they are
    unknown."""

    revision: int
    key_prefixes: tuple[str, ...] | None
    workspace_ids: tuple[str, ...] | None


def read_key(connection: Connection, prefix: str) -> Loaded[KnownKey]:
    revision = _read_revision(connection)
    is_dead = or_(keys.c.revoked_at.is_not(None), IS_ARCHIVED).label("is_dead")
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
        select(workspaces.c.organization_id, IS_ARCHIVED.label("is_dead"))
        .select_from(_WORKSPACE_AND_OWNER)
        .where(workspaces.c.id == workspace_id)
    )
    row = connection.execute(query).one_or_none()
    known = None if row is None else KnownWorkspace(row.organization_id, bool(row.is_dead))
    return Loaded(known, revision)


def read_changes(connection: Connection, since: int | None) -> Changes:
    """Return the changes after the change number `since`; None means that the caller has cached nothing yet."""
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
    """Write when keys were last used. A later time in the database stays, because another gateway may have seen a
    later use."""
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
