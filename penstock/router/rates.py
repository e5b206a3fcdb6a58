"""How fast a replica computes, fitted to its reports. Knows pairs of (tokens, seconds) and nothing else.

A line, seconds = base + tokens × rate, fitted by least squares in which old pairs fade. Two imaginary pairs, which do
not fade, hold it in place while little is known and when all pairs are alike.
"""

from __future__ import annotations

_FADING = 0.97  # weight left of each pair after the next: 33 pairs count, about 3 s of heartbeats
_PRIOR_WEIGHT = 0.05
_MIN_RATE_S = 1e-9


class LinearFit:
    def __init__(self, base_s: float, token_s: float, typical_tokens: int) -> None:
        """A guess to start from, and how many tokens the larger pairs will have."""
        low, high = 0.0, float(typical_tokens)
        self._prior = (
            2.0 * _PRIOR_WEIGHT,
            _PRIOR_WEIGHT * (low + high),
            _PRIOR_WEIGHT * (low * low + high * high),
            _PRIOR_WEIGHT * (2.0 * base_s + token_s * (low + high)),
            _PRIOR_WEIGHT * (base_s * (low + high) + token_s * (low * low + high * high)),
        )
        self._sums = [0.0] * 5  # of weights: 1, x, xx, y, xy
        self.base_s = base_s
        self.token_s = token_s
        self.num_observed = 0

    def observe(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [_FADING * total + value for total, value in zip(self._sums, new, strict=True)]
        self.num_observed += 1
        count, x, xx, y, xy = (total + prior for total, prior in zip(self._sums, self._prior, strict=True))
        slope = (count * xy - x * y) / (count * xx - x * x)
        base = (y - slope * x) / count
        if base < 0.0:  # the best line through the origin
            base, slope = 0.0, xy / xx
        elif slope < _MIN_RATE_S:
            base, slope = y / count, _MIN_RATE_S
        self.base_s, self.token_s = base, slope
