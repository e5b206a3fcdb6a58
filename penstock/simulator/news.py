"""How gateways hear of replicas: heartbeats and KV events, late, and sometimes not at all."""

from __future__ import annotations

from functools import partial
from random import Random

from penstock.core.kv_events import KVEvent
from penstock.core.messages import EngineStats
from penstock.router import Router
from penstock.simulator.events import EventHeap, Rank
from penstock.simulator.fleet import Fleet


class News:
    def __init__(
        self, fleet: Fleet, routers: list[Router], events: EventHeap, rng: Random, *, delay_s: float
    ) -> None:
        self._fleet = fleet
        self._routers = routers
        self._events = events
        self._rng = rng
        self._delay_s = delay_s
        self.lost_share = 0.0
        self.num_resyncs = 0

    def send(self, now: float) -> None:
        """Every replica tells every gateway how it is and what changed in its cache."""
        for member in self._fleet.members.values():
            if not member.is_alive:
                continue
            stats = member.stats()
            kv_events = member.replica.cache.take_events()
            for router in self._routers:
                is_lost = bool(kv_events) and self._rng.random() < self.lost_share
                told = [] if is_lost else kv_events
                deliver = partial(self._deliver, router, member.id, stats, told)
                self._events.at(now + self._delay_s, Rank.NEWS, deliver)

    def _deliver(
        self, router: Router, replica_id: str, stats: EngineStats, kv_events: list[KVEvent], now: float
    ) -> None:
        router.heartbeat(replica_id, stats)
        if not router.receive(replica_id, kv_events):
            # Asked again with every delivery until the new start has arrived: the request may be lost too.
            member = self._fleet.members.get(replica_id)
            if member is not None and member.is_alive:
                self.num_resyncs += 1
                self._events.at(
                    now + self._delay_s, Rank.NEWS, lambda _: member.replica.cache.restart_events()
                )
