"""Data of the control plane in the gateway's database: a registry of hosts, for fleets that have PostgreSQL and no
Redis, and the records of releases and experiments, which survive a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from sqlalchemy import Connection, Table, delete, select, update
from sqlalchemy.exc import DatabaseError

from penstock.cluster import registry
from penstock.cluster.fleet_leader import Stores
from penstock.cluster.leadership import Leadership
from penstock.cluster.registry import RegistryError
from penstock.cluster.staged_records import ExperimentRecord, ReleaseRecord
from penstock.core.errors import PenstockError, Superseded
from penstock.gateway.store.database import Database, Work, database_time, insert_into
from penstock.gateway.store.tables import experiments, fleet_documents, fleet_hosts, fleet_leases, releases

T = TypeVar("T")
LEADER = "leader"


class DatabaseRegistry:
    """Implements `registry.Registry`. The database keeps the time. Gateways ask for changes regularly."""

    def __init__(self, database: Database, lease: str = LEADER) -> None:
        self._database = database
        self._lease = lease  # its name; leases with different names are independent

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        def work(connection: Connection) -> None:
            now = database_time(connection)
            ends = now + lease_s
            values = {"record": record, "expires_at": ends}
            statement = insert_into(connection, fleet_hosts).values(name=name, **values)
            connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
            connection.execute(delete(fleet_hosts).where(fleet_hosts.c.expires_at < ends - 2 * lease_s))
            longest = now + registry.LONGEST_LEASE_S
            is_too_long = fleet_hosts.c.expires_at > longest
            connection.execute(update(fleet_hosts).where(is_too_long).values(expires_at=longest))

        await self._run(work)

    async def records(self) -> dict[str, bytes]:
        def work(connection: Connection) -> dict[str, bytes]:
            living = select(fleet_hosts.c.name, fleet_hosts.c.record).where(
                fleet_hosts.c.expires_at > database_time(connection)
            )
            return {name: bytes(record) for name, record in connection.execute(living)}

        return await self._run(work, reads_only=True)

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        return await self._run(
            lambda connection: take_lease(connection, self._lease, candidate, lease_s, above)
        )

    async def resign(self, candidate: str) -> None:
        await self._run(lambda connection: end_lease(connection, self._lease, candidate))

    async def write(self, name: str, document: bytes | None, epoch: int) -> bool:
        def work(connection: Connection) -> bool:
            # The row stays locked until the document is written, so that no other leader comes between.
            latest = select(fleet_leases.c.epoch).where(fleet_leases.c.name == self._lease).with_for_update()
            if connection.scalar(latest) != epoch:
                return False
            if document is None:
                connection.execute(delete(fleet_documents).where(fleet_documents.c.name == name))
                return True
            statement = insert_into(connection, fleet_documents).values(name=name, document=document)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["name"], set_={"document": document})
            )
            return True

        return await self._run(work)

    async def documents(self) -> dict[str, bytes]:
        def work(connection: Connection) -> dict[str, bytes]:
            found = connection.execute(select(fleet_documents.c.name, fleet_documents.c.document))
            return {name: bytes(document) for name, document in found}

        return await self._run(work, reads_only=True)

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        self._database.close()

    async def _run(self, work: Work[T], *, reads_only: bool = False) -> T:
        try:
            return await self._database.run(work, reads_only=reads_only)
        except PenstockError as error:
            raise RegistryError(error.message) from error
        except DatabaseError as error:
            why = str(error.orig or error).splitlines()[0]
            raise RegistryError(f"its tables are not the tables of Penstock: {why}") from error


def take_lease(connection: Connection, name: str, holder: str, lease_s: float, above: int = 0) -> int | None:
    """Take a lease or renew it. Returns its epoch; None while another holds it."""
    _make_row(connection, name)
    columns = (fleet_leases.c.holder, fleet_leases.c.epoch, fleet_leases.c.expires_at)
    found = connection.execute(select(*columns).where(fleet_leases.c.name == name).with_for_update()).one()
    now = database_time(connection)
    is_held = found.expires_at > now
    row = fleet_leases.c.name == name
    if is_held and found.holder != holder:
        longest = now + registry.LONGEST_LEASE_S
        if found.expires_at > longest:
            connection.execute(update(fleet_leases).where(row).values(expires_at=longest))
        return None
    epoch = int(found.epoch) if is_held else max(int(found.epoch), above) + 1
    values = {"holder": holder, "epoch": epoch, "expires_at": now + lease_s}
    connection.execute(update(fleet_leases).where(row).values(**values))
    return epoch


def raise_epoch(connection: Connection, name: str, epoch: int) -> None:
    """Note that the leader of an epoch writes. Raises Superseded if a later one has written."""
    _make_row(connection, name)
    row = fleet_leases.c.name == name
    latest = connection.scalar(select(fleet_leases.c.epoch).where(row).with_for_update())
    if latest is not None and int(latest) > epoch:
        raise Superseded("Another control process leads this fleet now.")
    connection.execute(update(fleet_leases).where(row).values(epoch=epoch))


def _make_row(connection: Connection, name: str) -> None:
    new = {"name": name, "holder": "", "epoch": 0, "expires_at": 0.0}
    connection.execute(insert_into(connection, fleet_leases).values(**new).on_conflict_do_nothing())


def end_lease(connection: Connection, name: str, holder: str) -> None:
    is_ours = (fleet_leases.c.name == name) & (fleet_leases.c.holder == holder)
    connection.execute(update(fleet_leases).where(is_ours).values(expires_at=0.0))


logger = logging.getLogger(__name__)

MAX_LOADED = 1000  # the latest records; older ones are not shown
LEASE = "releases"  # of the process that decides about the releases and experiments in a database
# The same, where servers share a database and there is no `penstock control`.
SERVER_LEASE = "server releases"
RecordT = TypeVar("RecordT", ReleaseRecord, ExperimentRecord)


class _Records(Generic[RecordT]):
    """In a shared fleet, records belong to the leader: a store with an epoch writes only while no later leader has
    claimed them."""

    kind: ClassVar[str]
    table: ClassVar[Table]
    record: ClassVar[type[Any]]

    def __init__(self, database: Database, epoch: int | None = None) -> None:
        self._database = database
        self._epoch = epoch
        self._lease = LEASE

    async def load(self) -> tuple[RecordT, ...]:
        if not self._database.exists:
            return ()
        return await self._database.run(self._load, reads_only=True)

    async def save(self, record: RecordT) -> None:
        def work(connection: Connection) -> None:
            if self._epoch is not None:
                raise_epoch(connection, self._lease, self._epoch)
            self._save(connection, record)

        await self._database.run(work)

    def _load(self, connection: Connection) -> tuple[RecordT, ...]:
        columns = self.table.c
        newest = select(columns.id, columns.body).order_by(columns.created_at.desc()).limit(MAX_LOADED)
        found = []
        for name, body in connection.execute(newest):
            try:
                found.append(msgspec.json.decode(body, type=self.record))
            except msgspec.ValidationError as error:
                # The settings belong to another version of Penstock, and this version cannot start them.
                logger.warning("the %s %s of an earlier version is passed over: %s", self.kind, name, error)
        return tuple(reversed(found))

    def _save(self, connection: Connection, record: RecordT) -> None:
        values: dict[str, Any] = {
            "model": record.model,
            "stage": record.state.stage,
            "updated_at": time.time(),
            "body": msgspec.json.encode(record),
        }
        statement = insert_into(connection, self.table).values(
            id=record.id, created_at=record.created_at, **values
        )
        connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


class DatabaseReleases(_Records[ReleaseRecord]):
    """Implements `RecordStore`."""

    kind, table, record = "release", releases, ReleaseRecord


class OwnedReleases(DatabaseReleases):
    """The releases of a server, which writes only while no other server has owned them since."""

    def __init__(self, database: Database, ownership: Leadership) -> None:
        super().__init__(database)
        self._ownership = ownership
        self._lease = SERVER_LEASE

    async def save(self, record: ReleaseRecord) -> None:
        self._epoch = self._ownership.latest_epoch
        await super().save(record)


class DatabaseExperiments(_Records[ExperimentRecord]):
    """Implements `RecordStore`."""

    kind, table, record = "experiment", experiments, ExperimentRecord


async def stores_of_leader(database: Database, epoch: int) -> Stores:
    """Claim releases and experiments for the leader of a shared fleet. Raises Superseded if a later leader has
    them."""
    await database.run(lambda connection: raise_epoch(connection, LEASE, epoch))
    return Stores(DatabaseReleases(database, epoch), DatabaseExperiments(database, epoch))
