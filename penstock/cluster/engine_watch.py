"""The leader's connections to all engines of a shared fleet: their heartbeats and the models that they serve. Sends
no request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.cluster.connections import Connections
from penstock.cluster.replica import Member
from penstock.cluster.transport import KeyPair
from penstock.core.messages import EngineReady, EngineStats, KVEvent
from penstock.core.plan import TokenEvent

RECONNECT_S = 1.0


class EngineWatch:
    """Implements `connections.Listener`."""

    def __init__(self, client_keys: KeyPair) -> None:
        self._connections = Connections(self, client_keys=client_keys)
        self._members: tuple[Member, ...] = ()
        self._lost: dict[str, asyncio.TimerHandle] = {}

    def update(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self._connections.update([member for member in members if member.id not in self._lost])

    def stats(self, replica_id: str) -> EngineStats:
        connection = self._connections.by_id.get(replica_id)
        return EngineStats() if connection is None else connection.client.stats

    def ready(self, replica_id: str) -> EngineReady | None:
        connection = self._connections.by_id.get(replica_id)
        return None if connection is None else connection.client.ready

    def close(self) -> None:
        for timer in self._lost.values():
            timer.cancel()
        self._connections.close()

    def on_ready(self) -> None:
        pass

    def on_stats(self, replica_id: str, stats: EngineStats) -> None:
        pass

    def on_events(self, replica_id: str, events: Sequence[TokenEvent]) -> None:
        pass

    def on_kv_events(self, replica_id: str, events: tuple[KVEvent, ...]) -> None:
        pass

    def on_lost(self, replica_id: str) -> None:
        if replica_id not in self._lost:
            loop = asyncio.get_running_loop()
            self._lost[replica_id] = loop.call_later(RECONNECT_S, self._try_again, replica_id)
            loop.call_soon(self.update, self._members)

    def _try_again(self, replica_id: str) -> None:
        del self._lost[replica_id]
        self.update(self._members)
