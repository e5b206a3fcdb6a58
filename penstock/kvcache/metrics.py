"""Figures about the use of blocks, as pure functions of numbers that the caller holds."""

from __future__ import annotations

from collections.abc import Iterable


def fragmentation(requests: Iterable[tuple[int, int]], block_size: int) -> float:
    """The share of allocated token slots that hold nothing, over running requests.

    Each request is given as (tokens it has or is computing, blocks in its table). 0.0 when nothing is
    allocated.
    """
    num_tokens = 0
    num_slots = 0
    for request_tokens, request_blocks in requests:
        num_tokens += request_tokens
        num_slots += request_blocks * block_size
    return 1.0 - num_tokens / num_slots if num_slots else 0.0
