"""Stored responses: the record and the store, which all processes of a gateway share where they share a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec
from sqlalchemy import Connection, func, select

from penstock.core.errors import InvalidRequest
from penstock.gateway.store.database import Database, database_time, insert_into, reading, transaction
from penstock.gateway.store.retention import Retention
from penstock.gateway.store.tables import response_events, responses

MAX_HISTORY = 1000  # responses in one conversation
MAX_HISTORY_BYTES = 32 << 20  # of one conversation, as stored
RENEWALS = 16  # of what is in use all the time, within the time for which it is kept
MAX_MEMORY_BYTES = 64 << 20  # of a workspace, in a database in memory


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`body` is the response as its API shows it, `input_items` what the client sent for it; both JSON."""

    id: str
    workspace_id: str
    created_at: float
    expires_at: float
    is_final: bool  # False while it runs in the background
    body: bytes
    input_items: bytes
    previous_id: str | None = None
    lease_until: float | None = None  # of one that is not final: its gateway is alive until then at least
    num_event_bytes: int | None = None  # of the stream events that are kept, as stored; None if none are

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items) + (self.num_event_bytes or 0)

    @property
    def is_streamed(self) -> bool:
        """Return whether its stream events are kept."""
        return self.num_event_bytes is not None

    def is_lost(self, now: float) -> bool:
        """Return whether the gateway that should finish the response has gone."""
        return not self.is_final and (self.lease_until is None or self.lease_until <= now)


def is_renewed(expires_at: float, keep_until: float, now: float) -> bool:
    """Return whether something that is used is to be kept for longer. Not at every use: rows are written as a whole,
    with their bodies, while other writers wait."""
    return expires_at < keep_until - (keep_until - now) / RENEWALS


class HistoryBound:
    """Refuses a conversation that is too long to be read into memory. Call `add` for each part of it."""

    def __init__(self, param: str = "previous_response_id") -> None:
        self._param = param
        self._num_responses = 0
        self._num_bytes = 0

    def add(self, num_bytes: int, *, num_responses: int = 1) -> None:
        self._num_responses += num_responses
        self._num_bytes += num_bytes
        if self._num_responses > MAX_HISTORY:
            raise InvalidRequest(
                f"The conversation has more than {MAX_HISTORY} responses.", param=self._param
            )
        if self._num_bytes > MAX_HISTORY_BYTES:
            raise InvalidRequest(
                f"The conversation has more than {MAX_HISTORY_BYTES} bytes.", param=self._param
            )


_MAX_WORKSPACE_BYTES = 1 << 30
_NUM_BYTES = (
    func.length(responses.c.body)
    + func.length(responses.c.input_items)
    + func.coalesce(responses.c.num_event_bytes, 0)
)


class ResponseStore:
    """An id of another workspace is the same as an id that does not exist. The oldest responses of a workspace that
    stores more than `max_workspace_bytes` are deleted."""

    def __init__(
        self,
        database: Database,
        *,
        max_workspace_bytes: int = _MAX_WORKSPACE_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._now = now
        self._retention = Retention(
            database,
            responses,
            responses.c.id,
            _NUM_BYTES,
            responses.c.created_at,
            max_workspace_bytes,
            may_go=responses.c.is_final,
        )

    async def add(self, response: StoredResponse) -> None:
        """Add a response. One that is there already stays: an idempotent request was answered again."""
        await self._retention.sweep(self._now())
        await self._add(response)
        await self._note_added(response)

    async def replace(self, response: StoredResponse) -> bool:
        """Put the outcome in place of a response that ran in the background. False when it has been deleted, or was
        final already."""
        is_replaced = await self._replace(response)
        await self._note_added(response)
        return is_replaced

    async def _note_added(self, response: StoredResponse) -> None:
        await self._retention.note_added(response.workspace_id, response.num_bytes, kept=[response.id])

    @transaction
    def _add(self, connection: Connection, response: StoredResponse) -> None:
        values = msgspec.structs.asdict(response)
        connection.execute(insert_into(connection, responses).values(values).on_conflict_do_nothing())

    @transaction
    def _replace(self, connection: Connection, response: StoredResponse) -> bool:
        values = msgspec.structs.asdict(response)
        del values["num_event_bytes"]
        is_running = responses.c.workspace_id == response.workspace_id, responses.c.is_final.is_(False)
        replaced = connection.execute(
            responses.update().where(responses.c.id == response.id, *is_running).values(values)
        )
        return replaced.rowcount == 1

    @reading
    def time(self, connection: Connection) -> float:
        """Return the time that leases end by, which all gateways with this store agree on."""
        return database_time(connection)

    @transaction
    def renew(
        self, connection: Connection, response_ids: Collection[str], lease_until: float
    ) -> frozenset[str]:
        """Say that responses are still being made. Returns those that are still wanted: the others have been
        cancelled or deleted."""
        is_running = responses.c.id.in_(response_ids), responses.c.is_final.is_(False)
        renewed = responses.update().where(*is_running).values(lease_until=lease_until)
        return frozenset(connection.execute(renewed.returning(responses.c.id)).scalars())

    async def find(self, workspace_id: str, response_id: str) -> StoredResponse | None:
        return await self._read(workspace_id, response_id) if self._could_exist(response_id) else None

    async def history(
        self, workspace_id: str, response_id: str, *, keep_until: float
    ) -> list[StoredResponse] | None:
        """Return a response and all that it continues, oldest first; None when one of them is not there. All of them
        are kept until about `keep_until`: a conversation that continues does not lose its beginning."""
        if not self._could_exist(response_id):
            return None
        found = await self._history(workspace_id, response_id)
        now = self._now()
        due = [each.id for each in found or () if is_renewed(each.expires_at, keep_until, now)]
        if due:
            await self._keep(due, keep_until)
        return found

    async def delete(self, workspace_id: str, response_id: str) -> bool:
        return self._could_exist(response_id) and await self._delete(workspace_id, response_id)

    @transaction
    def add_events(
        self, connection: Connection, workspace_id: str, response_id: str, first: int, events: bytes
    ) -> None:
        """Keep stream events of a response, the first of which has the number `first`. Does nothing for a response
        that is not there."""
        if self._find(connection, workspace_id, response_id) is None:
            return
        row = {"response_id": response_id, "first": first, "events": events}
        connection.execute(response_events.insert().values(row))
        num_event_bytes = func.coalesce(responses.c.num_event_bytes, 0) + len(events)
        connection.execute(
            responses.update().where(responses.c.id == response_id).values(num_event_bytes=num_event_bytes)
        )

    async def events(self, workspace_id: str, response_id: str, first: int) -> list[tuple[int, bytes]]:
        """Return the events from the number `first` on, in order, and maybe a few events before."""
        return await self._events(workspace_id, response_id, first) if self._could_exist(response_id) else []

    def _could_exist(self, response_id: str) -> bool:
        """Not every database can even look for a NUL."""
        return self._database.exists and "\0" not in response_id

    @reading
    def _read(self, connection: Connection, workspace_id: str, response_id: str) -> StoredResponse | None:
        return self._find(connection, workspace_id, response_id)

    @reading
    def _events(
        self, connection: Connection, workspace_id: str, response_id: str, first: int
    ) -> list[tuple[int, bytes]]:
        if self._find(connection, workspace_id, response_id) is None:
            return []
        is_of_response = response_events.c.response_id == response_id
        begin = (
            select(func.max(response_events.c.first))
            .where(is_of_response, response_events.c.first <= first)
            .scalar_subquery()
        )
        rows = connection.execute(
            select(response_events.c.first, response_events.c.events)
            .where(is_of_response, response_events.c.first >= func.coalesce(begin, 0))
            .order_by(response_events.c.first)
        )
        return [(number, events) for number, events in rows]

    def _find(self, connection: Connection, workspace_id: str, response_id: str) -> StoredResponse | None:
        row = connection.execute(
            responses.select().where(
                responses.c.id == response_id,
                responses.c.workspace_id == workspace_id,
                responses.c.expires_at > self._now(),
            )
        ).first()
        return None if row is None else StoredResponse(**row._mapping)

    @reading
    def _history(
        self, connection: Connection, workspace_id: str, response_id: str
    ) -> list[StoredResponse] | None:
        found: list[StoredResponse] = []
        bound = HistoryBound()
        next_id: str | None = response_id
        while next_id is not None:
            response = self._find(connection, workspace_id, next_id)
            if response is None:
                return None
            found.append(response)
            bound.add(response.num_bytes)
            next_id = response.previous_id
        return found[::-1]

    @transaction
    def _keep(self, connection: Connection, response_ids: Collection[str], keep_until: float) -> None:
        is_due = responses.c.id.in_(response_ids), responses.c.expires_at < keep_until
        connection.execute(responses.update().where(*is_due).values(expires_at=keep_until))

    @transaction
    def _delete(self, connection: Connection, workspace_id: str, response_id: str) -> bool:
        exists = self._find(connection, workspace_id, response_id) is not None
        if exists:
            connection.execute(responses.delete().where(responses.c.id == response_id))
        return exists
