"""How long will an answer get? Learned online, per tenant, from the answers that ended. Knows no blocks or queues.

Lengths fall into bins whose edges double, which is as much precision as such a guess deserves. Old answers fade, so
that a tenant who changes habits is understood after some hundred answers.
"""

from __future__ import annotations

_FIRST_EDGE_TOKENS = 16
NUM_LENGTH_BINS = 14  # the last one begins past 65,536 tokens
_EDGES = tuple(_FIRST_EDGE_TOKENS << index for index in range(NUM_LENGTH_BINS))

_DECAY_PER_ANSWER = 0.99
_QUANTILE = 0.7  # above the median: a guess too low costs a preemption, one too high a little waiting
_MIN_WEIGHT = 4.0  # answers of the right kind before a histogram is believed
_UNKNOWN_LENGTH_TOKENS = 256
_MAX_TENANTS = 4096


def length_bin(num_tokens: int) -> int:
    """0 for at most 16 tokens, 1 for at most 32, and so on."""
    return max(0, min((num_tokens - 1).bit_length() - 4, NUM_LENGTH_BINS - 1))


class OutputLengthEstimator:
    def __init__(self) -> None:
        self._everyone = [0.0] * NUM_LENGTH_BINS
        self._tenants: dict[str, list[float]] = {}  # least recently heard of first

    def observe(self, tenant: str, num_output_tokens: int) -> None:
        """An answer ended by itself or at its limit. Aborted ones say nothing about length."""
        weights = self._tenants.pop(tenant, None)
        if weights is None:
            weights = [0.0] * NUM_LENGTH_BINS
            if len(self._tenants) >= _MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
        self._tenants[tenant] = weights
        index = length_bin(num_output_tokens)
        for histogram in (weights, self._everyone):
            for position in range(NUM_LENGTH_BINS):
                histogram[position] *= _DECAY_PER_ANSWER
            histogram[index] += 1.0

    def predict(self, tenant: str, num_output_tokens: int, limit: int) -> int:
        """The final length of an answer that has `num_output_tokens` already; more than that, and within `limit`."""
        first_bin = length_bin(num_output_tokens + 1)
        for histogram in (self._tenants.get(tenant), self._everyone):
            if histogram is None:
                continue
            weight = sum(histogram[first_bin:])
            if weight >= _MIN_WEIGHT:
                return min(limit, max(num_output_tokens + 1, _quantile(histogram, first_bin, weight)))
        return min(limit, num_output_tokens + _UNKNOWN_LENGTH_TOKENS)


def _quantile(histogram: list[float], first_bin: int, weight: float) -> int:
    below = 0.0
    for index in range(first_bin, NUM_LENGTH_BINS):
        below += histogram[index]
        if below >= _QUANTILE * weight:
            return _EDGES[index]
    return _EDGES[-1]
