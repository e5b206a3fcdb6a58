"""Keeps experiments in the gateway's database, so that they survive a restart."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from penstock.cluster.experiment_record import ExperimentRecord
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import experiments

logger = logging.getLogger(__name__)

MAX_LOADED = 100  # the latest experiments; older ones are not shown
_decode = msgspec.json.Decoder(ExperimentRecord).decode


class DatabaseExperiments:
    """Implements `experiment_record.ExperimentStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> tuple[ExperimentRecord, ...]:
        if not self._database.exists:
            return ()
        return await self._database.run(_load, reads_only=True)

    async def save(self, record: ExperimentRecord) -> None:
        await self._database.run(lambda connection: _save(connection, record))


def _load(connection: Connection) -> tuple[ExperimentRecord, ...]:
    columns = experiments.c
    newest = select(columns.id, columns.body).order_by(columns.created_at.desc()).limit(MAX_LOADED)
    found = []
    for name, body in connection.execute(newest):
        try:
            found.append(_decode(body))
        except msgspec.ValidationError as error:
            logger.warning("the experiment %s of an earlier version is passed over: %s", name, error)
    return tuple(reversed(found))


def _save(connection: Connection, record: ExperimentRecord) -> None:
    values: dict[str, Any] = {
        "model": record.model,
        "stage": record.state.stage,
        "updated_at": time.time(),
        "body": msgspec.json.encode(record),
    }
    statement = insert_into(connection, experiments).values(
        id=record.id, created_at=record.created_at, **values
    )
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))
