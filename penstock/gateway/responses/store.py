"""Stored responses: the record, the protocol of stores, and two stores.

`MemoryResponses` is bounded and belongs to one process. `DatabaseResponses` is shared by all processes of a gateway.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, func, select

from penstock.core.errors import InvalidRequest
from penstock.gateway.store.database import Database, database_time, insert_into
from penstock.gateway.store.tables import response_events, responses

MAX_HISTORY = 1000  # responses in one conversation
MAX_HISTORY_BYTES = 32 << 20  # of one conversation, as stored
MAX_MEMORY_BYTES = 64 << 20


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
        """Say whether its stream events are kept."""
        return self.num_event_bytes is not None

    def is_lost(self, now: float) -> bool:
        """Return whether the gateway that should finish the response has gone."""
        return not self.is_final and (self.lease_until is None or self.lease_until <= now)


class ResponseStore(Protocol):
    """An id of another workspace is the same as an id that does not exist."""

    async def add(self, response: StoredResponse) -> None:
        """One that is there already stays: an idempotent request was answered again."""
        ...

    async def replace(self, response: StoredResponse) -> bool:
        """Put the outcome in place of a response that ran in the background. False when it has been deleted, or was
        final already."""
        ...

    async def time(self) -> float:
        """Return the time that leases end by, which all gateways with this store agree on."""
        ...

    async def renew(self, response_ids: Collection[str], lease_until: float) -> frozenset[str]:
        """Say that responses are still being made. Returns those that are still wanted: the others have been
        cancelled or deleted."""
        ...

    async def find(self, workspace_id: str, response_id: str) -> StoredResponse | None: ...

    async def history(
        self, workspace_id: str, response_id: str, *, keep_until: float
    ) -> list[StoredResponse] | None:
        """Return a response and all that it continues, oldest first; None when one of them is not there. All of them
        are kept until `keep_until` at least: a conversation that continues does not lose its beginning."""
        ...

    async def delete(self, workspace_id: str, response_id: str) -> bool: ...

    async def add_events(self, workspace_id: str, response_id: str, first: int, events: bytes) -> None:
        """Keep stream events of a response, the first of which has the number `first`. Does nothing for a response
        that is not there."""
        ...

    async def events(self, workspace_id: str, response_id: str, first: int) -> list[tuple[int, bytes]]:
        """Return the events from the number `first` on, in order, and maybe a few events before."""
        ...


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


class MemoryResponses:
    """Forgets the oldest when it grows beyond `max_bytes`."""

    def __init__(self, *, max_bytes: int = MAX_MEMORY_BYTES, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._events: dict[tuple[str, str], list[tuple[int, bytes]]] = {}

    async def add(self, response: StoredResponse) -> None:
        if await self.find(response.workspace_id, response.id) is None:
            self._put(response)

    async def replace(self, response: StoredResponse) -> bool:
        known = await self.find(response.workspace_id, response.id)
        if known is None or known.is_final:
            return False
        self._put(response)
        return True

    async def time(self) -> float:
        return self._now()

    async def renew(self, response_ids: Collection[str], lease_until: float) -> frozenset[str]:
        wanted = set()
        for key, response in self._responses.items():
            if response.id in response_ids and not response.is_final:
                self._responses[key] = msgspec.structs.replace(response, lease_until=lease_until)
                wanted.add(response.id)
        return frozenset(wanted)

    async def find(self, workspace_id: str, response_id: str) -> StoredResponse | None:
        response = self._responses.get((workspace_id, response_id))
        if response is None or response.expires_at <= self._now():
            return None
        return response

    async def history(
        self, workspace_id: str, response_id: str, *, keep_until: float
    ) -> list[StoredResponse] | None:
        found: list[StoredResponse] = []
        bound = HistoryBound()
        next_id: str | None = response_id
        while next_id is not None:
            response = await self.find(workspace_id, next_id)
            if response is None:
                return None
            found.append(response)
            bound.add(response.num_bytes)
            next_id = response.previous_id
        for response in found:
            kept = msgspec.structs.replace(response, expires_at=max(response.expires_at, keep_until))
            self._responses[workspace_id, response.id] = kept
        return found[::-1]

    async def delete(self, workspace_id: str, response_id: str) -> bool:
        exists = await self.find(workspace_id, response_id) is not None
        self._forget((workspace_id, response_id))
        return exists

    async def add_events(self, workspace_id: str, response_id: str, first: int, events: bytes) -> None:
        known = await self.find(workspace_id, response_id)
        if known is not None:
            kept = [*self._events.get((workspace_id, response_id), ()), (first, events)]
            self._put(
                msgspec.structs.replace(known, num_event_bytes=(known.num_event_bytes or 0) + len(events)),
                kept,
            )

    async def events(self, workspace_id: str, response_id: str, first: int) -> list[tuple[int, bytes]]:
        return _from(self._events.get((workspace_id, response_id), []), first)

    def _put(self, response: StoredResponse, events: list[tuple[int, bytes]] | None = None) -> None:
        key = (response.workspace_id, response.id)
        kept = self._events.get(key) if events is None else events
        self._forget(key)
        if kept:
            self._events[key] = kept
            num_event_bytes = sum(len(data) for _, data in kept)
            response = msgspec.structs.replace(response, num_event_bytes=num_event_bytes)
        self._responses[key] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def _forget(self, key: tuple[str, str]) -> None:
        response = self._responses.pop(key, None)
        self._events.pop(key, None)
        if response is not None:
            self._num_bytes -= response.num_bytes


def _from(chunks: list[tuple[int, bytes]], first: int) -> list[tuple[int, bytes]]:
    """Without the chunks that end before the event number `first`."""
    begins = [position for position, (number, _) in enumerate(chunks) if number <= first]
    return chunks[begins[-1] :] if begins else chunks


_SWEEP_EVERY_S = 600.0
_MAX_WORKSPACE_BYTES = 1 << 30
_CHECKED_SHARE = 1 / 64  # a workspace is measured again after it has added so much of what it may keep
_DELETED_AT_ONCE = 100


class GrowthCheck:
    """Says when a workspace has grown so much that it should be measured, which reads all its rows."""

    def __init__(self, max_workspace_bytes: int) -> None:
        self._max_workspace_bytes = max_workspace_bytes
        self._num_added: dict[str, int] = {}  # bytes per workspace since it was last measured

    def is_due(self, workspace_id: str, num_bytes: int) -> bool:
        is_known = workspace_id in self._num_added
        num_added = self._num_added.get(workspace_id, 0) + num_bytes
        is_due = not is_known or num_added >= self._max_workspace_bytes * _CHECKED_SHARE
        self._num_added[workspace_id] = 0 if is_due else num_added
        return is_due


class DatabaseResponses:
    """Deletes the oldest responses of a workspace that stores more than `max_workspace_bytes`."""

    def __init__(
        self,
        database: Database,
        *,
        max_workspace_bytes: int = _MAX_WORKSPACE_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._max_workspace_bytes = max_workspace_bytes
        self._now = now
        self._swept_at = 0.0
        self._growth = GrowthCheck(max_workspace_bytes)

    async def add(self, response: StoredResponse) -> None:
        await self._database.run(lambda connection: self._add(connection, response))

    async def replace(self, response: StoredResponse) -> bool:
        return await self._database.run(lambda connection: self._replace(connection, response))

    async def time(self) -> float:
        return await self._database.run(database_time, reads_only=True)

    async def renew(self, response_ids: Collection[str], lease_until: float) -> frozenset[str]:
        return await self._database.run(lambda connection: self._renew(connection, response_ids, lease_until))

    async def find(self, workspace_id: str, response_id: str) -> StoredResponse | None:
        if not self._could_exist(response_id):
            return None
        return await self._database.run(
            lambda connection: self._find(connection, workspace_id, response_id), reads_only=True
        )

    async def history(
        self, workspace_id: str, response_id: str, *, keep_until: float
    ) -> list[StoredResponse] | None:
        if not self._could_exist(response_id):
            return None
        return await self._database.run(
            lambda connection: self._history(connection, workspace_id, response_id, keep_until)
        )

    async def delete(self, workspace_id: str, response_id: str) -> bool:
        if not self._could_exist(response_id):
            return False
        return await self._database.run(
            lambda connection: self._delete(connection, workspace_id, response_id)
        )

    async def add_events(self, workspace_id: str, response_id: str, first: int, events: bytes) -> None:
        def add(connection: Connection) -> None:
            if self._find(connection, workspace_id, response_id) is None:
                return
            row = {"response_id": response_id, "first": first, "events": events}
            connection.execute(response_events.insert().values(row))
            num_event_bytes = func.coalesce(responses.c.num_event_bytes, 0) + len(events)
            connection.execute(
                responses.update()
                .where(responses.c.id == response_id)
                .values(num_event_bytes=num_event_bytes)
            )

        await self._database.run(add)

    async def events(self, workspace_id: str, response_id: str, first: int) -> list[tuple[int, bytes]]:
        def read(connection: Connection) -> list[tuple[int, bytes]]:
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

        if not self._could_exist(response_id):
            return []
        return await self._database.run(read, reads_only=True)

    def _could_exist(self, response_id: str) -> bool:
        """Not every database can even look for a NUL."""
        return self._database.exists and "\0" not in response_id

    def _add(self, connection: Connection, response: StoredResponse) -> None:
        now = self._now()
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = now
            connection.execute(responses.delete().where(responses.c.expires_at <= now))
        connection.execute(insert_into(connection, responses).values(_row(response)).on_conflict_do_nothing())
        self._bound_workspace(connection, response)

    def _replace(self, connection: Connection, response: StoredResponse) -> bool:
        replaced = connection.execute(
            responses.update()
            .where(
                responses.c.id == response.id,
                responses.c.workspace_id == response.workspace_id,
                responses.c.is_final.is_(False),
            )
            .values({name: value for name, value in _row(response).items() if name != "num_event_bytes"})
        )
        self._bound_workspace(connection, response)
        return replaced.rowcount == 1

    def _bound_workspace(self, connection: Connection, added: StoredResponse) -> None:
        """The newest response stays, whatever its size."""
        workspace_id = added.workspace_id
        if not self._growth.is_due(workspace_id, added.num_bytes):
            return
        size = (
            func.length(responses.c.body)
            + func.length(responses.c.input_items)
            + func.coalesce(responses.c.num_event_bytes, 0)
        )
        in_workspace = responses.c.workspace_id == workspace_id
        total = connection.execute(select(func.coalesce(func.sum(size), 0)).where(in_workspace)).scalar_one()
        oldest = (
            select(responses.c.id, size)
            .where(in_workspace, responses.c.is_final, responses.c.id != added.id)
            .order_by(responses.c.created_at)
            .limit(_DELETED_AT_ONCE)
        )
        while total > self._max_workspace_bytes and (rows := connection.execute(oldest).all()):
            ids = []
            for response_id, num_bytes in rows:
                if total <= self._max_workspace_bytes:
                    break
                ids.append(response_id)
                total -= num_bytes
            connection.execute(responses.delete().where(responses.c.id.in_(ids)))

    def _renew(
        self, connection: Connection, response_ids: Collection[str], lease_until: float
    ) -> frozenset[str]:
        is_running = responses.c.id.in_(response_ids), responses.c.is_final.is_(False)
        renewed = responses.update().where(*is_running).values(lease_until=lease_until)
        return frozenset(connection.execute(renewed.returning(responses.c.id)).scalars())

    def _find(self, connection: Connection, workspace_id: str, response_id: str) -> StoredResponse | None:
        row = connection.execute(
            responses.select().where(
                responses.c.id == response_id,
                responses.c.workspace_id == workspace_id,
                responses.c.expires_at > self._now(),
            )
        ).first()
        return None if row is None else StoredResponse(**row._mapping)

    def _history(
        self, connection: Connection, workspace_id: str, response_id: str, keep_until: float
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
        connection.execute(
            responses.update()
            .where(
                responses.c.id.in_([response.id for response in found]), responses.c.expires_at < keep_until
            )
            .values(expires_at=keep_until)
        )
        return found[::-1]

    def _delete(self, connection: Connection, workspace_id: str, response_id: str) -> bool:
        exists = self._find(connection, workspace_id, response_id) is not None
        if exists:
            connection.execute(responses.delete().where(responses.c.id == response_id))
        return exists


def _row(response: StoredResponse) -> dict[str, Any]:
    return {name: getattr(response, name) for name in response.__struct_fields__}
