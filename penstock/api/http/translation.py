"""Translates requests with many messages off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.gateway.turns import in_thread

DIRECT_PARTS = 1000  # messages and parts of messages; a hop to another thread costs as much as some dozens
BYTES_PER_PART = 1 << 10  # of a file, whose base64 text is decoded

Result = TypeVar("Result")


async def translated(messages: Sequence[object], translate: Callable[[], Result]) -> Result:
    """Return what `translate` makes of a request with these messages. Very many, or large files in them, are
    translated in a thread, which gives the event loop its turns."""
    if _num_parts(messages) <= DIRECT_PARTS:
        return translate()
    return await in_thread(translate)


def _num_parts(messages: Sequence[object]) -> int:
    if len(messages) > DIRECT_PARTS:
        return len(messages)
    num_parts = len(messages)
    for message in messages:
        content = getattr(message, "content", None)
        if isinstance(content, list):
            num_parts += len(content)
            if num_parts <= DIRECT_PARTS:
                num_parts += sum(map(_parts_of_file, content))
    return num_parts


def _parts_of_file(part: object) -> int:
    """Return as how many parts a file counts that is inside the request, in OpenAI's APIs."""
    data = getattr(getattr(part, "file", None) or part, "file_data", None)
    return len(data) // BYTES_PER_PART if isinstance(data, str) else 0
