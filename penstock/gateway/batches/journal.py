"""Writes results of lines to the database in groups: as many as have come while the last group was being written.

Knows no batch; only that a result is safe once `record` returns.
"""

from __future__ import annotations

import asyncio

from penstock.gateway.batches.batch import LineResult
from penstock.gateway.batches.store import BatchStore

_MAX_GROUP = 256


class Journal:
    """Must be used from one event loop. `holder` is the name under which the lease is held."""

    def __init__(self, store: BatchStore, holder: str) -> None:
        self._store = store
        self._holder = holder
        self._waiting: list[tuple[str, LineResult, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def record(self, batch_id: str, result: LineResult) -> None:
        """Returns once the result survives a crash. Raises LeaseLost, or what the database met."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch_id, result, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_groups())
        await done

    async def settle(self) -> None:
        """Returns once everything given so far is written, or could not be."""
        while self._writer is not None:
            await asyncio.wait((self._writer,))

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
                await self._write(group)
        finally:
            self._writer = None

    async def _write(self, group: list[tuple[str, LineResult, asyncio.Future[None]]]) -> None:
        error: Exception | None = None
        try:
            await self._store.record(self._holder, [(batch_id, result) for batch_id, result, _ in group])
        except Exception as failure:
            error = failure
        for _, _, done in group:
            if done.done():  # its line was cancelled while it waited
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
