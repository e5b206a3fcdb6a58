"""Turns of those who ask for much: a query may read millions of rows, and a database has few threads, which all other
requests need too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from penstock.core.errors import RateLimited

MAX_QUERIES = 2  # that this process runs at once: fewer than the database has threads
MAX_QUERIES_OF_WORKSPACE = 8  # that run or wait
RETRY_AFTER_S = 2.0


class QueryTurns:
    """One query of a workspace runs at a time, so that no workspace keeps others from asking."""

    def __init__(self, noun: str) -> None:
        self._noun = noun  # what is asked for
        self._running = asyncio.Semaphore(MAX_QUERIES)
        self._of_workspace: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._num_asked: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, workspace_id: str | None) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. Queries over all workspaces share one turn. Raises RateLimited when too many
        queries of the workspace wait."""
        name = workspace_id or ""
        if self._num_asked[name] >= MAX_QUERIES_OF_WORKSPACE:
            raise RateLimited(
                f"{MAX_QUERIES_OF_WORKSPACE} requests for {self._noun} run or wait, which is the limit.",
                hint="Wait for their answers.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_asked[name] += 1
        lock = self._of_workspace.setdefault(name, asyncio.Lock())
        try:
            async with lock, self._running:
                yield
        finally:
            self._num_asked[name] -= 1
            if not self._num_asked[name]:
                del self._num_asked[name]
