"""Adds up what gateways report: figures of a release's two revisions, and recent times. Knows no gateway, no socket
and no policy; time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.cluster.control_messages import ModelReport, Sample
from penstock.control.release import Evidence, Figures
from penstock.core.figures import percentile

MAX_TIMES = 20_000  # of each kind, for percentiles; older ones are dropped


class RecentTimes:
    """Keeps the times of the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)

    def add(self, value_s: float, now: float) -> None:
        self._times.append((now, value_s))

    def percentile(self, percent: float, now: float) -> float | None:
        while self._times and now - self._times[0][0] > self._window_s:
            self._times.popleft()
        return _percentile([value_s for _, value_s in self._times], percent)


class RecentRate:
    """Measures an amount per second, over the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._amounts: deque[tuple[float, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        if amount:
            self._amounts.append((now, amount))

    def per_s(self, now: float) -> float:
        while self._amounts and now - self._amounts[0][0] > self._window_s:
            self._amounts.popleft()
        return sum(amount for _, amount in self._amounts) / self._window_s


class _RevisionFigures:
    def __init__(self) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self.ttfts_s: deque[float] = deque(maxlen=MAX_TIMES)
        self.itls_s: deque[float] = deque(maxlen=MAX_TIMES)

    def add(self, sample: Sample) -> None:
        self.num_requests += 1
        self.num_errors += sample.has_failed
        if sample.ttft_s is not None:
            self.ttfts_s.append(sample.ttft_s)
        if sample.itl_s is not None:
            self.itls_s.append(sample.itl_s)

    def figures(self) -> Figures:
        return Figures(
            num_requests=self.num_requests,
            num_errors=self.num_errors,
            ttft_p95_s=_percentile(self.ttfts_s, 95),
            itl_p95_s=_percentile(self.itls_s, 95),
        )


class EvidenceCollector:
    """Collects the evidence of the present stage of a release. Requests that began in another stage do not count."""

    def __init__(self, stable: str, candidate: str) -> None:
        self._names = (stable, candidate)
        self.begin(0)

    def begin(self, stage_number: int) -> None:
        """Forget all evidence, because another stage begins."""
        self._stage_number = stage_number
        self._figures = {name: _RevisionFigures() for name in self._names}
        self._num_compared = 0
        self._num_diverged = 0

    def add(self, sample: Sample) -> None:
        figures = self._figures.get(sample.revision)
        if figures is not None and sample.stage_number == self._stage_number:
            figures.add(sample)

    def add_comparisons(self, report: ModelReport) -> None:
        if report.stage_number == self._stage_number:
            self._num_compared += report.num_compared
            self._num_diverged += report.num_diverged

    def evidence(self) -> Evidence:
        stable, candidate = (self._figures[name].figures() for name in self._names)
        return Evidence(
            stage_number=self._stage_number,
            stable=stable,
            candidate=candidate,
            num_compared=self._num_compared,
            num_diverged=self._num_diverged,
        )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(sorted(values), percent) if values else None
