"""The external servers of a gateway: probed, resolved again by name, and read again when their file changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.cluster.external.discovery import Discovery
from penstock.cluster.external.kubernetes import Kubernetes
from penstock.cluster.external.placements import Placements
from penstock.cluster.external.pool import ExternalPool
from penstock.core.config import ExternalServerConfig, ServeConfig
from penstock.core.errors import ConfigError
from penstock.core.tasks import running
from penstock.gateway.history.siblings import Siblings
from penstock.serve.config import external_servers_of
from penstock.serve.environment import kubernetes_api

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 5.0


class ExternalServers:
    """Keeps a pool up to date. Tables that cannot be used change nothing, and are logged once."""

    def __init__(self, config: ServeConfig, pool: ExternalPool, discovery: Discovery | None = None) -> None:
        self._config = config
        self._pool = pool
        self._discovery = discovery or _discovery()
        self._tables: tuple[ExternalServerConfig, ...] = config.external
        self._stamp = self._read_stamp()

    async def refresh(self) -> None:
        """Raises ConfigError for tables that cannot be used."""
        tables = self._tables
        stamp = await asyncio.to_thread(self._read_stamp)
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp  # also of an invalid file: the file is read again when it changes
            tables = await asyncio.to_thread(external_servers_of, self._config)
        await self._pool.replace(await self._discovery.servers(tables), tables)
        self._tables = tables

    async def run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            try:
                await self.refresh()
            except ConfigError as error:
                logger.error("the external servers stay as they were: %s", error.message)
            except Exception:
                logger.exception("the external servers could not be refreshed; it is tried again")

    def _read_stamp(self) -> tuple[int, int] | None:
        """Return a value that changes with the file; None if there is no file."""
        if self._config.external_file is None:
            return None
        try:
            found = Path(self._config.external_file).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


@contextlib.asynccontextmanager
async def open_external_pool(config: ServeConfig, siblings: Siblings) -> AsyncIterator[ExternalPool]:
    """Probe every external server once, then keep the pool up to date until the context ends. Processes of one server
    tell each other where they send prompts, and each of them uses its part of `max_concurrent`."""
    pool = ExternalPool([], num_processes=siblings.num_processes)
    discovery = _discovery()
    servers = ExternalServers(config, pool, discovery)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(discovery.close)
        stack.push_async_callback(pool.close)
        await servers.refresh()
        if siblings.folder is not None:
            placements = Placements(pool, siblings.folder, siblings.num_processes, siblings.number)
            placements.start()
            stack.callback(placements.close)
        await stack.enter_async_context(running(pool.run()))
        await stack.enter_async_context(running(servers.run()))
        yield pool


def _discovery() -> Discovery:
    api = kubernetes_api()
    return Discovery(kubernetes=None if api is None else Kubernetes(api))
