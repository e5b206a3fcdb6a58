"""The reasons why limiters refuse requests, as errors for clients and as metrics. Knows neither buckets nor Redis.

`LimiterMetrics` also says whether a shared limiter can reach Redis.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sized
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.errors import QuotaExceeded, RateLimited, RequestExceedsLimit
from penstock.core.identity import RateLimits
from penstock.gateway.metrics.table import metric, metric_by, metrics
from penstock.gateway.ratelimits.settings import LimitScope, Subject

# Bounds for the wait that a full concurrency limit suggests, which is only an estimate.
MIN_SLOT_WAIT_S = 0.1
MAX_SLOT_WAIT_S = 60.0


class Figure(enum.StrEnum):
    """One kind of limit of a subject. The value is the name of the limit in the settings."""

    REQUESTS = "requests_per_minute"
    INPUT_TOKENS = "input_tokens_per_minute"
    OUTPUT_TOKENS = "output_tokens_per_minute"
    CONCURRENCY = "concurrent_requests"
    DAY_BUDGET = "dollars_per_day"
    MONTH_BUDGET = "dollars_per_month"


_SUBJECTS = {
    LimitScope.KEY: "this key",
    LimitScope.WORKSPACE: "this workspace",
    LimitScope.MODEL: "this model",
    LimitScope.KEY_MODEL: "this key and model",
    LimitScope.WORKSPACE_MODEL: "this workspace and model",
}


class Refusal(NamedTuple):
    """A limit that refuses a request, and the seconds to wait; infinity where waiting does not help. The largest
    refusal is told."""

    wait_s: float
    figure: Figure
    subject: Subject
    limit: float
    amount: float  # what the request needed of it


def error_for(refusal: Refusal, rate_limits: RateLimits) -> RateLimited:
    error = _error_for(refusal)
    error.rate_limits = rate_limits
    return error


def _error_for(refusal: Refusal) -> RateLimited:
    whose = _SUBJECTS[refusal.subject.scope]
    match refusal.figure:
        case Figure.DAY_BUDGET | Figure.MONTH_BUDGET:
            period = "daily" if refusal.figure is Figure.DAY_BUDGET else "monthly"
            return QuotaExceeded(
                f"The {period} budget of {_dollars(refusal.limit)} for {whose} is used up, or would be by this "
                "request and those that run.",
                retry_after_s=refusal.wait_s,
            )
        case Figure.CONCURRENCY:
            return RateLimited(
                f"{_number(refusal.limit)} requests at once are allowed for {whose}, and as many are running.",
                retry_after_s=refusal.wait_s,
            )
    what = refusal.figure.removesuffix("_per_minute").replace("_", " ")
    if math.isinf(refusal.wait_s):
        return RequestExceedsLimit(
            f"The request needs {_number(refusal.amount)} {what}, more than the {_number(refusal.limit)} per minute "
            f"that {whose} may use."
        )
    return RateLimited(
        f"The limit of {_number(refusal.limit)} {what} per minute for {whose} is reached.",
        retry_after_s=refusal.wait_s,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _dollars(value: float) -> str:
    """Return a budget in words. A budget of less than a cent is not rounded to nothing."""
    return f"${value:,.2f}" if value >= 0.01 or not value else f"${value:.6f}".rstrip("0")


class SlotTimes:
    """Measures how long slots of a concurrency limit are held, so that a refusal can say when a slot may be free."""

    __slots__ = ("_mean_s",)

    _WEIGHT_OF_NEWEST = 0.1

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def observe(self, duration_s: float) -> None:
        if self._mean_s is None:
            self._mean_s = duration_s
        else:
            self._mean_s += self._WEIGHT_OF_NEWEST * (duration_s - self._mean_s)

    def wait_s(self, num_running: int) -> float:
        """Until the first of `num_running`, begun at random moments, may be expected to end."""
        mean_s = 1.0 if self._mean_s is None else self._mean_s
        return min(MAX_SLOT_WAIT_S, max(MIN_SLOT_WAIT_S, mean_s / max(1, num_running)))


class LimiterMetrics(Collector):
    """Written by limiters on the event loop, read by a scrape. `redis_is_up` stays None without Redis."""

    def __init__(self) -> None:
        self.admitted = 0
        self.refusals: Counter[tuple[str, str]] = Counter()  # by scope and figure
        self.subjects: Sized = ()
        self.redis_is_up: bool | None = None
        self.redis_errors = 0
        self.local_decisions = 0
        self.closed_refusals = 0
        self.settlements_pending = 0
        self.settlements_lost = 0

    def count_refusal(self, refusal: Refusal) -> None:
        self.refusals[refusal.subject.scope.value, refusal.figure.value] += 1

    def collect(self) -> Iterator[Metric]:
        yield metric("limits_admitted", self.admitted)
        yield metric_by("limits_refused", self.refusals)
        yield metric("limits_subjects", len(self.subjects))
        if self.redis_is_up is not None:
            yield from metrics(
                (
                    ("limits_redis_up", self.redis_is_up),
                    ("limits_settlements_pending", self.settlements_pending),
                    ("limits_redis_errors", self.redis_errors),
                    ("limits_local_decisions", self.local_decisions),
                    ("limits_closed_refusals", self.closed_refusals),
                    ("limits_settlements_lost", self.settlements_lost),
                )
            )
