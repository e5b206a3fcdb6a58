"""Elects the control process that decides for a shared fleet: the process that holds a lease in the registry.

A leader renews its lease. A leader that could not renew it in time, because the registry is away or because the
process was paused, stops by its own clock before another may take over. A pause between that check and an order is
what epochs are for: the registry refuses documents of an earlier epoch, and so do their readers (`documents`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from penstock.cluster.documents import sealed
from penstock.cluster.join_tokens import JoinTokens
from penstock.cluster.registry import Registry, RegistryError
from penstock.core.errors import StoreUnavailable, Superseded
from penstock.core.tasks import end_task

logger = logging.getLogger(__name__)

_SUPERSEDED = "Another control process leads this fleet now."
LEADER_LEASE_S = 5.0
RENEW_SHARE = 0.25  # of the lease, between two renewals and between two tries of a candidate
SAFETY_SHARE = 0.2  # of the lease: how long before its end a leader stops


class Leadership:
    """One candidate. `epoch` is None unless this process leads now."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        *,
        lease_s: float = LEADER_LEASE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self.name = name
        self._lease_s = lease_s
        self._now = now
        self._epoch: int | None = None
        self._valid_until_s = 0.0
        self._known_epoch = 0
        self._changed = asyncio.Event()
        self._is_away = False

    @property
    def epoch(self) -> int | None:
        return self._epoch if self._now() < self._valid_until_s else None

    @property
    def latest_epoch(self) -> int:
        """Return the latest epoch that this process knows of, whether it leads or not; 0 before the first."""
        return self._known_epoch

    def know(self, epoch: int) -> None:
        """Learn of an epoch that a host has obeyed. The next lease must have a greater one."""
        self._known_epoch = max(self._known_epoch, epoch)
        if self._epoch is not None and epoch > self._epoch:
            self._lose("another leader has taken over")

    async def until_leads(self) -> int:
        while (epoch := self.epoch) is None:
            await self._changed.wait()
        return epoch

    async def until_lost(self, epoch: int) -> None:
        """Wait until the lease of this epoch is over."""
        while self.epoch == epoch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._valid_until_s - self._now())):
                    await self._changed.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Campaign until the context ends, and then resign. A registry that cannot be used is waited for."""
        campaigning = asyncio.create_task(self._campaign())
        try:
            yield
        finally:
            await end_task(campaigning)
            self._lose("this process ends")
            with contextlib.suppress(RegistryError):
                await self._registry.resign(self.name)

    async def give_up(self, epoch: int) -> None:
        """End a term. The next one of this process gets another epoch: documents of one epoch come from one term."""
        if self._epoch == epoch:
            self._lose("the term is over")
            with contextlib.suppress(RegistryError):
                await self._registry.resign(self.name)

    async def _campaign(self) -> None:
        while True:
            try:
                await self.try_once()
                self._is_away = False
            except RegistryError as error:
                if not self._is_away:
                    logger.warning("the registry does not answer, and nobody can lead: %s", error)
                self._is_away = True
            await asyncio.sleep(self._lease_s * RENEW_SHARE)

    async def try_once(self) -> None:
        """Take the lease, or renew it. Raises RegistryError."""
        if self._epoch is not None and self.epoch is None:
            await self.give_up(self._epoch)
        asked_s = self._now()  # the lease begins later than this
        epoch = await self._registry.lead(self.name, self._lease_s, self._known_epoch)
        if epoch is None or epoch < self._known_epoch:
            self._lose("another process leads")
            return
        self._known_epoch = max(self._known_epoch, epoch)
        self._valid_until_s = asked_s + self._lease_s * (1.0 - SAFETY_SHARE)
        if epoch != self._epoch:
            self._epoch = epoch
            self._tell()

    def _lose(self, why: str) -> None:
        if self._epoch is not None:
            logger.info("leader %d steps down: %s", self._epoch, why)
            self._epoch = None
            self._valid_until_s = 0.0
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Writer:
    """Writes the documents of one leader, in one epoch."""

    def __init__(self, registry: Registry, tokens: JoinTokens, leadership: Leadership, epoch: int) -> None:
        self._registry = registry
        self._tokens = tokens
        self._leadership = leadership
        self.epoch = epoch
        self._number = 0

    async def write(self, name: str, body: Any) -> None:
        """Write a document; None removes it. Raises Superseded when this process no longer leads, and
        StoreUnavailable when the registry does not answer."""
        if self._leadership.epoch != self.epoch:
            raise Superseded(_SUPERSEDED)
        self._number += 1
        data = None if body is None else sealed(name, self.epoch, self._number, body, self._tokens)
        try:
            is_written = await self._registry.write(name, data, self.epoch)
        except RegistryError as error:
            raise StoreUnavailable(f"The registry does not answer: {error}.", retry_after_s=1.0) from error
        if not is_written:
            raise Superseded(_SUPERSEDED)
