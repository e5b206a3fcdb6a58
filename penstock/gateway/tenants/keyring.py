"""Finds keys by their secrets, quickly: rows of the database are cached, and checked for changes every second.

A gateway asks only for the number of the last change, so that a revoked key is refused by every process within
seconds while a busy gateway reads the database about once a second, however many keys it serves. When the database
does not answer, or not in time, known keys stay valid for a minute; after that every key is refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import AuthenticationFailed, PenstockError, StoreUnavailable
from penstock.core.identity import Principal
from penstock.gateway.metrics.table import metric, metric_by
from penstock.gateway.store.database import Database
from penstock.gateway.tenants.lookups import (
    Changes,
    KnownKey,
    KnownWorkspace,
    Loaded,
    LookupCache,
    read_changes,
    read_key,
    read_workspace,
    write_uses,
)
from penstock.gateway.tenants.records import DEFAULT_ID, PREFIX_LENGTH, could_be_id, is_secret_of, prefix_of


class AuthenticationMetrics(Collector):
    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()  # by the code of the error
        self.failed_checks = 0
        self.remembered_keys = 0

    def collect(self) -> Iterator[Metric]:
        yield metric_by("authentication_refusals", self.refusals)
        yield metric("key_check_failures", self.failed_checks)
        yield metric("remembered_keys", self.remembered_keys)


logger = logging.getLogger(__name__)

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

    async def identify(self, secret: str) -> Principal:
        """Return the identity that belongs to a key. Raises AuthenticationFailed, and tells the reason only to the
        holder of a real key."""
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
        """Write when keys were last used. What cannot be written now stays for the next time."""
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
