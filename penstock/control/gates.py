"""The gates of a release and the guard rails of an experiment: is a candidate worse than the stable revision by more
than its limits allow? Holds the samples, and the tests of how likely a difference is by chance. Pure.

A gate compares the candidate with the stable revision in the same time and traffic, because no absolute limit fits
every model and load. A figure within the limit passes. A figure beyond the limit fails only if chance is an unlikely
cause: the gate tests how often a candidate exactly at the limit would look as bad. Otherwise the gate is undecided
until there are more samples.

A test that is repeated often finds a difference in the end, even where there is none. A gate therefore tests only
when the samples have grown by half, and each test gets a share of the chance of a false alarm, which is a setting for
the whole release.

Tests of shares and of ordered samples are exact and assume nothing about the distribution of times. Times that follow
each other are alike, because a queue lasts: a test of times therefore counts fewer requests than there were, by the
long-run variance of their series.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, exp, lgamma, log
from operator import mul
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from penstock.core.figures import Count, CountOrZero, NotNegative, percentile

_LEAST_VARIANCE = 1e-12
_MAX_DEPENDENCE = 0.95  # of a value on the previous value
_LEAST_SERIES = 20  # values; fewer values say nothing about dependence
_NEGLIGIBLE = 1e-12  # share of a sum whose terms only get smaller


def chance_of_share(num_events: int, count: int, share: float) -> float:
    """Return the chance of this many events or more among `count`, if each happens with this chance."""
    if num_events <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    return _sum(
        _log_choose(count, k) + k * log(share) + (count - k) * log(1.0 - share)
        for k in range(num_events, count + 1)
    )


def chance_of_more(num_events: int, count: int, other_events: int, other_count: int) -> float:
    """Return the chance that this many, or more, of all events fall on the first side, if events are equally likely
    on both sides (Fisher's exact test)."""
    all_events = num_events + other_events
    total = _log_choose(count + other_count, all_events)
    return _sum(
        _log_choose(count, k) + _log_choose(other_count, all_events - k) - total
        for k in range(num_events, min(count, all_events) + 1)
    )


def chance_of_slower(times_s: Sequence[float], allowed: Sequence[float], percent: float) -> float:
    """Return the chance that as many times as here, or more, exceed the percentile of the allowed times, if both come
    from one distribution (a precedence test). Both are in the order in which they were observed."""
    ordered = sorted(allowed)
    place = max(0, ceil(len(ordered) * percent / 100.0) - 1)
    is_above = [time_s > ordered[place] for time_s in times_s]
    # Rounded so that a difference is found less often.
    count = max(1, int(len(times_s) / _repetition(is_above)))
    above = sum(is_above) * count // len(times_s)
    other_count = max(1, int(len(allowed) / _repetition([time_s > ordered[place] for time_s in allowed])))
    other_above = min(
        other_count - 1, ceil((len(ordered) - 1 - place) * other_count / len(ordered))
    )  # the other samples are at the percentile or below
    below = other_count - 1 - other_above
    total = _log_choose(count + other_count, count)
    return _sum(
        _log_choose(k + other_above, k) + _log_choose(count - k + below, below) - total
        for k in range(above, count + 1)
    )


def dependence(values: Sequence[float]) -> float:
    """Return how much each value depends on the last, with the usual correction for short series."""
    count = len(values)
    mean = sum(values) / count
    deviations = [value - mean for value in values]
    variance = sum(each * each for each in deviations)
    if variance == 0.0:
        return 0.0
    first: float = sum(map(mul, deviations, deviations[1:])) / variance
    return min(_MAX_DEPENDENCE, first + (1.0 + 3.0 * first) / count)


def long_run_variance(values: Sequence[float]) -> float:
    """Return the variance that the mean of a series has, times its length: the largest of three estimates, because
    each is too small on short series of some kind. The plain variance is right without autocorrelation. Newey and
    West add autocovariances with Bartlett's weights. The third takes the series for one in which each value depends
    on the last."""
    count = len(values)
    mean = sum(values) / count
    deviations = [value - mean for value in values]
    num_lags = min(count // 4, int(4.0 * (count / 100.0) ** (2.0 / 9.0)))
    plain = total = sum(each * each for each in deviations) / count
    for lag in range(1, num_lags + 1):
        covariance = sum(map(mul, deviations, deviations[lag:])) / count
        total += 2.0 * (1.0 - lag / (num_lags + 1.0)) * covariance
    phi = dependence(values)
    dependent = plain * (1.0 + phi) / (1.0 - phi)
    # Two arms that are both far beyond their targets differ by rounding errors alone, which must not decide.
    return max(plain, total, dependent, _LEAST_VARIANCE) * count / (count - 1.0 - num_lags)


def _repetition(is_event: Sequence[bool]) -> float:
    """Return how many observations of a series say as much as one independent observation."""
    count = len(is_event)
    share = sum(is_event) / count
    if count < _LEAST_SERIES or share in (0.0, 1.0):
        return 1.0
    return max(1.0, long_run_variance(is_event) / (share * (1.0 - share) * count / (count - 1.0)))


def _sum(log_chances: Iterable[float]) -> float:
    """Add the chances of a tail. Stops where the rest of a falling tail is negligible."""
    total, last = 0.0, 0.0
    for log_chance in log_chances:
        chance = exp(log_chance)
        total += chance
        if chance < last and chance < _NEGLIGIBLE * total:
            break
        last = chance
    return min(1.0, total)


def _log_choose(count: int, chosen: int) -> float:
    if not 0 <= chosen <= count:
        return float("-inf")
    return lgamma(count + 1.0) - lgamma(chosen + 1.0) - lgamma(count - chosen + 1.0)


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
        self._looks = CheckSchedule(self._config.min_requests)
        self._errors: Finding | None = None
        self._ttft: Finding | None = None
        self._itl: Finding | None = None
        self._num_compared = 0
        self._num_diverged = 0
        self._looks_at_answers = CheckSchedule(self._config.min_compared)
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


LATENCY_PERCENT = 95
_GROWTH = 1.5  # of samples, from one look to the next


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_requests: Count = 200  # of each revision, for errors and latencies
    min_compared: CountOrZero = 50  # mirrored answers, for divergence; 0 needs none
    max_extra_errors: NotNegative = 0.005  # share of requests, beyond the stable revision's share
    max_ttft_ratio: NotNegative = 1.25  # of the 95th percentiles
    max_itl_ratio: NotNegative = 1.25
    latency_slack_s: NotNegative = 0.005  # a difference below this is no difference
    max_divergence: NotNegative = 0.2  # share of compared answers that differ
    # The chance that any gate fails a candidate which is within all limits, in all looks of all stages together.
    max_false_alarms: Annotated[float, Meta(gt=0, lt=1)] = 0.05


class Finding(msgspec.Struct, frozen=True):
    """The latest finding of a gate."""

    look: int  # 1 is the first in a stage
    figure: float  # the candidate's
    allowed: float
    chance: float  # that a candidate at the limit looks as bad


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of both revisions. `stage_number` is the stage of the evidence: evidence of another stage proves
    nothing."""

    stage_number: int
    num_stable_requests: int = 0
    num_candidate_requests: int = 0
    next_look: int = 0  # at this many requests of each revision
    errors: Finding | None = None
    ttft: Finding | None = None  # of the 95th percentiles, in seconds
    itl: Finding | None = None
    num_compared: int = 0
    num_diverged: int = 0
    divergence: Finding | None = None


class GateResult(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


class GateReport(msgspec.Struct, frozen=True):
    gate: str
    result: GateResult
    sentence: str


class CheckSchedule:
    """Says when to look at samples that grow."""

    def __init__(self, first: int) -> None:
        self.number = 0
        self.next = max(1, first)

    def is_due(self, count: int) -> bool:
        """Return whether to look at this many samples, and count the look."""
        if count < self.next:
            return False
        self.number += 1
        self.next = ceil(count * _GROWTH)
        return True


def judge(
    config: GateConfig, evidence: Evidence, *, num_stages: int = 1, compares_answers: bool
) -> tuple[GateReport, ...]:
    """Return one report per gate. `num_stages` share the chance of a false alarm."""
    # Three gates in each stage, and divergence in one.
    level = config.max_false_alarms / (3 * num_stages + 1)
    return tuple(_reports(config, evidence, level, compares_answers))


def overall(reports: tuple[GateReport, ...]) -> GateResult:
    """Return failed if any gate failed, passed if all gates passed, and else undecided."""
    results = {report.result for report in reports}
    for result in (GateResult.FAILED, GateResult.UNDECIDED):
        if result in results:
            return result
    return GateResult.PASSED


def _reports(
    config: GateConfig, evidence: Evidence, level: float, compares_answers: bool
) -> Iterator[GateReport]:
    again = f"looks again at {evidence.next_look} requests"
    if evidence.errors is None:
        num_requests = min(evidence.num_stable_requests, evidence.num_candidate_requests)
        missing = f"{num_requests} of {config.min_requests} requests"
        for gate in ("errors", "ttft", "itl"):
            yield GateReport(gate, GateResult.UNDECIDED, missing)
    else:
        errors = evidence.errors
        sentence = f"{errors.figure:.2%} failed, and {errors.allowed:.2%} may"
        yield _report("errors", errors, sentence, level, again)
        yield _latency("ttft", evidence.ttft, level, again)
        yield _latency("itl", evidence.itl, level, again)
    if compares_answers:
        yield _divergence(config, evidence, level)


def _latency(gate: str, found: Finding | None, level: float, again: str) -> GateReport:
    if found is None:
        return GateReport(gate, GateResult.UNDECIDED, "no request got that far")
    sentence = f"p{LATENCY_PERCENT} is {found.figure * 1e3:.1f} ms, and may be {found.allowed * 1e3:.1f} ms"
    return _report(gate, found, sentence, level, again)


def _divergence(config: GateConfig, evidence: Evidence, level: float) -> GateReport:
    found = evidence.divergence
    if evidence.num_compared < config.min_compared:
        missing = f"{evidence.num_compared} of {config.min_compared} answers compared"
        return GateReport("divergence", GateResult.UNDECIDED, missing)
    if found is None:
        return GateReport("divergence", GateResult.PASSED, "no answers are compared")
    sentence = f"{found.figure:.1%} of answers differ, and {found.allowed:.1%} may"
    return _report("divergence", found, sentence, level, "looks again at more answers")


def _report(gate: str, found: Finding, sentence: str, level: float, again: str) -> GateReport:
    if found.figure <= found.allowed:
        return GateReport(gate, GateResult.PASSED, sentence)
    # The shares of all looks add up to one.
    if found.chance <= level / (found.look * (found.look + 1)):
        return GateReport(gate, GateResult.FAILED, sentence)
    return GateReport(gate, GateResult.UNDECIDED, f"{sentence}, which may be chance: {again}")
