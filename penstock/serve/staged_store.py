"""Keeps releases and experiments in the gateway's database, so that they survive a restart.

In a shared fleet they belong to the leader: a store with an epoch writes only while no later leader has claimed them.
"""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from sqlalchemy import Connection, Table, select

from penstock.cluster.experiment_record import ExperimentRecord
from penstock.cluster.fleet_term import Stores
from penstock.cluster.leadership import Leadership
from penstock.cluster.release_record import ReleaseRecord
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import experiments, releases
from penstock.serve.database_registry import raise_epoch

logger = logging.getLogger(__name__)

MAX_LOADED = 1000  # the latest records; older ones are not shown
LEASE = "releases"  # of the process that decides about the releases and experiments in a database
# The same, where servers share a database and there is no `penstock control`.
SERVER_LEASE = "server releases"
RecordT = TypeVar("RecordT", ReleaseRecord, ExperimentRecord)


class _Records(Generic[RecordT]):
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
    """Implements `release_record.ReleaseStore`."""

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
    """Implements `experiment_record.ExperimentStore`."""

    kind, table, record = "experiment", experiments, ExperimentRecord


async def stores_of_leader(database: Database, epoch: int) -> Stores:
    """Claim releases and experiments for the leader of a shared fleet. Raises Superseded if a later leader has
    them."""
    await database.run(lambda connection: raise_epoch(connection, LEASE, epoch))
    return Stores(DatabaseReleases(database, epoch), DatabaseExperiments(database, epoch))
