"""Counts what limiters decide, and says whether the shared ones can be reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.metrics.table import metric, metric_by, metrics
from penstock.gateway.ratelimits.refusals import Refusal


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
