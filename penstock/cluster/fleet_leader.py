"""One term of the leader of a shared fleet: reads the decisions of earlier leaders, then scales pools, carries out
releases and places replicas on hosts, until the lease is lost.

Everything that the leader decides is a document in the registry, or a row of the table of releases, so that the
next leader continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock import __version__
from penstock.cluster.connections import EngineWatch
from penstock.cluster.control_messages import ControlServer, Directive
from penstock.cluster.control_plane import ControlPlane, ReplicaTimes, replica_view
from penstock.cluster.host_record import HostRecord, JoinTokens, Offer
from penstock.cluster.hosts import Hosts
from penstock.cluster.leadership import (
    DIRECTIVE,
    HOST_PREFIX,
    LEADER,
    SCALING,
    SERVING,
    DocumentReader,
    HostOrders,
    LeaderDocument,
    Leadership,
    ScalingDocument,
    Serving,
    Writer,
)
from penstock.cluster.registry import Follower, Registry, RegistryError
from penstock.cluster.replica import ReplicaSpec
from penstock.cluster.role_scaling import autoscaling, scaling_of_role
from penstock.cluster.scaling import PoolScaler
from penstock.cluster.staged_records import ExperimentRecord, RecordStore, ReleaseRecord
from penstock.control.autoscaler import ROLES, AutoscalerConfig
from penstock.core.cluster_view import ClusterView, HostOrder, HostView, LeaderView, ReplicaView
from penstock.core.config import ScalingConfig
from penstock.core.errors import InvalidRequest, PenstockError, Superseded
from penstock.dispatch import Role
from penstock.router import ReplicaState

logger = logging.getLogger(__name__)


LOOK_INTERVAL_S = 1.0
SETTLE_S = 2.0  # for the first reports of all gateways
DIRECTIVES_PER_EPOCH = 1 << 20  # so that the numbers of directives rise from leader to leader


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    name: str
    host: str  # the address that gateways reach
    scaling: ScalingConfig
    drain_timeout_s: float
    look_interval_s: float = LOOK_INTERVAL_S
    settle_s: float = SETTLE_S


class Stores(NamedTuple):
    """The stores that a leader writes for the next one."""

    releases: RecordStore[ReleaseRecord]
    experiments: RecordStore[ExperimentRecord]


class Term:
    """The work of a leader: pools that follow the offers of hosts, replicas that move, and the documents that the
    next leader continues with. `control` decides about scaling and releases, `hosts` carries orders out. `scaling`
    is the state that an earlier leader left."""

    def __init__(
        self, settings: LeaderSettings, writer: Writer, hosts: Hosts, stores: Stores, scaling: ScalingDocument
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._hosts = hosts
        self._inherited = scaling
        self._decided: object = None
        self._bases: dict[str, ReplicaSpec] = {}  # by pool: the spec of the hosts' own settings
        self._serving: dict[str, ReplicaSpec] | None = None  # as it was last written
        self._moving: dict[str, asyncio.Task[None]] = {}  # by replica
        self._settled_s = time.monotonic() + settings.settle_s
        self.view = LeaderView(name=settings.name, epoch=writer.epoch)
        self.plane = ControlPlane(
            hosts,
            [],
            stores.releases,
            _by_name,
            drain_timeout_s=settings.drain_timeout_s,
            look_interval_s=settings.look_interval_s,
            first_directive=writer.epoch * DIRECTIVES_PER_EPOCH,
            publish=self._publish,
            operate=self.operate,
            described=self._described,
            is_looking=lambda: time.monotonic() >= self._settled_s,
            experiments=stores.experiments,
        )

    async def keep_looking(self) -> None:
        """Follow the hosts, until this process no longer leads."""
        is_announced = False
        while True:
            try:
                await self._look()
                if not is_announced:
                    await self.plane.announce()
                    is_announced = True
            except Superseded as error:
                logger.warning("leader %d stops: %s", self._writer.epoch, error.message)
                return
            except PenstockError as error:
                logger.warning("leader %d tries again: %s", self._writer.epoch, error.message)
            except Exception:  # one failure must not end all decisions
                logger.exception("leader %d stumbled", self._writer.epoch)
            await asyncio.sleep(self._settings.look_interval_s)

    async def operate(self, order: HostOrder) -> None:
        """Carry out an order of an operator about hosts."""
        hosts = self._hosts
        match order.action:
            case "cordon":
                await hosts.cordon(order.target, True)
            case "uncordon":
                await hosts.cordon(order.target, False)
            case "drain":
                await hosts.cordon(order.target, True, is_draining=True)
                self._empty_draining_hosts()
            case "move":
                host = hosts.host_of(order.target)
                if host == order.to:
                    raise InvalidRequest(f"The replica {order.target} is on {host} already.", param="to")
                hosts.check_room(order.target, order.to)
                work = hosts.move(order.target, order.to, self._settings.drain_timeout_s)
                self._begin(order.target, work)

    async def close(self) -> None:
        tasks = tuple(self._moving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        await self._follow_offers()
        await self._write_serving()
        self._replace_old_revisions()
        self._empty_draining_hosts()
        await self._hosts.tidy()
        await self._keep_scaling()

    async def _follow_offers(self) -> None:
        """Have a pool for every model that hosts offer, within the room that they have. A model with roles has a
        prefill and a decode pool, also while hosts offer one of the roles only: replicas may change their roles."""
        offers: dict[tuple[str, bool], list[Offer]] = {}  # by model, and whether its replicas have roles
        for offer in self._hosts.offers():
            offers.setdefault((offer.spec.model, offer.spec.role != "both"), []).append(offer)
        pools = {pool.key: pool for pool in self.plane.pools}
        for (model, has_roles), found in offers.items():
            roles: tuple[Role, ...] = ROLES if has_roles else ("both",)
            specs = [self._base(found, role) for role in roles]
            room = self._hosts.room(model, roles[0])
            scaling = self._settings.scaling
            whole = _bounds(scaling, len(roles), sum(offer.replicas for offer in found), room)
            wanted = [(spec, scaling_of_role(whole, scaling, spec)) for spec in specs]
            if f"{model}/{roles[0]}" not in pools:
                for pool in await self.plane.add_pools(wanted):
                    if (kept := self._inherited.pools.get(pool.key)) is not None:
                        pool.restore(kept, asyncio.get_running_loop().time(), time.time())
                continue
            for spec, config in wanted:
                pools[f"{model}/{spec.role}"].configure(config)

    def _base(self, offers: list[Offer], role: Role) -> ReplicaSpec:
        """Return the spec of a role in the settings of most hosts."""
        found = [offer for offer in offers if offer.spec.role == role] or offers
        key = f"{found[0].spec.model}/{role}"
        self._bases[key] = base = replace(_usual(found, self._bases.get(key)), role=role)
        return base

    async def _write_serving(self) -> None:
        """Tell hosts that start of promoted revisions."""
        specs = {
            Serving.key(base): pool.spec
            for pool in self.plane.pools
            if (base := self._bases.get(pool.key)) is not None and base.revision != pool.spec.revision
        }
        if specs != self._serving:
            await self._writer.write(SERVING, Serving(specs=specs))
            self._serving = specs

    def _replace_old_revisions(self) -> None:
        """Replace replicas of a revision that a promoted one has replaced: their host started during the release."""
        for pool in self.plane.pools:
            base = self._bases.get(pool.key)
            if base is None or base.revision == pool.spec.revision or pool.is_releasing:
                continue
            for member in pool.serving(base.revision):
                if member.replica.state is ReplicaState.READY:
                    self._begin(member.id, self._replace(pool, member.id))

    async def _replace(self, pool: PoolScaler, replica_id: str) -> None:
        await self._hosts.launch(pool.spec, to=self._hosts.host_of(replica_id))
        await self._hosts.drain(replica_id, self._settings.drain_timeout_s)

    def _empty_draining_hosts(self) -> None:
        for host, orders in self._hosts.orders.items():
            record = self._hosts.records.get(host)
            if record is None or not orders.is_draining:
                continue
            wants = {slot.name: slot.want for slot in orders.slots}
            for member in record.members:
                if wants.get(record.slots.get(member.id, ""), "serve") == "serve":
                    self._begin(member.id, self._empty(member.id))

    async def _empty(self, replica_id: str) -> None:
        timeout_s = self._settings.drain_timeout_s
        try:
            await self._hosts.move(replica_id, None, timeout_s)
        except Superseded:
            raise
        except PenstockError as error:
            logger.warning("the replica %s ends without a successor: %s", replica_id, error.message)
            await self._hosts.end(replica_id, timeout_s)

    def _begin(self, replica_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Work on one replica, unless that has begun already."""
        if replica_id in self._moving:
            work.close()
            return
        task = self._moving[replica_id] = asyncio.create_task(_calmly(work))
        task.add_done_callback(lambda _: self._moving.pop(replica_id, None))

    async def _keep_scaling(self) -> None:
        decided = {pool.key: pool.decided for pool in self.plane.pools}
        if decided != self._decided:
            now, wall_s = asyncio.get_running_loop().time(), time.time()
            kept = {pool.key: pool.kept(now, wall_s) for pool in self.plane.pools}
            await self._writer.write(SCALING, ScalingDocument({**self._inherited.pools, **kept}))
            self._decided = decided

    async def _publish(self, directive: Directive) -> None:
        await self._writer.write(DIRECTIVE, replace(directive, pools=()))

    def _described(self, view: ClusterView) -> ClusterView:
        names: dict[str, str] = {}
        roles: dict[str, str] = {}  # in which gateways use the replicas now
        for name, record in self._hosts.records.items():
            names |= {member.id: name for member in record.members}
            roles |= {member.id: member.role for member in record.members}
        now = asyncio.get_running_loop().time()
        departing = [
            replica_view(member, self._hosts.stats(member.id), ReplicaTimes(), now)
            for member in self._hosts.departing()
        ]
        return replace(
            view,
            replicas=tuple(
                _placed(each, names.get(each.id, ""), roles.get(each.id, each.role))
                for each in (*view.replicas, *departing)
            ),
            hosts=tuple(map(self._host, sorted(self._hosts.records))),
            leader=self.view,
        )

    def _host(self, name: str) -> HostView:
        record = self._hosts.records[name]
        orders = self._hosts.orders.get(name)
        state = "ready"
        if record.is_leaving:
            state = "leaving"
        elif orders is not None and orders.is_cordoned:
            state = "draining" if orders.is_draining else "cordoned"
        return HostView(
            name=name,
            state=state,
            num_replicas=len(record.members),
            max_replicas=sum(
                record.room(model, "decode" if has_roles else "both")
                for model, has_roles in {
                    (each.spec.model, each.spec.role != "both") for each in record.offers
                }
            ),
            version=record.version,
            epoch=record.epoch,
        )


def _placed(replica: ReplicaView, host: str, role: str) -> ReplicaView:
    """Return the view of a replica with its host and the role that its host reports."""
    return replace(replica, host=host, role=role, next_role=replica.role if replica.role != role else None)


async def _calmly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except PenstockError as error:
        logger.warning("a replica stays where it is: %s", error.message)


async def _by_name(name: str) -> str:
    """Leave weights to the hosts: each finds them on its own machine."""
    return name


def _bounds(scaling: ScalingConfig, num_pools: int, num_started: int, room: int) -> AutoscalerConfig | None:
    """Return the bounds of a model. Without bounds of the control process, these are the replicas that hosts start by
    themselves, and those that hosts have room for."""
    floor = num_pools * (scaling.min_replicas or 0)
    if scaling.max_replicas is None and max(room, floor) > num_started:
        scaling = replace(scaling, max_replicas=max(room, floor))
    return autoscaling(scaling, num_started)


def _usual(offers: list[Offer], before: ReplicaSpec | None) -> ReplicaSpec:
    """Return the spec of most hosts; the earlier spec, if as many hosts have that one."""
    counts = Counter(offer.spec.revision for offer in offers)
    if before is not None and before.revision in counts:
        counts[before.revision] += 1
    revision = counts.most_common(1)[0][0]
    return next(offer.spec for offer in offers if offer.spec.revision == revision)


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
