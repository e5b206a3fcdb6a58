"""One term of the leader of a shared fleet: reads the decisions of earlier leaders, then scales pools, carries out
releases and places replicas on hosts, until the lease is lost.

Everything that the leader decides is a document in the registry, or a row of the table of releases, so that the next
leader continues from there. `fleet_term` does the work of a term.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from penstock import __version__
from penstock.cluster.connections import EngineWatch
from penstock.cluster.control_socket import ControlServer
from penstock.cluster.fleet_term import LeaderSettings, Stores, Term
from penstock.cluster.host_record import HostRecord
from penstock.cluster.hosts import Hosts
from penstock.cluster.join_tokens import JoinTokens
from penstock.cluster.leadership import (
    HOST_PREFIX,
    LEADER,
    SCALING,
    DocumentReader,
    HostOrders,
    LeaderDocument,
    Leadership,
    ScalingDocument,
    Writer,
)
from penstock.cluster.registry import Follower, Registry, RegistryError
from penstock.core.cluster_view import LeaderView
from penstock.core.errors import PenstockError

logger = logging.getLogger(__name__)


class FleetLeader:
    """`open_stores` returns the stores for an epoch; they refuse to write for earlier epochs."""

    def __init__(
        self,
        settings: LeaderSettings,
        registry: Registry,
        tokens: JoinTokens,
        leadership: Leadership,
        open_stores: Callable[[int], Awaitable[Stores]],
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._tokens = tokens
        self._leadership = leadership
        self._open_stores = open_stores

    async def keep_leading(self) -> None:
        """Lead whenever this process holds the lease."""
        while True:
            epoch = await self._leadership.until_leads()
            try:
                await self.lead(epoch)
            except (RegistryError, PenstockError) as error:
                logger.error("leader %d cannot lead: %s", epoch, error)
            await self._leadership.give_up(epoch)

    async def lead(self, epoch: int) -> None:
        """Lead until the lease of this epoch is lost. Raises RegistryError, ConfigError or another PenstockError if
        the term cannot begin."""
        async with self._term(epoch) as term:
            logger.info("%s leads the fleet, as leader %d", self._settings.name, epoch)
            looking = asyncio.create_task(term.keep_looking())
            lost = asyncio.create_task(self._leadership.until_lost(epoch))
            try:
                await asyncio.wait((looking, lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (looking, lost):
                    task.cancel()
                await asyncio.gather(looking, lost, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _term(self, epoch: int) -> AsyncIterator[Term]:
        settings, tokens = self._settings, self._tokens
        writer = Writer(self._registry, tokens, self._leadership, epoch)
        async with contextlib.AsyncExitStack() as stack:
            stores = await self._open_stores(epoch)
            engines = EngineWatch(tokens.client_keys())
            stack.callback(engines.close)
            orders, scaling = await self._inherited()
            hosts = Hosts(writer, engines, orders)
            stack.push_async_callback(hosts.close)
            follower = Follower(self._registry, tokens, on_records=self._taken_by(hosts))
            await stack.enter_async_context(follower.running())
            await hosts.adopt()
            term = Term(settings, writer, hosts, stores, scaling)
            stack.push_async_callback(term.close)
            await stack.enter_async_context(term.plane.running())
            # Work that ends with this process, such as a start that it waits for, stays ordered for the next leader.
            stack.callback(setattr, hosts, "is_closing", True)
            server = ControlServer(settings.host, tokens, term.plane.answer, term.plane.forget)
            endpoint = await stack.enter_async_context(server.running())
            since = time.time()
            term.view = LeaderView(name=settings.name, epoch=epoch, version=__version__, since=since)
            leader = LeaderDocument(name=settings.name, endpoint=endpoint, version=__version__, since=since)
            await writer.write(LEADER, leader)
            yield term

    async def _inherited(self) -> tuple[dict[str, HostOrders], ScalingDocument]:
        """Return the last decisions of earlier leaders, whatever their epochs."""
        orders: dict[str, HostOrders] = {}
        scaling = ScalingDocument()
        for name, data in (await self._registry.documents()).items():
            taken = DocumentReader(self._tokens).take({name: data})
            if name not in taken:
                continue
            if name.startswith(HOST_PREFIX) and (found := taken[name].read(HostOrders)) is not None:
                orders[found.host] = found
            elif name == SCALING:
                scaling = taken[name].read(ScalingDocument) or scaling
        return orders, scaling

    def _taken_by(self, hosts: Hosts) -> Callable[[Mapping[str, HostRecord]], None]:
        def take(records: Mapping[str, HostRecord]) -> None:
            self._leadership.know(max((record.epoch for record in records.values()), default=0))
            hosts.update(records)

        return take
