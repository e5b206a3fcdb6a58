"""Finds the servers behind a name: with `discover = "dns"`, each address that the name has is a server of its own.

A headless service of Kubernetes is such a name: its addresses are those of the pods that are ready. Knows no pool.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.cluster.external.http import Address
from penstock.cluster.external.wire import server_name
from penstock.core.config import ExternalServerConfig

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0
MAX_ADDRESSES = 256

LookUp = Callable[[str, int], Awaitable[list[str]]]


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, in order. Raises OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LOOKUP_TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for _, _, _, _, address in found})


class Discovery:
    """Resolves names again and again. A name that cannot be resolved keeps the addresses that it had."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._known: dict[str, list[str]] = {}  # by URL

    async def servers(self, configs: Sequence[ExternalServerConfig]) -> list[ExternalServerConfig]:
        """All servers that the tables stand for now."""
        groups = await asyncio.gather(*map(self._behind, configs))
        return [server for group in groups for server in group]

    async def _behind(self, config: ExternalServerConfig) -> list[ExternalServerConfig]:
        if config.discover is None:
            return [config]
        where = Address.of(config.url)
        known = self._known.get(config.url, [])
        try:
            found = await self._look_up(where.host, where.port)
        except (OSError, UnicodeError, TimeoutError) as error:
            logger.warning(
                "%s cannot be resolved, and keeps its %d addresses: %s", where.host, len(known), error
            )
            found = known
        if len(found) > MAX_ADDRESSES:
            logger.warning("%s has %d addresses, of which %d are used", where.host, len(found), MAX_ADDRESSES)
            found = found[:MAX_ADDRESSES]
        if found != known:
            logger.info("%s has the addresses %s", where.host, ", ".join(found) or "(none)")
            self._known[config.url] = found
        name = server_name(config)
        return [
            msgspec.structs.replace(config, discover=None, address=address, name=f"{name}/{address}")
            for address in found
        ]
