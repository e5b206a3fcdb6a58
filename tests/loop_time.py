"""Time of an event loop that passes when a test says so."""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Put the clock of the running loop forward. What is due by then is called in the next turn of the loop. Only
    asyncio's own loops can do this."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def settle() -> None:
    """Let the loop turn often enough that what was sent over sockets on this loop is read, and handled."""
    for _ in range(50):
        await asyncio.sleep(0)
