"""Computes how likely a difference is by chance: the tests behind the gates of a release. Pure.

Tests of shares and of ordered samples are exact and assume nothing about the distribution of times. Times that follow
each other are alike, because a queue lasts: a test of times therefore counts fewer requests than there were, by the
long-run variance of their series.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, exp, lgamma, log
from operator import mul

_LEAST_VARIANCE = 1e-12
_MAX_DEPENDENCE = 0.95  # of a value on the previous value
_LEAST_SERIES = 20  # values; fewer values say nothing about dependence
_NEGLIGIBLE = 1e-12  # share of a sum whose terms only get smaller


def chance_of_share(num_events: int, count: int, share: float) -> float:
    """Return the chance of this many events or more among `count`, if each happens with this chance."""
    if num_events <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    return _sum(
        _log_choose(count, k) + k * log(share) + (count - k) * log(1.0 - share)
        for k in range(num_events, count + 1)
    )


def chance_of_more(num_events: int, count: int, other_events: int, other_count: int) -> float:
    """Return the chance that this many, or more, of all events fall on the first side, if events are equally likely
    on both sides (Fisher's exact test)."""
    all_events = num_events + other_events
    total = _log_choose(count + other_count, all_events)
    return _sum(
        _log_choose(count, k) + _log_choose(other_count, all_events - k) - total
        for k in range(num_events, min(count, all_events) + 1)
    )


def chance_of_slower(times_s: Sequence[float], allowed: Sequence[float], percent: float) -> float:
    """Return the chance that as many times as here, or more, exceed the percentile of the allowed times, if both come
    from one distribution (a precedence test). Both are in the order in which they were observed."""
    ordered = sorted(allowed)
    place = max(0, ceil(len(ordered) * percent / 100.0) - 1)
    is_above = [time_s > ordered[place] for time_s in times_s]
    # Rounded so that a difference is found less often.
    count = max(1, int(len(times_s) / _repetition(is_above)))
    above = sum(is_above) * count // len(times_s)
    other_count = max(1, int(len(allowed) / _repetition([time_s > ordered[place] for time_s in allowed])))
    other_above = min(
        other_count - 1, ceil((len(ordered) - 1 - place) * other_count / len(ordered))
    )  # the other samples are at the percentile or below
    below = other_count - 1 - other_above
    total = _log_choose(count + other_count, count)
    return _sum(
        _log_choose(k + other_above, k) + _log_choose(count - k + below, below) - total
        for k in range(above, count + 1)
    )


def dependence(values: Sequence[float]) -> float:
    """Return how much each value depends on the last, with the usual correction for short series."""
    count = len(values)
    mean = sum(values) / count
    deviations = [value - mean for value in values]
    variance = sum(each * each for each in deviations)
    if variance == 0.0:
        return 0.0
    first: float = sum(map(mul, deviations, deviations[1:])) / variance
    return min(_MAX_DEPENDENCE, first + (1.0 + 3.0 * first) / count)


def long_run_variance(values: Sequence[float]) -> float:
    """Return the variance that the mean of a series has, times its length: the largest of three estimates, because
    each is too small on short series of some kind. The plain variance is right without autocorrelation. Newey and
    West add autocovariances with Bartlett's weights. The third takes the series for one in which each value depends
    on the last."""
    count = len(values)
    mean = sum(values) / count
    deviations = [value - mean for value in values]
    num_lags = min(count // 4, int(4.0 * (count / 100.0) ** (2.0 / 9.0)))
    plain = total = sum(each * each for each in deviations) / count
    for lag in range(1, num_lags + 1):
        covariance = sum(map(mul, deviations, deviations[lag:])) / count
        total += 2.0 * (1.0 - lag / (num_lags + 1.0)) * covariance
    phi = dependence(values)
    dependent = plain * (1.0 + phi) / (1.0 - phi)
    # Two arms that are both far beyond their targets differ by rounding errors alone, which must not decide.
    return max(plain, total, dependent, _LEAST_VARIANCE) * count / (count - 1.0 - num_lags)


def _repetition(is_event: Sequence[bool]) -> float:
    """Return how many observations of a series say as much as one independent observation."""
    count = len(is_event)
    share = sum(is_event) / count
    if count < _LEAST_SERIES or share in (0.0, 1.0):
        return 1.0
    return max(1.0, long_run_variance(is_event) / (share * (1.0 - share) * count / (count - 1.0)))


def _sum(log_chances: Iterable[float]) -> float:
    """Add the chances of a tail. Stops where the rest of a falling tail is negligible."""
    total, last = 0.0, 0.0
    for log_chance in log_chances:
        chance = exp(log_chance)
        total += chance
        if chance < last and chance < _NEGLIGIBLE * total:
            break
        last = chance
    return min(1.0, total)


def _log_choose(count: int, chosen: int) -> float:
    if not 0 <= chosen <= count:
        return float("-inf")
    return lgamma(count + 1.0) - lgamma(chosen + 1.0) - lgamma(count - chosen + 1.0)
