"""Finds the servers behind a name. Depending on `discover`, a server is an address of the name in the DNS, a target
of its SRV records, or a ready endpoint of a Kubernetes service.

A headless service of Kubernetes is a name in the DNS, too: its addresses are those of the pods that are ready. Knows
no pool.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.cluster.external.http import Address
from penstock.cluster.external.kubernetes import Endpoint, Kubernetes, LookupFailed
from penstock.cluster.external.srv import srv_targets
from penstock.cluster.external.wire import server_name
from penstock.core.config import ExternalServerConfig
from penstock.core.errors import ConfigError

logger = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 5.0
MAX_ADDRESSES = 256

LookUp = Callable[[str, int], Awaitable[list[str]]]
LookUpTargets = Callable[[str], Awaitable[list[tuple[str, int]]]]


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a name, in order. Raises OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LOOKUP_TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for _, _, _, _, address in found})


class Discovery:
    """Looks names up again and again. A name that cannot be looked up keeps the servers that it had."""

    def __init__(
        self,
        look_up: LookUp = look_up,
        look_up_targets: LookUpTargets = srv_targets,
        kubernetes: Kubernetes | None = None,
    ) -> None:
        self._look_up = look_up
        self._look_up_targets = look_up_targets
        self._kubernetes = kubernetes
        self._known: dict[str, list[Endpoint]] = {}  # by URL

    async def servers(self, configs: Sequence[ExternalServerConfig]) -> list[ExternalServerConfig]:
        """Return all servers that the tables stand for now. Raises ConfigError for a table that cannot be
        followed."""
        groups = await asyncio.gather(*map(self._behind, configs))
        return [server for group in groups for server in group]

    async def close(self) -> None:
        if self._kubernetes is not None:
            await self._kubernetes.close()

    async def _behind(self, config: ExternalServerConfig) -> list[ExternalServerConfig]:
        if config.discover is None:
            return [config]
        where = Address.of(config.url)
        known = self._known.get(config.url, [])
        try:
            found = await self._find(config, where)
        except (OSError, UnicodeError, TimeoutError, LookupFailed) as error:
            logger.warning(
                "%s cannot be resolved, and keeps its %d addresses: %s", where.host, len(known), error
            )
            found = known
        if len(found) > MAX_ADDRESSES:
            logger.warning("%s has %d addresses, of which %d are used", where.host, len(found), MAX_ADDRESSES)
            found = found[:MAX_ADDRESSES]
        if found != known:
            shown = ", ".join(map(_shown, found)) or "(none)"
            logger.info("%s has the addresses %s", where.host, shown)
            self._known[config.url] = found
        name = server_name(config)
        return [
            msgspec.structs.replace(
                config, discover=None, address=each.address, port=each.port, name=f"{name}/{_shown(each)}"
            )
            for each in found
        ]

    async def _find(self, config: ExternalServerConfig, where: Address) -> list[Endpoint]:
        if config.discover == "dns":
            return [Endpoint(address) for address in await self._look_up(where.host, where.port)]
        if config.discover == "srv":
            return await self._behind_records(where.host)
        if self._kubernetes is None:
            raise ConfigError(
                f"The external server {config.url} is to be found by Kubernetes, but this process runs in no "
                "cluster: KUBERNETES_SERVICE_HOST is not set."
            )
        return await self._kubernetes.endpoints(where.host, where.port if where.names_port else None)

    async def _behind_records(self, host: str) -> list[Endpoint]:
        """Return the addresses of all targets, each with the target's port."""
        targets = await self._look_up_targets(host)
        addresses = await asyncio.gather(*(self._look_up(name, port) for name, port in targets))
        return sorted(
            {
                Endpoint(address, port)
                for (_, port), each in zip(targets, addresses, strict=True)
                for address in each
            }
        )


def _shown(endpoint: Endpoint) -> str:
    if endpoint.port is None:
        return endpoint.address
    host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    return f"{host}:{endpoint.port}"
