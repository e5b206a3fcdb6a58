"""Runs tasks of an event loop in the background, and makes sure that they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

CANCEL_AGAIN_S = 0.2

logger = logging.getLogger(__name__)


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
    """Run `work` while the body runs, and cancel it after the body. The log tells at once of work that fails: the
    body may run for months."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_tell_of_failure)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _tell_of_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("work in the background has ended for good", exc_info=error)
