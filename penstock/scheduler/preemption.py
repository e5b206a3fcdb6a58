"""Whom to preempt. Knows running requests, and not what the room is for.

A preempted request loses its blocks, keeps its tokens, and computes again what the cache has lost meanwhile.

Why this always ends. Order requests by seniority: rank, then arrival. The most senior running request is never a
victim of growth while all others may be, and `Scheduler.add` refuses what does not fit the cache alone: so it gets
every block it asks for, and ends. Seniority never falls, because arrival is fixed and aging only makes more urgent.
So whoever has not ended yet becomes the most senior some day. Displacement takes only requests that still rank as
batch, for one of a more urgent tier: aging lifts a batch request out of its reach.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.sequence import BATCH_RANK, Sequence


def seniority(sequence: Sequence) -> tuple[int, int]:
    """Smaller is more senior."""
    return sequence.rank, sequence.number


def victims_for_growth(running: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Who may be preempted so that others can grow, cheapest first: all but the most senior."""
    by_seniority = sorted(running, key=seniority)
    return _cheapest_first(by_seniority[1:], block_size)


def victims_for_displacement(running: Iterable[Sequence], block_size: int) -> list[Sequence]:
    """Who may be preempted so that a more urgent request can start, cheapest first."""
    return _cheapest_first([sequence for sequence in running if sequence.rank == BATCH_RANK], block_size)


def _cheapest_first(candidates: list[Sequence], block_size: int) -> list[Sequence]:
    """The least urgent rank first; then who has the least to compute again, where blocks that were found in the
    cache are expected to be found again; then who has the most left to do; then the latest to arrive."""

    def cost(sequence: Sequence) -> tuple[int, int, int, int]:
        recompute_tokens = sequence.num_computed - sequence.num_reused_blocks * block_size
        remaining_tokens = sequence.predicted_length - sequence.num_known
        return -sequence.rank, recompute_tokens, -remaining_tokens, -sequence.number

    return sorted(candidates, key=cost)
