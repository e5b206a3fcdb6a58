"""Keeps samples in the database, so that the console has a past after a restart. Each process writes its own rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from penstock.core.errors import StoreUnavailable
from penstock.gateway.history.samples import Sample
from penstock.gateway.store.database import Database, insert_into
from penstock.gateway.store.tables import history_samples

logger = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(Sample).decode
Told = dict[tuple[str, str, int], Sample]  # by server, process and time


class HistoryStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def save(
        self, server: str, process: str, samples: Mapping[str, Sequence[Sample]], oldest: Mapping[str, int]
    ) -> bool:
        """Write samples by span, and delete what is older than `oldest`. Returns whether that was possible."""
        rows = [
            {
                "server": server,
                "process": process,
                "span": span,
                "at": each.at,
                "body": msgspec.json.encode(each),
            }
            for span, of_span in samples.items()
            for each in of_span
        ]

        def work(connection: Connection) -> None:
            for row in rows:
                statement = insert_into(connection, history_samples).values(row)
                keys = ["process", "span", "at"]
                connection.execute(
                    statement.on_conflict_do_update(index_elements=keys, set_={"body": row["body"]})
                )
            for span, at in oldest.items():
                old = history_samples.c.span == span, history_samples.c.at < at
                connection.execute(delete(history_samples).where(*old))

        try:
            await self._database.run(work)
        except StoreUnavailable:
            return False  # the database has logged it; the samples stay in memory and are written later
        return True

    async def load(self, span: str, start: int) -> Told:
        """Return all samples of a span since `start`, of all processes. Empty while the database is away."""
        columns = history_samples.c
        query = select(columns.server, columns.process, columns.at, columns.body)
        query = query.where(columns.span == span, columns.at >= start)
        try:
            rows = await self._database.run(
                lambda connection: connection.execute(query).all(), reads_only=True
            )
        except StoreUnavailable:
            return {}
        found: Told = {}
        for server, process, at, body in rows:
            try:
                found[server, process, at] = _decode(body)
            except msgspec.MsgspecError:
                logger.warning("a sample of another version of Penstock is passed over")
        return found
