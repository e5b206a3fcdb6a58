"""Stored responses: the record, the protocol of stores, and a bounded store in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from penstock.core.errors import InvalidRequest

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

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input_items)

    def is_lost(self, now: float) -> bool:
        """Whether the gateway that should finish it has gone."""
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

    async def renew(self, response_ids: Collection[str], lease_until: float) -> None:
        """Say that responses are still being made."""
        ...

    async def find(self, workspace_id: str, response_id: str) -> StoredResponse | None: ...

    async def history(
        self, workspace_id: str, response_id: str, *, keep_until: float
    ) -> list[StoredResponse] | None:
        """A response and all that it continues, oldest first; None when one of them is not there. All of them are
        kept until `keep_until` at least: a conversation that goes on does not lose its beginning."""
        ...

    async def delete(self, workspace_id: str, response_id: str) -> bool: ...


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

    async def add(self, response: StoredResponse) -> None:
        if await self.find(response.workspace_id, response.id) is None:
            self._put(response)

    async def replace(self, response: StoredResponse) -> bool:
        known = await self.find(response.workspace_id, response.id)
        if known is None or known.is_final:
            return False
        self._put(response)
        return True

    async def renew(self, response_ids: Collection[str], lease_until: float) -> None:
        for key, response in self._responses.items():
            if response.id in response_ids:
                self._responses[key] = msgspec.structs.replace(response, lease_until=lease_until)

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

    def _put(self, response: StoredResponse) -> None:
        key = (response.workspace_id, response.id)
        self._forget(key)
        self._responses[key] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._responses)))

    def _forget(self, key: tuple[str, str]) -> None:
        response = self._responses.pop(key, None)
        if response is not None:
            self._num_bytes -= response.num_bytes
