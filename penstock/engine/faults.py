"""Faults of a step that do not end the engine, and how a step that lacks memory is cut. Knows no torch.

A step needs memory for its activations in proportion to its tokens. When a pass over all of them does not fit, its
halves may: they compute the same, one after the other. Only a piece that cannot be halved any more gives up, and
takes no more than its own request with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.plan import Chunk

NOT_A_NUMBER = "The model produced values that are not numbers for this request."
OUT_OF_MEMORY = "There was not enough memory to compute this request."
# Fewer tokens hardly need less memory.
SMALLEST_PIECE_TOKENS = 16


def halves(chunks: Sequence[Chunk]) -> tuple[Sequence[Chunk], Sequence[Chunk]] | None:
    """Two parts of a step, to be computed in this order; None when there is no smaller one. Rows and blocks must be
    up to date before: the parts do not mention them."""
    if len(chunks) > 1:
        middle = len(chunks) // 2
        return chunks[:middle], chunks[middle:]
    (chunk,) = chunks
    count = chunk.num_tokens // 2
    if count < SMALLEST_PIECE_TOKENS:
        return None
    first = msgspec.structs.replace(
        chunk, num_tokens=count, samples=False, new_block_ids=(), begins=False, in_flight=0
    )
    second = msgspec.structs.replace(
        chunk, start=chunk.start + count, num_tokens=chunk.num_tokens - count, new_block_ids=(), begins=False
    )
    return (first,), (second,)
