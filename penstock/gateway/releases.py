"""Releases in the gateway's database, so that they survive a restart. Implements `cluster/release_record`'s store."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from penstock.cluster.release_record import ReleaseRecord
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import releases

logger = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(ReleaseRecord).decode
MAX_LOADED = 1000  # the latest releases; older ones are not shown


class DatabaseReleases:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> tuple[ReleaseRecord, ...]:
        if not self._database.exists:
            return ()
        return await self._database.run(_load, reads_only=True)

    async def save(self, record: ReleaseRecord) -> None:
        await self._database.run(lambda connection: _save(connection, record))


def _load(connection: Connection) -> tuple[ReleaseRecord, ...]:
    newest = select(releases.c.id, releases.c.body).order_by(releases.c.created_at.desc()).limit(MAX_LOADED)
    found = []
    for name, body in connection.execute(newest):
        try:
            found.append(_decode(body))
        except msgspec.ValidationError as error:
            # The settings belong to another version of Penstock, and this version cannot start what the release
            # promoted.
            logger.warning("the release %s of an earlier version is passed over: %s", name, error)
    return tuple(reversed(found))


def _save(connection: Connection, record: ReleaseRecord) -> None:
    values: dict[str, Any] = {
        "model": record.model,
        "stage": record.state.stage,
        "updated_at": time.time(),
        "body": msgspec.json.encode(record),
    }
    statement = insert_into(connection, releases).values(id=record.id, created_at=record.created_at, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))
