"""Collects the evidence that the gates of a release judge, from samples of single attempts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.control.release import Evidence, Figures
from penstock.core.figures import percentile

MAX_TIMES = 20_000  # of each kind, for percentiles; older ones are dropped


class AttemptSample(Protocol):
    """One attempt that ended."""

    @property
    def revision(self) -> str: ...
    @property
    def stage_number(self) -> int | None:
        """Return the stage of the release in which the attempt began; None: there was none."""
        ...

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def itl_s(self) -> float | None: ...
    @property
    def has_failed(self) -> bool: ...


class _RevisionFigures:
    def __init__(self) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self.ttfts_s: deque[float] = deque(maxlen=MAX_TIMES)
        self.itls_s: deque[float] = deque(maxlen=MAX_TIMES)

    def add(self, sample: AttemptSample) -> None:
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

    def add(self, sample: AttemptSample) -> None:
        figures = self._figures.get(sample.revision)
        if figures is not None and sample.stage_number == self._stage_number:
            figures.add(sample)

    def add_comparisons(self, stage_number: int | None, num_compared: int, num_diverged: int) -> None:
        if stage_number == self._stage_number:
            self._num_compared += num_compared
            self._num_diverged += num_diverged

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
