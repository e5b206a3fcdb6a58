"""The hosts of a shared fleet, as the leader commands them: which replicas run where, started, moved and ended by
orders in the registry (`leadership`). Implements `replica.ReplicaManager`, so that pools and releases scale a fleet
of machines as they scale one machine. Decides nothing but the place of a new replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec.structs import replace

from penstock.cluster.connections import EngineWatch
from penstock.cluster.host_record import HostRecord, Offer, shares_room
from penstock.cluster.leadership import HOST_PREFIX, OWN_PREFIX, HostOrders, Slot, Writer
from penstock.cluster.replica import Member, ReplicaSpec
from penstock.core.errors import Conflict, EngineUnavailable, NotFound, PenstockError
from penstock.core.messages import EngineReady, EngineStats
from penstock.dispatch import Role
from penstock.router import Replica, ReplicaState

logger = logging.getLogger(__name__)


class Hosts:
    """`orders` are the orders of earlier leaders, by host."""

    def __init__(self, writer: Writer, engines: EngineWatch, orders: Mapping[str, HostOrders]) -> None:
        self._writer = writer
        self._engines = engines
        self.orders = dict(orders)
        self.records: Mapping[str, HostRecord] = {}
        self._num_slots = 0
        self._writing = asyncio.Lock()  # documents reach the registry in the order of their numbers
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unwritten: set[str] = set()  # hosts whose latest orders the registry has not taken
        self._moving: set[str] = set()  # replicas whose successors on other hosts are starting
        self.is_closing = False  # orders stay in place

    def update(self, records: Mapping[str, HostRecord]) -> None:
        """Take over the records of hosts."""
        for host, record in records.items():
            if host not in self.orders:
                self.orders[host] = _inferred(record)
        self.records = records
        self._engines.update([member for record in records.values() for member in record.members])
        self._tell()

    def members(self) -> tuple[Member, ...]:
        """Return the replicas that may serve. Those that `departing` returns must not be taken back, so no pool
        counts on them."""
        departing = {member.id for member in self.departing()}
        return tuple(
            member
            for host in sorted(self.records)
            for member in self._members_of(host)
            if member.id not in departing
        )

    def departing(self) -> tuple[Member, ...]:
        """Return the replicas of hosts that leave, and those that an operator moves away."""
        return tuple(
            member
            for host in sorted(self.records)
            for member in self._members_of(host)
            if self.records[host].is_leaving or self._is_sent_away(host, member.id)
        )

    def stats(self, replica_id: str) -> EngineStats:
        return self._engines.stats(replica_id)

    def ready(self, replica_id: str) -> EngineReady | None:
        return self._engines.ready(replica_id)

    def host_of(self, replica_id: str) -> str:
        return self._find(replica_id)[0]

    def offers(self) -> Iterator[Offer]:
        for record in self.records.values():
            yield from record.offers

    def room(self, model: str, role: Role) -> int:
        """Return how many replicas of one revision all hosts may have together."""
        return sum(record.room(model, role) for record in self.records.values())

    async def launch(self, spec: ReplicaSpec, *, to: str | None = None, avoid: str | None = None) -> str:
        """Start a replica where there is room, or on the host `to`, and return its id when it is ready."""
        host = self._place(spec, to, avoid)
        self._num_slots += 1
        slot = Slot(name=f"{self._writer.epoch}-{self._num_slots}", spec=spec)
        try:
            await self._order(host, slot)
            await self._until(lambda: self._has_started(host, slot.name))
        except BaseException:
            if not self.is_closing:
                self._order_later(host, replace(slot, want="leave", drain_timeout_s=0.0))
            raise
        return self._replica_in(host, slot.name) or ""

    async def drain(self, replica_id: str, timeout_s: float) -> bool:
        """Have a replica finish its requests and end. Returns False if it was resumed."""
        host, slot = self._find(replica_id)
        await self._order(host, replace(slot, want="leave", drain_timeout_s=timeout_s))
        await self._until(lambda: self._has_gone(replica_id) or self._want(host, slot.name) == "serve")
        return self._has_gone(replica_id)

    def resume(self, replica_id: str) -> bool:
        host, slot = self._find(replica_id)
        if self._replica_in(host, slot.name) is None:
            return False
        self._order_later(host, replace(slot, want="serve"))
        return True

    def convert(self, replica_id: str, role: Role) -> None:
        host, slot = self._find(replica_id)
        if (problem := self.why_role_stays(replica_id)) is not None:
            raise Conflict(problem)
        self._order_later(host, replace(slot, spec=replace(slot.spec, role=role)))

    def why_role_stays(self, replica_id: str) -> str | None:
        try:
            host, slot = self._find(replica_id)
        except NotFound as error:
            return error.message
        record = self.records[host]
        if not record.converts:
            version = f"version {record.version}" if record.version else "an earlier version"
            return f"The host {host} runs {version} of Penstock, which changes no roles."
        is_leaving = record.is_leaving or self._orders_of(host).is_draining or slot.want == "leave"
        if is_leaving or replica_id in self._moving:
            return f"The replica {replica_id!r} is about to leave {host}."
        return None

    async def stop(self, replica_id: str) -> None:
        await self.drain(replica_id, 0.0)

    def check_host(self, host: str) -> None:
        if host not in self.records:
            known = ", ".join(sorted(self.records)) or "none"
            raise NotFound(f"There is no host {host!r} in this fleet.", hint=f"The hosts are: {known}.")

    async def cordon(self, host: str, is_cordoned: bool, *, is_draining: bool = False) -> None:
        """Place no replicas on a host, or allow it again, and its own replicas with that. A draining host is
        cordoned, and the leader moves its replicas away (`move`)."""
        self.check_host(host)
        orders = self._orders_of(host)
        slots = orders.slots
        if not is_cordoned:
            slots = tuple(slot for slot in slots if not (slot.is_by_operator and slot.want == "leave"))
        self.orders[host] = replace(orders, is_cordoned=is_cordoned, is_draining=is_draining, slots=slots)
        await self._write(host)

    def check_room(self, replica_id: str, to: str | None) -> None:
        """Raise EngineUnavailable if no host, or not the host `to`, has room for this replica; NotFound for an
        unknown one."""
        host, slot = self._find(replica_id)
        self._place(slot.spec, to, host)

    async def move(self, replica_id: str, to: str | None, timeout_s: float) -> None:
        """Start another replica elsewhere, then have this one finish its requests and end."""
        host, slot = self._find(replica_id)
        self._moving.add(replica_id)
        try:
            await self.launch(slot.spec, to=to, avoid=host)
        finally:
            self._moving.discard(replica_id)
        await self._order(host, replace(slot, want="leave", drain_timeout_s=timeout_s, is_by_operator=True))

    async def end(self, replica_id: str, timeout_s: float) -> None:
        """Have a replica of a draining host finish its requests and end, though no other host has room for it."""
        host, slot = self._find(replica_id)
        await self._order(host, replace(slot, want="leave", drain_timeout_s=timeout_s, is_by_operator=True))

    async def adopt(self) -> None:
        """Write the orders of earlier leaders in this leader's name: hosts refuse orders of earlier epochs."""
        for host in self.orders:
            await self._write(host)

    async def tidy(self) -> None:
        """Forget slots that were given up and hosts that have gone, and write the orders that the registry has not
        taken."""
        for host, orders in list(self.orders.items()):
            record = self.records.get(host)
            if record is None:
                del self.orders[host]
                self._unwritten.discard(host)
                await self._writer.write(HOST_PREFIX + host, None)
                continue
            present = set(record.slots.values())
            kept = tuple(
                slot
                for slot in orders.slots
                if slot.want == "serve" or slot.name in present or _is_own(slot.name)
            )
            if kept != orders.slots:
                self.orders[host] = replace(orders, slots=kept)
                self._unwritten.add(host)
            if host in self._unwritten:
                await self._write(host)

    async def close(self) -> None:
        self.is_closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _members_of(self, host: str) -> Iterator[Member]:
        record, orders = self.records[host], {slot.name: slot for slot in self._orders_of(host).slots}
        for member in record.members:
            slot = orders.get(record.slots.get(member.id, ""))
            is_leaving = record.is_leaving or (slot is not None and slot.want == "leave")
            # The host may not have heard of its latest orders yet.
            if is_leaving and member.replica.state is ReplicaState.READY:
                member = replace(member, replica=replace(member.replica, state=ReplicaState.DRAINING))
            if slot is not None and slot.spec.role != member.role and record.converts:
                member = replace(member, spec=replace(member.spec, role=slot.spec.role))
            yield member
        present = {*record.slots.values(), *record.failures}
        for slot in orders.values():
            if slot.want == "serve" and slot.name not in present:
                yield _ordered(host, slot)

    def _is_sent_away(self, host: str, replica_id: str) -> bool:
        name = self.records[host].slots.get(replica_id, "")
        return any(
            slot.name == name and slot.want == "leave" and slot.is_by_operator
            for slot in self._orders_of(host).slots
        )

    def _place(self, spec: ReplicaSpec, to: str | None, avoid: str | None) -> str:
        """Return the host with the largest free share of its room."""
        if to is not None:
            self.check_host(to)
        rooms = {
            host: room
            for host in self.records
            if host != avoid and to in (None, host) and (room := self._room(host, spec)) is not None
        }
        free = [host for host, (num_free, _) in rooms.items() if num_free > 0]
        if not free:
            where = "No other host of the fleet" if to is None else f"The host {to}"
            takes = "has room for" if to is None else "has no room for"
            raise EngineUnavailable(
                f"{where} {takes} another replica of {spec.model!r}.",
                hint="Raise --max-replicas of its `penstock engine`, uncordon it, or add a host.",
            )
        return min(free, key=lambda host: (-rooms[host][0] / rooms[host][1], host))

    def _room(self, host: str, spec: ReplicaSpec) -> tuple[int, int] | None:
        """Return how many replicas of a revision a host has room for, and how many it may have; None: it takes
        none."""
        record = self.records[host]
        if record.is_leaving or self._orders_of(host).is_cordoned:
            return None
        room = record.room(spec.model, spec.role)
        if not room:
            return None
        taken = [
            member
            for member in self._members_of(host)
            if member.spec.model == spec.model
            and shares_room(member.role, spec.role)
            and member.replica.revision == spec.revision
        ]
        return room - len(taken), room

    def _orders_of(self, host: str) -> HostOrders:
        return self.orders.get(host) or HostOrders(host=host)

    def _find(self, replica_id: str) -> tuple[str, Slot]:
        for host, record in self.records.items():
            slots = {slot.name: slot for slot in self._orders_of(host).slots}
            for member in record.members:
                if member.id == replica_id:
                    name = record.slots.get(replica_id, "")
                    if not name:
                        raise NotFound(f"The host of the replica {replica_id!r} takes no orders.")
                    return host, slots.get(name) or Slot(name=name, spec=member.spec)
            for slot in slots.values():
                if _ordered_id(host, slot.name) == replica_id:
                    return host, slot
        raise NotFound(f"There is no replica {replica_id!r}.")

    def _replica_in(self, host: str, slot_name: str) -> str | None:
        record = self.records.get(host)
        found = {} if record is None else {slot: replica for replica, slot in record.slots.items()}
        return found.get(slot_name)

    def _want(self, host: str, slot_name: str) -> Literal["serve", "leave"]:
        for slot in self._orders_of(host).slots:
            if slot.name == slot_name:
                return slot.want
        return "serve" if _is_own(slot_name) else "leave"

    def _has_started(self, host: str, slot_name: str) -> bool:
        record = self.records.get(host)
        if record is None:
            raise EngineUnavailable(f"The host {host} has gone while a replica started there.")
        if slot_name in record.failures:
            raise EngineUnavailable(f"{host}: {record.failures[slot_name]}")
        if self._want(host, slot_name) != "serve":
            raise EngineUnavailable(f"The start of a replica on {host} was called off.")
        states = {member.id: member.replica.state for member in record.members}
        return states.get(self._replica_in(host, slot_name) or "") is ReplicaState.READY

    def _has_gone(self, replica_id: str) -> bool:
        try:
            self._find(replica_id)
        except NotFound:
            return True
        return False

    async def _order(self, host: str, slot: Slot) -> None:
        self._put(host, slot)
        await self._write(host)

    def _order_later(self, host: str, slot: Slot) -> None:
        self._put(host, slot)
        task = asyncio.create_task(self._write_calmly(host))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _put(self, host: str, slot: Slot) -> None:
        orders = self._orders_of(host)
        others = tuple(other for other in orders.slots if other.name != slot.name)
        self.orders[host] = replace(orders, slots=(*others, slot))
        self._tell()

    async def _write(self, host: str) -> None:
        async with self._writing:
            orders = self._orders_of(host)
            self._unwritten.add(host)
            await self._writer.write(HOST_PREFIX + host, orders)
            if orders == self._orders_of(host):
                self._unwritten.discard(host)

    async def _write_calmly(self, host: str) -> None:
        try:
            await self._write(host)
        except PenstockError as error:
            logger.warning("an order for %s could not be written: %s", host, error.message)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _is_own(slot_name: str) -> bool:
    return slot_name.startswith(OWN_PREFIX)


def _inferred(record: HostRecord) -> HostOrders:
    """Return the orders that a host seems to have, when the registry has lost them."""
    specs = {member.id: member.spec for member in record.members}
    slots = tuple(
        Slot(name=name, spec=specs[replica_id])
        for replica_id, name in record.slots.items()
        if replica_id in specs and not _is_own(name)
    )
    return HostOrders(host=record.host, slots=slots)


def _ordered_id(host: str, slot_name: str) -> str:
    return f"{host}/{slot_name}"


def _ordered(host: str, slot: Slot) -> Member:
    """Describe a replica that was ordered, and that its host has not begun to start."""
    spec = slot.spec
    replica = Replica(
        id=_ordered_id(host, slot.name),
        models=frozenset((spec.model,)),
        state=ReplicaState.STARTING,
        revision=spec.revision,
        region=spec.region,
    )
    return Member(replica=replica, spec=spec, endpoint="")
