"""What the runner of batches counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.batches.batch import Outcome
from penstock.gateway.metrics.table import metric, metric_by

_COUNTED: tuple[Outcome, ...] = ("succeeded", "errored")


class BatchMetrics(Collector):
    """Of this process alone: lines that it recorded, and batches that it has in hand."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        self._num_running = num_running
        self.lines: dict[Outcome, int] = dict.fromkeys(_COUNTED, 0)
        self.retries = 0

    def collect(self) -> Iterator[Metric]:
        yield metric_by("batch_lines", self.lines)
        yield metric("batch_line_retries", self.retries)
        yield metric("batches_running", self._num_running())
