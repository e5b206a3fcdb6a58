"""The percentile that every report of Penstock uses."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share does not exceed: always one that was observed. Raises IndexError
    when there are no values."""
    return ordered[max(0, ceil(len(ordered) * percent / 100.0) - 1)]
