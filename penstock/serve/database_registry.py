"""A registry in the gateway's database, for fleets that have PostgreSQL and no Redis."""

from __future__ import annotations

import asyncio

from sqlalchemy import Connection, Double, cast, delete, func, select

from penstock.cluster.registry import RegistryError
from penstock.core.errors import PenstockError
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import fleet_hosts

UNIX_EPOCH_DAY = 2_440_587.5  # as SQLite counts days


class DatabaseRegistry:
    """Implements `registry.Registry`. The database keeps the time. Gateways ask for changes regularly."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        def work(connection: Connection) -> None:
            ends = _now(connection) + lease_s
            values = {"record": record, "expires_at": ends}
            statement = insert_into(connection, fleet_hosts).values(name=name, **values)
            connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
            connection.execute(delete(fleet_hosts).where(fleet_hosts.c.expires_at < ends - 2 * lease_s))

        try:
            await self._database.run(work)
        except PenstockError as error:
            raise RegistryError(error.message) from error

    async def records(self) -> dict[str, bytes]:
        def work(connection: Connection) -> dict[str, bytes]:
            living = select(fleet_hosts.c.name, fleet_hosts.c.record).where(
                fleet_hosts.c.expires_at > _now(connection)
            )
            return {name: bytes(record) for name, record in connection.execute(living)}

        try:
            return await self._database.run(work, reads_only=True)
        except PenstockError as error:
            raise RegistryError(error.message) from error

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        self._database.close()


def _now(connection: Connection) -> float:
    """Return the Unix time on the clock of the database."""
    if connection.dialect.name == "sqlite":
        return float(connection.scalar(select((func.julianday("now") - UNIX_EPOCH_DAY) * 86_400)) or 0.0)
    return float(
        connection.scalar(select(cast(func.extract("epoch", func.clock_timestamp()), Double))) or 0.0
    )
