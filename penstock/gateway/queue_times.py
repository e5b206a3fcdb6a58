"""Estimates how long an engine's queue takes to empty, from the tokens per second while requests waited.

Pure: the engine's figures and the time come in as arguments. The scheduler, which refuses when its queue is full, has
a measure of its own; this one serves requests that had to leave the queue.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from penstock.core.messages import EngineStats

WINDOW_S = 30.0
SAMPLE_INTERVAL_S = 0.25
MIN_WAIT_S = 1.0
MAX_WAIT_S = 120.0


class _Sample(NamedTuple):
    at_s: float
    tokens_computed: int
    num_waiting: int


class QueueTimes:
    """Estimates from the engine's stats, which are fed in whenever they are looked at."""

    __slots__ = ("_sample", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._sample: _Sample | None = None
        # Both fade over the window. Time in which nobody waited is left out: it says nothing about speed.
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, stats: EngineStats, now: float) -> None:
        before = self._sample
        if before is not None and now - before.at_s < SAMPLE_INTERVAL_S:
            return
        self._sample = _Sample(now, stats.tokens_computed, stats.num_waiting)
        if before is None or not before.num_waiting or stats.tokens_computed < before.tokens_computed:
            return  # the first look, an idle stretch, or another engine
        elapsed_s = now - before.at_s
        decay = exp(-elapsed_s / WINDOW_S)
        self._tokens = self._tokens * decay + stats.tokens_computed - before.tokens_computed
        self._seconds = self._seconds * decay + elapsed_s

    def drain_s(self, stats: EngineStats, mean_answer_tokens: float) -> float:
        """Seconds until all waiting requests have been served, within sane bounds for a Retry-After."""
        work_tokens = stats.num_waiting_tokens + stats.num_waiting * mean_answer_tokens
        tokens_per_s = self._tokens_per_s(stats)
        if tokens_per_s is None:
            return MIN_WAIT_S
        if work_tokens >= tokens_per_s * MAX_WAIT_S:
            return MAX_WAIT_S
        return max(MIN_WAIT_S, work_tokens / tokens_per_s)

    def _tokens_per_s(self, stats: EngineStats) -> float | None:
        if self._seconds:
            return self._tokens / self._seconds
        return stats.step_tokens / stats.step_s if stats.step_s else None
