"""How many requests each replica got lately, so that none gets much more than the others. Knows no prefix or queue.

Old requests fade. Rather than fading every count all the time, a new request counts for more the later it comes: only
the proportions matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from penstock.router.ledger import ReplicaLedger

_FREE_REQUESTS = 8.0  # beyond its share, that a replica may have: a few requests are no load
_LARGEST_EXPONENT = 500.0


class RecentShares:
    def __init__(self, max_share: float, window_s: float) -> None:
        self._max_share = max_share  # times the mean
        self._window_s = window_s
        self._origin_s: float | None = None

    def count(self, picked: ReplicaLedger, known: Iterable[ReplicaLedger], now: float) -> None:
        """`known`: everyone, whose counts are scaled down together before numbers get too large."""
        if self._exponent(now) > _LARGEST_EXPONENT:
            factor = exp(-min(self._exponent(now), _LARGEST_EXPONENT + 200.0))
            for ledger in known:
                ledger.recent_requests *= factor
            self._origin_s = now
        picked.recent_requests += exp(self._exponent(now))

    def within(
        self, candidates: Sequence[ReplicaLedger], picked: ReplicaLedger, now: float
    ) -> Sequence[ReplicaLedger]:
        """Those who may be picked instead of one that had too many; all of them when it had not."""
        total = sum([candidate.recent_requests for candidate in candidates])
        one = exp(min(self._exponent(now), _LARGEST_EXPONENT + 200.0))
        limit = self._max_share * total / len(candidates) + _FREE_REQUESTS * one
        if picked.recent_requests <= limit:
            return candidates
        return [candidate for candidate in candidates if candidate.recent_requests <= limit]

    def _exponent(self, now: float) -> float:
        if self._origin_s is None:
            self._origin_s = now
        return (now - self._origin_s) / self._window_s
