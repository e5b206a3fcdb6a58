"""Translates requests with many messages off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

DIRECT_PARTS = 1000  # messages and parts of messages; a hop to another thread costs as much as some dozens

Result = TypeVar("Result")


async def translated(messages: Sequence[object], translate: Callable[[], Result]) -> Result:
    """Return what `translate` makes of a request with these messages. Very many are translated in a thread, which
    gives the event loop its turns."""
    if _num_parts(messages) <= DIRECT_PARTS:
        return translate()
    return await asyncio.to_thread(translate)


def _num_parts(messages: Sequence[object]) -> int:
    if len(messages) > DIRECT_PARTS:
        return len(messages)
    contents = (getattr(message, "content", None) for message in messages)
    return len(messages) + sum(len(content) for content in contents if isinstance(content, list))
