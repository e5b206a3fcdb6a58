"""Runs tasks of an event loop in the background, and makes sure that they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

CANCEL_AGAIN_S = 0.2


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end. A library may swallow a cancellation that comes with an answer, as the
    client of Redis does, so the cancellation is repeated: not for tasks that clean up after themselves for long.
    Raises what the task has raised."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` while the body runs, and cancel it after the body."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
