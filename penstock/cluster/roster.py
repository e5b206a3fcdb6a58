"""Who serves, as one gateway knows it: a connection to each replica, and all that comes over it but answers.

Hears of replicas by `update`, and of their load and caches by their heartbeats and KV events, and passes both on to
the router. Sends no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from penstock.cluster.fleet_stats import added_up, counters_of
from penstock.cluster.link import Connector, Link, ReplicaClient
from penstock.cluster.replica import Member
from penstock.cluster.slow_replicas import SlowReplicas
from penstock.cluster.transport import ZmqEngineClient
from penstock.control.outliers import OutlierConfig
from penstock.core.clock import Clock
from penstock.core.kv_events import KVEvent
from penstock.core.messages import EngineReady, EngineStats
from penstock.router import Replica, ReplicaState, Router

log = logging.getLogger(__name__)

RESYNC_INTERVAL_S = 1.0  # before KV events are asked for again: the new start may have been lost too
_COMING = (ReplicaState.STARTING, ReplicaState.WARMING)
_LOST = (ReplicaState.UNHEALTHY, ReplicaState.GONE)


class Roster:
    def __init__(
        self, router: Router, outliers: OutlierConfig, clock: Clock, connect: Connector | None = None
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self.links: dict[str, Link] = {}  # by replica id
        self.replicas: tuple[Replica, ...] = ()  # another object whenever something changed, and only then
        self.models: dict[str, EngineReady] = {}  # every one that was ever served, by name
        self.on_change: Callable[[], None] = lambda: None
        self.num_ejections = 0
        self.prefill_replicas: tuple[
            Replica, ...
        ] = ()  # as `replicas`: those that only compute prompts, for others
        self.prefill_router = Router()
        self._router = router
        self._clock = clock
        self._connect_to = connect or self._connect_by_zmq
        self._slow = SlowReplicas(outliers)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stats: EngineStats | None = None  # added up when asked for
        self._departed: dict[str, EngineStats] = {}  # counters of replicas that have gone, by model
        self._shared_models: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def stats(self) -> EngineStats:
        if self._stats is None:
            stats = [link.client.stats for link in self.links.values()]
            self._stats = added_up([*stats, *self._departed.values()])
        return self._stats

    def stats_of(self, model: str) -> EngineStats:
        stats = [link.client.stats for link in self.links.values() if link.member.spec.model == model]
        return added_up([*stats, self._departed[model]] if model in self._departed else stats)

    @property
    def first_ready(self) -> EngineReady | None:
        """Of the first replica that serves."""
        for member in self.members:
            link = self.links.get(member.id)
            if link is not None and link.state is ReplicaState.READY and member.role != "prefill":
                return self.models.get(member.spec.model)
        return None

    async def wait_ready(self) -> EngineReady:
        while (ready := self.first_ready) is None:
            self._changed.clear()
            await self._changed.wait()
        return ready

    def offers_choice(self, model: str) -> bool:
        """Whether several replicas serve a model, so that it matters what each has cached."""
        return model in self._shared_models

    def expects(self, model: str) -> bool:
        """Whether a replica of the model is on its way."""
        return any(
            member.spec.model == model and member.role != "prefill" and self._state(member) in _COMING
            for member in self.members
        )

    def update(self, members: Sequence[Member]) -> list[Link]:
        """Somebody came, went, or changed state. Returns the connections to those who are gone: whoever has
        requests there closes them."""
        self.members = tuple(member for member in members if member.replica.state not in _LOST)
        present = {member.id: member for member in self.members}
        lost = [link for replica_id, link in self.links.items() if replica_id not in present]
        for link in lost:
            del self.links[link.id]
            model = link.member.spec.model
            before = [self._departed[model]] if model in self._departed else []
            self._departed[model] = added_up([*before, counters_of(link.client.stats)])
        for member in self.members:
            if member.id in self.links:
                self.links[member.id].member = member
            elif member.endpoint and member.replica.state is not ReplicaState.STARTING:
                self._connect(member)
        self.refresh()
        return lost

    def refresh(self) -> None:
        """Something about the replicas changed: what is derived from them is made anew."""
        replicas = [
            (member.role, msgspec.structs.replace(member.replica, state=self._state(member)))
            for member in self.members
        ]
        self.replicas = tuple(replica for role, replica in replicas if role != "prefill")
        self.prefill_replicas = tuple(replica for role, replica in replicas if role == "prefill")
        self._router.update(self.replicas)
        self.prefill_router.update(self.prefill_replicas)
        self._learn_models()
        self._stats = None
        if self._router.policy.reads_prefixes:
            counts = Counter(member.spec.model for member in self.members)
            self._shared_models = frozenset(model for model, count in counts.items() if count > 1)
            self._subscribe()
        self._changed.set()
        self.on_change()

    def close(self) -> None:
        for link in self.links.values():
            link.client.close()
        self.links.clear()
        self._context.term()

    def _state(self, member: Member) -> ReplicaState:
        link = self.links.get(member.id)
        return ReplicaState.STARTING if link is None else link.state

    def _connect(self, member: Member) -> None:
        client = self._connect_to(
            member,
            on_ready=self.refresh,
            on_stats=partial(self._on_stats, member.id),
            on_kv_events=partial(self._on_kv_events, member.id),
        )
        self.links[member.id] = Link(member, client)
        client.start()

    def _connect_by_zmq(
        self,
        member: Member,
        *,
        on_ready: Callable[[], None],
        on_stats: Callable[[EngineStats], None],
        on_kv_events: Callable[[tuple[KVEvent, ...]], None],
    ) -> ReplicaClient:
        return ZmqEngineClient(
            member.endpoint,
            context=self._context,
            on_ready=on_ready,
            on_stats=on_stats,
            on_kv_events=on_kv_events,
        )

    def _learn_models(self) -> None:
        """Whoever built something from a description must not see it change without need: the known one stays for as
        long as any replica has it."""
        told: dict[str, list[EngineReady]] = {}
        for link in self.links.values():
            if link.client.ready is not None:
                told.setdefault(link.member.spec.model, []).append(link.client.ready)
        for model, descriptions in told.items():
            if self.models.get(model) not in descriptions:
                self.models[model] = descriptions[0]

    def _subscribe(self) -> None:
        """KV events are worth their while once there is a choice."""
        for link in self.links.values():
            if not link.reads_kv_events and self.offers_choice(link.member.spec.model):
                link.reads_kv_events = True
                link.client.subscribe_kv_events()

    def _on_stats(self, replica_id: str, stats: EngineStats) -> None:
        self._stats = None
        for router in (self._router, self.prefill_router):  # one of which knows it
            router.heartbeat(replica_id, stats)
        if len(self.links) > 1:
            now = self._clock.now()
            self._slow.heard(replica_id, stats, now)
            if self._slow.is_due(now):
                self._leave_out_slow(now)

    def _leave_out_slow(self, now: float) -> None:
        groups: dict[str, list[str]] = {}
        for link in self.links.values():
            if link.member.replica.state is ReplicaState.READY:
                groups.setdefault(f"{link.member.spec.model}\0{link.member.role}", []).append(link.id)
        ejected = self._slow.look(groups, now)
        changed = [link for link in self.links.values() if link.is_ejected != (link.id in ejected)]
        for link in changed:
            link.is_ejected = not link.is_ejected
            self.num_ejections += link.is_ejected
            log.warning("replica %s is %s", link.id, "left out: it is slow" if link.is_ejected else "back")
        if changed:
            self.refresh()

    def _on_kv_events(self, replica_id: str, events: tuple[KVEvent, ...]) -> None:
        if self._router.receive(replica_id, events) and self.prefill_router.receive(replica_id, events):
            return
        link = self.links.get(replica_id)
        now = self._clock.now()
        if link is not None and now >= link.next_resync_s:
            link.next_resync_s = now + RESYNC_INTERVAL_S
            link.num_resyncs += 1
            link.client.restart_kv_events()
