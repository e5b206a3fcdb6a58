"""Collects the evidence that the gates of a release judge, from samples of single attempts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Protocol

from penstock.control.chance import chance_of_more, chance_of_share, chance_of_slower
from penstock.control.gates import LATENCY_PERCENT, Evidence, Finding, GateConfig, Looks
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


class _Samples:
    """The samples of one revision."""

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


class EvidenceCollector:
    """Collects the evidence of the present stage of a release. Requests that began in another stage do not count."""

    def __init__(self, stable: str, candidate: str, config: GateConfig) -> None:
        self._names = (stable, candidate)
        self._config = config
        self.begin(0)

    def begin(self, stage_number: int) -> None:
        """Forget all evidence, because another stage begins."""
        self._stage_number = stage_number
        self._stable, self._candidate = _Samples(), _Samples()
        self._of = dict(zip(self._names, (self._stable, self._candidate), strict=True))
        self._looks = Looks(self._config.min_requests)
        self._errors: Finding | None = None
        self._ttft: Finding | None = None
        self._itl: Finding | None = None
        self._num_compared = 0
        self._num_diverged = 0
        self._looks_at_answers = Looks(self._config.min_compared)
        self._divergence: Finding | None = None

    def add(self, sample: AttemptSample) -> None:
        samples = self._of.get(sample.revision)
        if samples is None or sample.stage_number != self._stage_number:
            return
        samples.add(sample)
        if self._looks.is_due(min(self._stable.num_requests, self._candidate.num_requests)):
            config, stable, candidate = self._config, self._stable, self._candidate
            self._errors = self._compare_errors()
            self._ttft = self._compare_times(stable.ttfts_s, candidate.ttfts_s, config.max_ttft_ratio)
            self._itl = self._compare_times(stable.itls_s, candidate.itls_s, config.max_itl_ratio)

    def add_comparisons(self, stage_number: int | None, num_compared: int, num_diverged: int) -> None:
        if stage_number != self._stage_number:
            return
        self._num_compared += num_compared
        self._num_diverged += num_diverged
        if self._looks_at_answers.is_due(self._num_compared):
            allowed = self._config.max_divergence
            self._divergence = Finding(
                self._looks_at_answers.number,
                self._num_diverged / self._num_compared,
                allowed,
                chance_of_share(self._num_diverged, self._num_compared, allowed),
            )

    def evidence(self) -> Evidence:
        return Evidence(
            stage_number=self._stage_number,
            num_stable_requests=self._stable.num_requests,
            num_candidate_requests=self._candidate.num_requests,
            next_look=self._looks.next,
            errors=self._errors,
            ttft=self._ttft,
            itl=self._itl,
            num_compared=self._num_compared,
            num_diverged=self._num_diverged,
            divergence=self._divergence,
        )

    def _compare_errors(self) -> Finding:
        """Compare shares of errors. Every error of a crash counts: a failing candidate must not stay for long."""
        stable, candidate, extra = self._stable, self._candidate, self._config.max_extra_errors
        # A candidate at the limit has as many errors as a stable revision with these more.
        other_errors = min(stable.num_requests, stable.num_errors + ceil(extra * stable.num_requests))
        return Finding(
            self._looks.number,
            candidate.num_errors / candidate.num_requests,
            stable.num_errors / stable.num_requests + extra,
            chance_of_more(candidate.num_errors, candidate.num_requests, other_errors, stable.num_requests),
        )

    def _compare_times(
        self, stable_s: Sequence[float], candidate_s: Sequence[float], max_ratio: float
    ) -> Finding | None:
        if not stable_s or not candidate_s:
            return None
        slack_s = self._config.latency_slack_s
        # The times of a candidate at the limit. The function is monotonic, so it also maps percentiles.
        allowed_s = [max(time_s * max_ratio, time_s + slack_s) for time_s in stable_s]
        figure_s = percentile(sorted(candidate_s), LATENCY_PERCENT)
        most_s = percentile(sorted(allowed_s), LATENCY_PERCENT)
        is_slow = figure_s > most_s  # otherwise the gate passes, and needs no test
        chance = chance_of_slower(candidate_s, allowed_s, LATENCY_PERCENT) if is_slow else 1.0
        return Finding(self._looks.number, figure_s, most_s, chance)
