"""Carries out the stages of a release or an experiment, one after the other, until it is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar

from penstock.core.errors import PenstockError

logger = logging.getLogger(__name__)


class StagedRun(ABC):
    """A task that works on the present stage until there is none left. A stage that fails is tried again."""

    kind: ClassVar[str]  # for the log: "release"

    def __init__(self, run_id: str, announce: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._run_id = run_id
        self._announce = announce  # returns when every gateway has heard of the present state
        self._interval_s = interval_s
        self._driver: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def present_step(self) -> Awaitable[None]:
        """Return the work of the present stage."""

    @abstractmethod
    def hold_pools(self, is_held: bool) -> None:
        """Keep the autoscaler away from the replicas, or let it continue."""

    def begin(self) -> None:
        self.hold_pools(True)
        self._driver = asyncio.create_task(self._drive())

    async def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver

    async def finished(self) -> None:
        """Wait until the run is over."""
        while not self.is_over and self._driver is not None:
            await asyncio.wait((self._driver,))

    async def _drive(self) -> None:
        while not self.is_over:
            try:
                await self.present_step()
            except PenstockError as error:
                logger.error("the %s %s tries again: %s", self.kind, self._run_id, error.message)
                await asyncio.sleep(self._interval_s)
            except Exception:
                logger.exception("the %s %s stumbled; it tries again", self.kind, self._run_id)
                await asyncio.sleep(self._interval_s)
        self.hold_pools(False)
        await self._announce()
