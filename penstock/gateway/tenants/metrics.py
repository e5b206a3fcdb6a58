"""Counts the callers who were not let in, and how the look-ups behind that fare. Never names a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.metrics.table import metric, metric_by


class AuthenticationMetrics(Collector):
    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()  # by the code of the error
        self.failed_checks = 0
        self.remembered_keys = 0

    def collect(self) -> Iterator[Metric]:
        yield metric_by("authentication_refusals", self.refusals)
        yield metric("key_check_failures", self.failed_checks)
        yield metric("remembered_keys", self.remembered_keys)
