"""Counts what limiters decide, and says whether the shared ones can be reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
        yield CounterMetricFamily(
            "penstock_limits_admitted", "Requests that all limits allowed.", value=self.admitted
        )
        refused = CounterMetricFamily(
            "penstock_limits_refused", "Requests refused, by the limit to blame.", labels=("scope", "limit")
        )
        for (scope, figure), count in self.refusals.items():
            refused.add_metric([scope, figure], count)
        yield refused
        yield GaugeMetricFamily(
            "penstock_limits_subjects",
            "Keys, workspaces and models whose use this process remembers.",
            value=len(self.subjects),
        )
        if self.redis_is_up is not None:
            yield from self._redis(self.redis_is_up)

    def _redis(self, is_up: bool) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "penstock_limits_redis_up", "Whether shared limits are decided in Redis; 0 is not.", value=is_up
        )
        yield GaugeMetricFamily(
            "penstock_limits_settlements_pending",
            "Ended requests that Redis was not told of yet.",
            value=self.settlements_pending,
        )
        for name, help_text, value in (
            ("redis_errors", "Calls to Redis that failed.", self.redis_errors),
            ("local_decisions", "Decisions made locally while Redis was gone.", self.local_decisions),
            ("closed_refusals", "Requests refused because Redis was gone.", self.closed_refusals),
            ("settlements_lost", "Settlements given up after a long outage.", self.settlements_lost),
        ):
            yield CounterMetricFamily(f"penstock_limits_{name}", help_text, value=value)
