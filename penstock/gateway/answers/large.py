"""Answers with very many log-probabilities: how many one answer may hold for its reader, and work on them off the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.errors import InvalidRequest
from penstock.gateway.answers.choice import Delta, merged
from penstock.gateway.turns import in_thread

# Work on less takes less time than a hop to another thread is worth.
DIRECT_LOGPROBS = 2048
_DIRECT_DELTAS = 2048
# Numbers of all answers to one request that are read whole: about 100 bytes each, and as many on the wire.
MAX_WHOLE_LOGPROBS = 1 << 22

Result = TypeVar("Result")


async def off_loop_if_large(deltas: Sequence[Delta], work: Callable[[], Result]) -> Result:
    """Return the result of `work` on the deltas. Many log-probabilities are worked on in a thread, which gives the
    event loop its turns."""
    if sum([delta.num_logprobs for delta in deltas if delta.details]) <= DIRECT_LOGPROBS:
        return work()
    return await in_thread(work)


async def merged_later(batches: Sequence[Sequence[Delta]]) -> list[Delta]:
    """Return one delta for each answer. Very many deltas are merged in a thread."""
    num_deltas = sum(map(len, batches))
    num_logprobs = sum(delta.num_logprobs for deltas in batches for delta in deltas)
    if num_deltas <= _DIRECT_DELTAS and num_logprobs <= DIRECT_LOGPROBS:
        return merged(batches)
    return await in_thread(merged, batches)


def too_many_logprobs() -> InvalidRequest:
    return InvalidRequest(
        f"The answers hold more than {MAX_WHOLE_LOGPROBS} log-probabilities, which is the most for a request that is "
        "not streamed.",
        param="logprobs",
        hint="Stream the answers, or ask for fewer answers, tokens or alternatives.",
    )
