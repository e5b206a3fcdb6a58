"""Lets one of several servers that share a database carry out its releases: the server that holds a lease.

A server asks for the lease while a release needs an owner, and renews it while its own release runs. When the owner
dies, another server with the same settings continues with the release after the lease has ended. While the database
is away the owner continues, because a bad candidate must not stay in service; if another server has owned the
releases meanwhile, the store refuses what the earlier owner writes, and the earlier owner gives them up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from penstock.cluster.leadership import LEADER_LEASE_S, RENEW_SHARE, Leadership
from penstock.cluster.registry import RegistryError
from penstock.cluster.releases import ReleaseService
from penstock.cluster.staged_records import RecordStore, ReleaseRecord
from penstock.core.errors import Conflict, PenstockError, StoreUnavailable

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = LEADER_LEASE_S * RENEW_SHARE


class ReleaseOwner:
    """Used from one event loop. Call `begin` first, `keep_looking` in the background, and `close` at the end."""

    def __init__(
        self,
        leadership: Leadership,
        releases: ReleaseService,
        store: RecordStore[ReleaseRecord],
        base_revisions: Mapping[str, str],
    ) -> None:
        self._leadership = leadership
        self._releases = releases
        self._store = store
        self._base_revisions = base_revisions
        # Of the lease; None while another server, or nobody, owns the releases.
        self._epoch: int | None = None
        self._num_starting = 0

    async def begin(self) -> None:
        """Show the releases that are over, and continue with an unfinished one if nobody else does."""
        over = [record for record in await self._store.load() if record.state.is_over]
        await self._releases.resume(over, dict(self._base_revisions))
        await self._look_quietly()

    async def keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look_quietly()

    @contextlib.asynccontextmanager
    async def claimed(self) -> AsyncIterator[None]:
        """Own the releases while one is started. Raises Conflict while another server owns them."""
        try:
            await self._leadership.try_once()
            if self._leadership.epoch is None:
                # A new database makes its tables first, which may take longer than the lease.
                await self._leadership.try_once()
        except RegistryError as error:
            raise StoreUnavailable(f"The database does not answer: {error}.", retry_after_s=1.0) from error
        if (epoch := self._leadership.epoch) is None:
            raise Conflict(
                "Another server on this database carries out a release now, or has ended just before.",
                hint=f"Ask that server, or wait {LEADER_LEASE_S:.0f} seconds.",
            )
        await self._follow(epoch)
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    async def look(self) -> None:
        """Take, renew or give up the lease, as the releases need it. Raises RegistryError or another error of the
        database."""
        if self._epoch is None and not await self._is_needed():
            return
        await self._leadership.try_once()
        epoch = self._leadership.epoch
        await self._follow(epoch)
        is_idle = not self._num_starting and not any(map(self._releases.is_active, self._base_revisions))
        if epoch is not None and is_idle:
            self._epoch = None
            await self._leadership.give_up(epoch)

    async def close(self) -> None:
        if (epoch := self._leadership.epoch) is not None:
            await self._leadership.give_up(epoch)

    async def _follow(self, epoch: int | None) -> None:
        """Take over the releases, continue with them, or give them up. Every owner has another epoch, one after the
        other: a gap means that another server was the owner since."""
        if self._epoch is not None and epoch not in (self._epoch, self._epoch + 1):
            logger.warning("another server has taken over the release that this server carried out")
            self._epoch = None
            await self._releases.give_up()
        is_new = self._epoch is None and epoch is not None
        self._epoch = epoch
        if is_new:
            await self._releases.resume(await self._store.load(), dict(self._base_revisions))

    async def _is_needed(self) -> bool:
        records = await self._store.load()
        return any(not record.state.is_over and record.model in self._base_revisions for record in records)

    async def _look_quietly(self) -> None:
        with contextlib.suppress(RegistryError, PenstockError):  # the database has logged why
            await self.look()
