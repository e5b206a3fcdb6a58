"""A registry in memory, for fleets within one process."""

from __future__ import annotations

import asyncio
import contextlib
import time


class MemoryRegistry:
    """Implements `registry.Registry`."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[bytes, float]] = {}
        self._documents: dict[str, bytes] = {}
        self._leader, self._epoch, self._lease_end_s = "", 0, 0.0
        self._changed = asyncio.Event()

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        self._records[name] = record, time.monotonic() + lease_s
        self._tell()

    async def records(self) -> dict[str, bytes]:
        now = time.monotonic()
        return {name: record for name, (record, end_s) in self._records.items() if end_s > now}

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        now = time.monotonic()
        if self._lease_end_s > now and self._leader != candidate:
            return None
        if self._lease_end_s <= now:
            self._leader, self._epoch = candidate, max(self._epoch, above) + 1
        self._lease_end_s = now + lease_s
        return self._epoch

    async def resign(self, candidate: str) -> None:
        if self._leader == candidate:
            self._lease_end_s = 0.0

    async def write(self, name: str, document: bytes | None, epoch: int) -> bool:
        if epoch != self._epoch:
            return False
        if document is None:
            self._documents.pop(name, None)
        else:
            self._documents[name] = document
        self._tell()
        return True

    async def documents(self) -> dict[str, bytes]:
        return dict(self._documents)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        pass
