"""Finds keys by their secrets, quickly: rows of the database are cached, and checked for changes every second.

A gateway reads only the number of the last change, about once a second, however many keys it serves. Every process
therefore refuses a revoked key within seconds. When the database does not answer, or not in time, known keys stay
valid for a minute; after that every key is refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sqlalchemy import Connection, bindparam, or_, select, update

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import AuthenticationFailed, Overloaded, PenstockError, StoreUnavailable
from penstock.core.identity import Principal, Scope
from penstock.core.lru import LruCache
from penstock.core.request import Tier
from penstock.gateway.metrics.table import Figures
from penstock.gateway.store.database import Database
from penstock.gateway.store.tables import keys, organizations, tenant_revision, workspaces
from penstock.gateway.tenants.records import DEFAULT_ID, PREFIX_LENGTH, could_be_id, is_secret_of, prefix_of

logger = logging.getLogger(__name__)


T = TypeVar("T")

MAX_ENTRIES = 10_000  # of those found, and again of those not found
MAX_LOADING = 256
LOOK_UP_PATIENCE_S = 10.0  # for one look-up; a database that needs longer counts as away


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
    """A bounded cache of look-ups, so that recognising a caller costs microseconds.

    The cache keeps a result, found or not, for a while, or until the owner of the cache says that it changed. Names
    that exist and names that do not exist have separate room: a flood of invented keys cannot push real keys out.
    Each look-up reads the number of the last change first. A change that commits meanwhile is then reported once
    more, rather than missed.
    """

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
        self._found = LruCache[str, _Entry[T]](max_entries)
        self._absent = LruCache[str, _Entry[T]](max_entries)
        self._loading: dict[str, asyncio.Task[T | None]] = {}
        self._revision = 0

    def __len__(self) -> int:
        return len(self._found) + len(self._absent)

    def peek(self, name: str) -> T | None:
        """Return the cached value of a name; None if it is unknown or absent. Asks no database."""
        entry = self._found.get(name)
        return None if entry is None or self._clock.now() >= entry.stale_at_s else entry.value

    async def get(self, name: str) -> T | None:
        """Return the value of a name, or None. Raises StoreUnavailable when it is not cached and cannot be looked
        up."""
        known = self.peek(name)
        if known is not None:
            return known
        entry = self._found.peek(name) or self._absent.peek(name)
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
                self._found.pop(name)
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
        if not (await asyncio.wait((task,), timeout=LOOK_UP_PATIENCE_S))[0]:
            raise StoreUnavailable("Keys cannot be looked up at the moment.", retry_after_s=1.0)
        return task.result()

    def _forget_look_up(self, name: str, task: asyncio.Task[T | None]) -> None:
        self._loading.pop(name, None)
        if not task.cancelled():
            task.exception()  # callers that still wait raise the error; asyncio logs an error that was not retrieved

    async def _load_and_keep(self, name: str) -> T | None:
        loaded = await self._load(name)
        # An answer from before a change that we already know of is true no longer than this call.
        if loaded.revision >= self._revision:
            entries, others = (
                (self._found, self._absent) if loaded.value is not None else (self._absent, self._found)
            )
            others.pop(name)
            entries.put(name, _Entry(loaded.value, self._clock.now() + self._keep_s))
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
    if revision < since:  # another database took the place of the known one
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


class AuthenticationMetrics:
    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()  # by the code of the error
        self.failed_checks = 0
        self.remembered_keys = 0

    def figures(self) -> Figures:
        return {
            "authentication_refusals": self.refusals,
            "key_check_failures": self.failed_checks,
            "remembered_keys": self.remembered_keys,
        }


CHECK_EVERY_S = 1.0  # while requests come
TRUST_S = 3.0  # after this long without a check, a request waits for one
PATIENCE_S = 2.0  # a database that needs longer than this for a check counts as away
OUTAGE_GRACE_S = 60.0
KEEP_S = 300.0  # a look-up is repeated after this long, changed or not
WRITE_USES_EVERY_S = 60.0
_NEVER = -math.inf


class KeyRing:
    """Used from one event loop. `wall_time` gives Unix seconds, for expiry; `clock` is for everything else."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock | None = None,
        wall_time: Callable[[], float] = time.time,
        metrics: AuthenticationMetrics | None = None,
    ) -> None:
        self._database = database
        self._metrics = metrics or AuthenticationMetrics()
        self._clock = clock or SystemClock()
        self._wall_time = wall_time
        self._keys: LookupCache[KnownKey] = LookupCache(self._load_key, self._clock, keep_s=KEEP_S)
        self._workspaces: LookupCache[KnownWorkspace] = LookupCache(
            self._load_workspace, self._clock, keep_s=KEEP_S
        )
        self._revision: int | None = None  # of the last change that we know of
        self._asked_at_s = _NEVER
        self._confirmed_at_s = _NEVER  # nothing had changed that we do not know of
        self._is_failing = False
        self._num_doubts = 0
        self._checking: asyncio.Task[None] | None = None
        self._uses: dict[str, float] = {}  # key id → Unix seconds, since the last write
        self._uses_timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def known(self, secret: str) -> Principal | None:
        """Return the identity that belongs to a good key that is cached; None where only `identify` can tell."""
        if self._clock.now() - self._confirmed_at_s >= CHECK_EVERY_S:
            return None
        known = self._keys.peek(secret[:PREFIX_LENGTH])
        if known is None or known.is_dead or not is_secret_of(known.digest, secret):
            return None
        now = self._wall_time()
        if known.expires_at is not None and known.expires_at <= now:
            return None
        self._remember_use(known.principal.key_id, now)
        return known.principal

    async def identify(self, secret: str) -> Principal:
        """Return the identity that belongs to a key. Raises AuthenticationFailed, and tells the reason only to the
        holder of a real key."""
        if (principal := self.known(secret)) is not None:
            return principal
        if self._clock.now() - self._confirmed_at_s >= CHECK_EVERY_S:
            await self._notice_changes()
        known = self._keys.peek(secret[:PREFIX_LENGTH]) or await self._look_up(secret)
        if known is None or not is_secret_of(known.digest, secret):
            raise AuthenticationFailed("Incorrect API key provided.")
        if known.is_dead:
            raise AuthenticationFailed("This API key was revoked.")
        now = self._wall_time()
        if known.expires_at is not None and known.expires_at <= now:
            raise AuthenticationFailed("This API key has expired.")
        self._remember_use(known.principal.key_id, now)
        return known.principal

    async def workspace(self, workspace_id: str) -> KnownWorkspace | None:
        """Return a workspace that is not archived, or None."""
        if not could_be_id(workspace_id):
            return None
        await self._notice_changes()
        known = await self._workspaces.get(workspace_id)
        return None if known is None or known.is_dead else known

    def doubt(self) -> None:
        """Note that something changed just now: the next caller waits for a check that begins after this moment."""
        self._num_doubts += 1
        self._asked_at_s = self._confirmed_at_s = _NEVER
        self._checking = None

    async def write_uses(self) -> None:
        """Write when keys were last used. Times that cannot be written now are written at the next call."""
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await self._database.run(lambda connection: write_uses(connection, uses))
        except PenstockError as error:
            # The database itself logs an outage, once.
            logger.debug("the last uses of keys could not be written yet: %s", error.message)
            self._uses = {**uses, **self._uses}

    async def close(self) -> None:
        if self._uses_timer is not None:
            self._uses_timer.cancel()
        for task in (self._checking, self._writing):
            if task is not None:
                await asyncio.wait((task,))
        await self.write_uses()

    def _remember_use(self, key_id: str, now: float) -> None:
        self._uses[key_id] = now
        if self._uses_timer is None:
            loop = asyncio.get_running_loop()
            self._uses_timer = loop.call_later(WRITE_USES_EVERY_S, self._begin_writing_uses)

    def _begin_writing_uses(self) -> None:
        self._uses_timer = None
        self._writing = asyncio.create_task(self.write_uses())

    async def _notice_changes(self) -> None:
        """Start a check when one is due, and wait for it only when the last good one is too long ago."""
        now = self._clock.now()
        is_checking = self._checking is not None and not self._checking.done()
        if now - self._asked_at_s >= CHECK_EVERY_S and not is_checking:
            self._asked_at_s = now
            self._checking = asyncio.create_task(self._check(now))
        trust_s = OUTAGE_GRACE_S if self._is_failing else TRUST_S
        if now - self._confirmed_at_s < trust_s:
            return
        if (checking := self._checking) is not None:
            await asyncio.wait((checking,), timeout=PATIENCE_S)
            if checking is self._checking and not checking.done():
                self._note_failure("the database does not answer")
        if self._clock.now() - self._confirmed_at_s >= OUTAGE_GRACE_S:
            raise StoreUnavailable("Keys cannot be checked at the moment.", retry_after_s=1.0)

    async def _check(self, asked_at_s: float) -> None:
        num_doubts = self._num_doubts
        if self._database.exists:
            try:
                changes = await self._database.run(
                    lambda connection: read_changes(connection, self._revision), reads_only=True
                )
            except PenstockError as error:
                self._metrics.failed_checks += 1
                self._note_failure(error.message)
                return
            self._apply(changes)
        self._is_failing = False
        if num_doubts == self._num_doubts:
            self._confirmed_at_s = asked_at_s

    def _note_failure(self, reason: str) -> None:
        if not self._is_failing:
            logger.warning("keys cannot be checked for changes: %s", reason)
        self._is_failing = True

    def _apply(self, changes: Changes) -> None:
        if changes.revision == self._revision:
            return
        self._revision = changes.revision
        self._keys.forget(changes.key_prefixes, changes.revision)
        self._workspaces.forget(changes.workspace_ids, changes.revision)

    async def _look_up(self, secret: str) -> KnownKey | None:
        prefix = prefix_of(secret)
        if prefix is None:
            raise AuthenticationFailed("Incorrect API key provided: no key looks like this.")
        known = await self._keys.get(prefix)
        self._metrics.remembered_keys = len(self._keys)
        return known

    async def _load_key(self, prefix: str) -> Loaded[KnownKey]:
        if not self._database.exists:
            return Loaded(None, 0)
        return await self._database.run(lambda connection: read_key(connection, prefix), reads_only=True)

    async def _load_workspace(self, workspace_id: str) -> Loaded[KnownWorkspace]:
        if not self._database.exists:
            is_default = workspace_id == DEFAULT_ID
            return Loaded(KnownWorkspace(DEFAULT_ID, is_dead=False) if is_default else None, 0)
        return await self._database.run(
            lambda connection: read_workspace(connection, workspace_id), reads_only=True
        )
