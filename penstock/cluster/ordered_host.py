"""Carries out the orders of the leader on one host of engines. The supervisor keeps the replicas alive; this module
says which there should be.

Orders are a state to reach, not steps: a host that missed some, or gets the same ones twice, ends in the same state.
A host without a leader continues with the last orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from msgspec.structs import replace

from penstock import __version__
from penstock.cluster.host_record import Offer, shares_room
from penstock.cluster.leadership import (
    HOST_PREFIX,
    OWN_PREFIX,
    SERVING,
    DocumentReader,
    HostOrders,
    Serving,
    Slot,
)
from penstock.cluster.registry import Publisher
from penstock.cluster.replica import Member, ReplicaSpec
from penstock.cluster.supervisor import Supervisor
from penstock.core.errors import NotFound, PenstockError
from penstock.dispatch import Role

logger = logging.getLogger(__name__)

Localise = Callable[[ReplicaSpec], Awaitable[ReplicaSpec]]  # to the paths of this machine


class OrderedHost:
    """One host. `own` are the replicas of its settings, one entry each. `localise` fetches the weights of replicas
    that its settings do not know."""

    def __init__(
        self,
        supervisor: Supervisor,
        publisher: Publisher,
        reader: DocumentReader,
        own: Sequence[ReplicaSpec],
        offers: Sequence[Offer],
        localise: Localise,
    ) -> None:
        self._supervisor = supervisor
        self._publisher = publisher
        self._reader = reader
        self._own = {f"{OWN_PREFIX}{number}": spec for number, spec in enumerate(own, start=1)}
        self._offers = tuple(offers)
        self._localise = localise
        self._serving = Serving()
        self._orders = HostOrders(host=publisher.host)
        self._launching: dict[str, asyncio.Task[None]] = {}  # by slot
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}
        self._is_leaving = False
        supervisor.on_change.append(self._tell)
        self._tell(())

    async def start_own(self) -> list[str]:
        """Start the replicas of this host's settings, as releases have changed them. Returns their ids."""
        return await asyncio.gather(*(self._start(name, spec) for name, spec in self._own.items()))

    def take(self, documents: Mapping[str, bytes]) -> None:
        """Follow the documents of the leader that are new."""
        taken = self._reader.take(documents)
        if (document := taken.get(SERVING)) is not None:
            self._serving = document.read(Serving) or self._serving
        if (document := taken.get(HOST_PREFIX + self._publisher.host)) is not None:
            self._orders = document.read(HostOrders) or self._orders
            self._reconcile()
        self._tell(self._supervisor.members())

    @contextlib.asynccontextmanager
    async def taking_orders(self) -> AsyncIterator[None]:
        """Let all orders that are being carried out end with the context."""
        try:
            yield
        finally:
            self._is_leaving = True
            tasks = [*self._launching.values(), *self._leaving.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leave(self) -> None:
        """Take no more orders, because this host is about to end."""
        self._is_leaving = True
        self._tell(self._supervisor.members())

    def _reconcile(self) -> None:
        if self._is_leaving:
            return
        ordered = {slot.name: slot for slot in self._orders.slots}
        wanted = {name: Slot(name=name, spec=spec) for name, spec in self._own.items()} | ordered
        present = {slot: replica_id for replica_id, slot in self._supervisor.slots().items()}
        self._failures = {name: why for name, why in self._failures.items() if name in wanted}
        for name, slot in wanted.items():
            if slot.want == "leave":
                self._end(slot, present.get(name))
            elif name in self._leaving:
                self._resume(slot, present.get(name))
            elif name in present:
                # A slot of this host's own settings without an order keeps the role that an earlier leader gave it.
                self._convert(present[name], slot.spec.role if name in ordered else None)
            elif name not in self._launching and name not in self._failures:
                self._begin(slot)
        for name in [*present, *self._launching]:
            if name not in wanted:
                spec = self._own.get(name) or self._offers[0].spec
                self._end(Slot(name=name, spec=spec, want="leave"), present.get(name))

    def _begin(self, slot: Slot) -> None:
        logger.info("leader %d starts a replica of %s here", self._reader.epoch, slot.spec.model)
        task = self._launching[slot.name] = asyncio.create_task(self._launch(slot))
        task.add_done_callback(lambda _: self._done(slot.name))

    async def _launch(self, slot: Slot) -> None:
        try:
            await self._start(slot.name, slot.spec)
        except PenstockError as error:
            logger.error("a replica that the leader ordered could not be started: %s", error.message)
            self._failures[slot.name] = error.message
            self._tell(self._supervisor.members())

    def _end(self, slot: Slot, replica_id: str | None) -> None:
        if (launch := self._launching.get(slot.name)) is not None:
            launch.cancel()
        elif replica_id is not None and slot.name not in self._leaving:
            logger.info("leader %d ends the replica %s", self._reader.epoch, replica_id)
            task = self._leaving[slot.name] = asyncio.create_task(self._leave(slot, replica_id))
            task.add_done_callback(lambda _: self._done(slot.name))

    def _convert(self, replica_id: str, role: Role | None) -> None:
        roles = {member.id: member.role for member in self._supervisor.members()}
        if role is not None and roles.get(replica_id, role) != role:
            logger.info("leader %d makes %s a replica for %s", self._reader.epoch, replica_id, role)
            self._supervisor.convert(replica_id, role)

    def _done(self, slot_name: str) -> None:
        """Look again when an order is carried out: another may have come meanwhile."""
        self._launching.pop(slot_name, None)
        self._leaving.pop(slot_name, None)
        self._reconcile()

    async def _leave(self, slot: Slot, replica_id: str) -> None:
        with contextlib.suppress(NotFound):  # it died meanwhile
            await self._supervisor.drain(replica_id, slot.drain_timeout_s)
            await self._supervisor.stop(replica_id)

    def _resume(self, slot: Slot, replica_id: str | None) -> None:
        with contextlib.suppress(NotFound):
            if replica_id is not None and self._supervisor.resume(replica_id):
                self._leaving[slot.name].cancel()

    async def _start(self, slot_name: str, spec: ReplicaSpec) -> str:
        if slot_name in self._own and (promoted := self._serving.specs.get(Serving.key(spec))) is not None:
            spec = replace(promoted, region=spec.region)
        return await self._supervisor.launch(await self._here(spec), slot_name)

    async def _here(self, spec: ReplicaSpec) -> ReplicaSpec:
        """Return a spec with the paths of this machine. The settings of this host win over their copy in the order,
        which a leader of another version may have written."""
        for offer in self._offers:
            own = offer.spec
            if shares_room(own.role, spec.role):
                own = replace(own, role=spec.role)
            if Serving.key(own) == Serving.key(spec):
                return own
        return await self._localise(spec)

    def _tell(self, _: tuple[Member, ...]) -> None:
        self._publisher.describe(
            replace(
                self._publisher.record,
                members=self._supervisor.members(),
                offers=self._offers,
                slots=self._supervisor.slots(),
                failures=dict(self._failures),
                epoch=self._reader.epoch,
                is_leaving=self._is_leaving,
                version=__version__,
                converts=True,
            )
        )
