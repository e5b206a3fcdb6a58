"""A gateway's connection to the leader of a shared fleet: follows its directives, reports to it, and passes on orders
of operators. Without a leader the gateway continues with the last directive, which the registry keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping

from msgspec.structs import replace

from penstock.cluster.control_link import ControlLink
from penstock.cluster.control_messages import Channel, Directive
from penstock.cluster.control_plane import ReplicaTimes, replica_view
from penstock.cluster.control_socket import CurveChannel
from penstock.cluster.fleet import Fleet
from penstock.cluster.join_tokens import JoinTokens
from penstock.cluster.leadership import DIRECTIVE, LEADER, DocumentReader, LeaderDocument
from penstock.core.cluster_view import (
    ClusterView,
    ExperimentOrder,
    ExperimentView,
    HostOrder,
    PoolView,
    ReleaseOrder,
    ReleaseView,
    ReplicaOrder,
    RoutingView,
)
from penstock.core.errors import EngineUnavailable
from penstock.core.messages import EngineStats

logger = logging.getLogger(__name__)

_NO_LEADER = "No control process leads this fleet at the moment."
_HINT = "Start one with `penstock control`, or wait 10 s if one was lost just now."


class FleetLink:
    """Implements `FleetControl` and `ExperimentControl`. `take` gets the documents of the registry."""

    def __init__(self, fleet: Fleet, tokens: JoinTokens, name: str) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._reader = DocumentReader(tokens)
        self._leader: LeaderDocument | None = None
        self._link = ControlLink(self._connect, fleet, name=name)
        fleet.observers += [self._link.traffic, self._link.experiment_traffic]
        fleet.choose_revisions(self._link.choose_revision)

    def take(self, documents: Mapping[str, bytes]) -> None:
        """Follow the documents of the leader that are new."""
        taken = self._reader.take(documents)
        if (document := taken.get(LEADER)) is not None:
            self._leader = document.read(LeaderDocument)
        if (document := taken.get(DIRECTIVE)) is not None:
            directive = document.read(Directive)
            if directive is not None:
                self._link.follow(replace(directive, pools=self._link.pools))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._link.running(must_connect=False):
            yield

    @property
    def pools(self) -> tuple[PoolView, ...]:
        return self._link.pools

    async def cluster(self) -> ClusterView:
        """Return the leader's view; without a leader, that of this gateway."""
        try:
            return await self._link.cluster()
        except EngineUnavailable:
            return self._own_view()

    async def start_release(self, order: ReleaseOrder) -> ReleaseView:
        return await self._leading().start_release(order)

    async def promote_release(self, model: str | None) -> ReleaseView:
        return await self._leading().promote_release(model)

    async def roll_back_release(self, model: str | None) -> ReleaseView:
        return await self._leading().roll_back_release(model)

    async def experiments(self) -> tuple[ExperimentView, ...]:
        return await self._leading().experiments()

    async def start_experiment(self, order: ExperimentOrder) -> ExperimentView:
        return await self._leading().start_experiment(order)

    async def stop_experiment(self, model: str | None) -> ExperimentView:
        return await self._leading().stop_experiment(model)

    async def operate(self, order: HostOrder) -> ClusterView:
        return await self._leading().operate(order)

    async def order_replica(self, order: ReplicaOrder) -> ClusterView:
        return await self._leading().order_replica(order)

    def _leading(self) -> ControlLink:
        if self._leader is None:
            raise EngineUnavailable(_NO_LEADER, hint=_HINT, retry_after_s=1.0)
        return self._link

    async def _connect(self) -> Channel:
        if self._leader is None:
            raise ConnectionRefusedError(_NO_LEADER)
        return CurveChannel(self._leader.endpoint, self._tokens.client_keys())

    def _own_view(self) -> ClusterView:
        fleet = self._fleet
        now = asyncio.get_running_loop().time()
        connections = fleet.connections.by_id
        replicas = [
            replica_view(
                member,
                connections[member.id].client.stats if member.id in connections else EngineStats(),
                ReplicaTimes(),
                now,
            )
            for member in fleet.members
        ]
        routing = RoutingView(
            num_gateways=1,
            reasons=dict(fleet.reasons),
            num_prompt_tokens=fleet.routed_tokens,
            num_matched_tokens=fleet.matched_tokens,
        )
        return ClusterView(replicas=tuple(replicas), pools=(), releases=(), routing=routing, at=time.time())
