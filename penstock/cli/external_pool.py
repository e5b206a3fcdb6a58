"""The external servers of one gateway process. Part of the composition root."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from penstock.cluster.external.pool import ExternalPool
from penstock.cluster.external.server import ExternalServer
from penstock.core.config import ExternalServerConfig


@contextlib.asynccontextmanager
async def open_external_pool(servers: Sequence[ExternalServerConfig]) -> AsyncIterator[ExternalPool]:
    """Every server has been looked at once when this begins, and is looked at again until it ends."""
    pool = ExternalPool([ExternalServer(server) for server in servers])
    await pool.probe()
    watching = asyncio.create_task(pool.run())
    try:
        yield pool
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await pool.close()
