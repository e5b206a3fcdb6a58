"""Counts the callers who were not let in, and how the look-ups behind that fare. Never names a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class AuthenticationMetrics(Collector):
    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()  # by the code of the error
        self.failed_checks = 0
        self.remembered_keys = 0

    def collect(self) -> Iterator[Metric]:
        refusals = CounterMetricFamily(
            "penstock_authentication_refusals", "Callers who were not let in.", labels=("code",)
        )
        for code, count in self.refusals.items():
            refusals.add_metric([code], count)
        yield refusals
        yield CounterMetricFamily(
            "penstock_key_check_failures",
            "Times that the database did not say whether keys changed.",
            value=self.failed_checks,
        )
        yield GaugeMetricFamily(
            "penstock_remembered_keys", "Keys, known or unknown, held in memory.", value=self.remembered_keys
        )
