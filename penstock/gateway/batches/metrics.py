"""What the runner of batches counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.gateway.batches.batch import Outcome

_COUNTED: tuple[Outcome, ...] = ("succeeded", "errored")


class BatchMetrics(Collector):
    """Of this process alone: lines that it recorded, and batches that it has in hand."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        self._num_running = num_running
        self.lines: dict[Outcome, int] = dict.fromkeys(_COUNTED, 0)
        self.retries = 0

    def collect(self) -> Iterator[Metric]:
        lines = CounterMetricFamily(
            "penstock_batch_lines", "Lines of batches that were run, by outcome.", labels=("outcome",)
        )
        for outcome, count in self.lines.items():
            lines.add_metric((outcome,), count)
        yield lines
        yield CounterMetricFamily(
            "penstock_batch_line_retries",
            "Lines that had to wait for limits or an engine and be tried again.",
            self.retries,
        )
        yield GaugeMetricFamily("penstock_batches_running", "Batches in hand.", self._num_running())
