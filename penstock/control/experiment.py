"""An experiment compares two policy sets on live traffic, by windows, an interval and guard rails. Pure.

Both arms serve at the same time, each with replicas of its own. Time is divided into windows. A window gives one pair
of objectives, and only the difference within the pair counts. Changes of traffic, which both arms share, therefore
cancel out. Neighbouring windows are alike (a queue lasts), so the variance of the mean is a long-run variance.

The interval is a confidence sequence: it holds at all times together, not only at one that was fixed beforehand
(Waudby-Smith and others, "Time-uniform central limit theory and asymptotic confidence sequences"). Looking at it
every window, and ending the experiment as soon as it excludes zero, is therefore allowed. In return it is wider than
an interval for one look.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import log, sqrt
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from penstock.control.gates import (
    Evidence,
    GateConfig,
    GateReport,
    GateResult,
    dependence,
    judge,
    long_run_variance,
)
from penstock.control.release import unit_of
from penstock.core.objective import (
    Objective,
    ObjectiveSettings,
    TierSums,
    Weights,
    added,
    objective_of,
    utilisation_of,
)
from penstock.core.request import Tier

MAX_WINDOWS = 2_000  # more are joined in pairs
_JOINED_ABOVE = 0.3
_TUNED_FOR_WINDOWS = 40  # the interval is narrowest, among confidence sequences, at about this many


class ExperimentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.5  # of requests, for the second set
    window_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    # Requests of each arm; a window lasts until every arm has them.
    min_window_requests: Annotated[int, Meta(ge=1, le=100_000)] = 5
    min_windows: Annotated[int, Meta(ge=6, le=1000)] = 20  # before a verdict
    max_duration_s: Annotated[float, Meta(ge=1, le=31 * 86_400)] = 3600.0
    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = 0.95
    # The second set may be so much worse than the first before the experiment is ended.
    guards: GateConfig = GateConfig(
        min_requests=40, min_compared=0, max_extra_errors=0.02, max_ttft_ratio=2.0, max_itl_ratio=2.0
    )


class Arm(enum.StrEnum):
    A = "a"
    B = "b"


class ArmWindow(msgspec.Struct, frozen=True):
    """The results of one arm in one window."""

    sums: dict[Tier, TierSums] = {}
    num_tokens: int = 0
    num_replicas: int = 1

    @property
    def num_requests(self) -> int:
        return sum(sums.num_requests for sums in self.sums.values())

    def plus(self, other: ArmWindow) -> ArmWindow:
        replicas = max(self.num_replicas, other.num_replicas)
        return ArmWindow(added([self.sums, other.sums]), self.num_tokens + other.num_tokens, replicas)


class Window(msgspec.Struct, frozen=True):
    seconds: float
    a: ArmWindow
    b: ArmWindow

    def plus(self, other: Window) -> Window:
        return Window(self.seconds + other.seconds, self.a.plus(other.a), self.b.plus(other.b))


class ExperimentStage(enum.StrEnum):
    STARTING = "starting"  # replicas of both arms start; all requests go where they went before
    RUNNING = "running"
    ENDING = "ending"  # the earlier replicas come back, and the replicas of the arms finish their requests
    OVER = "over"


class Verdict(enum.StrEnum):
    A_IS_BETTER = "a is better"
    B_IS_BETTER = "b is better"
    NO_DIFFERENCE = "no difference found"
    DEPENDS_ON_WEIGHTS = "depends on the weights"
    GUARD_RAIL = "ended by a guard rail"
    STOPPED = "stopped by an operator"
    FAILED = "failed"


class ExperimentState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an experiment. Survives a restart as JSON; times are Unix seconds."""

    stage: ExperimentStage = ExperimentStage.STARTING
    since_s: float
    running_since_s: float | None = None  # since the first time
    windows: tuple[Window, ...] = ()
    capacity_tokens_per_s: float | None = None  # of one replica; both arms are measured against it
    verdict: Verdict | None = None
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.stage is ExperimentStage.OVER


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The mean difference of objectives, second set less first, and where it lies with the chosen confidence."""

    mean: float
    low: float
    high: float
    num_windows: int

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def interval(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the confidence sequence for the mean of an autocorrelated series, at its present length; None for fewer
    than three values."""
    count = len(values)
    if count < 3:
        return None
    mean = sum(values) / count
    alpha = 1.0 - confidence
    log_inverse = 2.0 * log(1.0 / alpha)
    rho_squared = (log_inverse + log(1.0 + log_inverse)) / _TUNED_FOR_WINDOWS
    scaled = count * rho_squared + 1.0
    half = sqrt(
        long_run_variance(values) * 2.0 * scaled / (count * count * rho_squared) * log(sqrt(scaled) / alpha)
    )
    return Interval(mean=mean, low=mean - half, high=mean + half, num_windows=count)


def independent_enough(values: Sequence[float]) -> list[float]:
    """Join neighbours into their means until they depend little on each other: no estimate of a long-run variance is
    good for a short series of values that are much alike."""
    joined = list(values)
    while len(joined) >= 20 and dependence(joined) > _JOINED_ABOVE:
        joined = [(a + b) / 2.0 for a, b in zip(joined[::2], joined[1::2], strict=False)]
    return joined


class Experiments:
    """Applies the rules of experiments. Every method returns a new state, or figures."""

    def __init__(
        self, config: ExperimentConfig, objective: ObjectiveSettings, other_weights: Weights | None = None
    ) -> None:
        """`objective` judges. `other_weights` are the weights of the second set, if the set has its own."""
        self.config = config
        self.objective = objective
        self.other_weights = other_weights

    def with_window(self, state: ExperimentState, window: Window) -> ExperimentState:
        """Add a window. A last window with too few requests of an arm continues instead."""
        windows = state.windows
        least = self.config.min_window_requests
        if windows and min(windows[-1].a.num_requests, windows[-1].b.num_requests) < least:
            windows = (*windows[:-1], windows[-1].plus(window))
        else:
            windows = (*windows, window)
        if len(windows) > MAX_WINDOWS:
            pairs = zip(windows[::2], windows[1::2], strict=False)
            windows = tuple(first.plus(second) for first, second in pairs)
        return replace(state, windows=windows)

    def complete(self, state: ExperimentState) -> tuple[Window, ...]:
        """Return the windows that have enough requests of both arms."""
        least = self.config.min_window_requests
        return tuple(each for each in state.windows if min(each.a.num_requests, each.b.num_requests) >= least)

    def difference(self, state: ExperimentState, weights: Weights | None = None) -> Interval | None:
        values = [
            self._of_window(each, state, Arm.B, weights).total
            - self._of_window(each, state, Arm.A, weights).total
            for each in self.complete(state)
        ]
        return interval(independent_enough(values), self.config.confidence)

    def objective_of(self, state: ExperimentState, arm: Arm) -> Objective:
        """Return the objective of an arm over all windows."""
        if not state.windows:
            return objective_of({}, self.objective, 0.0)
        whole = state.windows[0]
        for window in state.windows[1:]:
            whole = whole.plus(window)
        return self._of_window(whole, state, arm, None)

    def judged(self, state: ExperimentState, evidence: Evidence, now: float) -> ExperimentState:
        """End a running experiment by its guard rails, by its interval or by its time. Returns the same state while
        it continues."""
        if state.stage is not ExperimentStage.RUNNING:
            return state
        failed = [report for report in self.guards(evidence) if report.result is GateResult.FAILED]
        if failed:
            sentences = "; ".join(f"{report.gate}: {report.sentence}" for report in failed)
            return self.ended(state, Verdict.GUARD_RAIL, sentences, now)
        found = self.difference(state)
        if found is not None and found.num_windows >= self.config.min_windows and found.excludes_zero:
            return self._decided(state, found, now)
        began_s = state.since_s if state.running_since_s is None else state.running_since_s
        if now - began_s >= self.config.max_duration_s:
            sentence = "too few requests" if found is None else f"the difference is {shown(found)}"
            return self.ended(state, Verdict.NO_DIFFERENCE, sentence, now)
        return state

    def guards(self, evidence: Evidence) -> tuple[GateReport, ...]:
        return judge(self.config.guards, evidence, compares_answers=False)

    def ended(self, state: ExperimentState, verdict: Verdict, reason: str, now: float) -> ExperimentState:
        return replace(state, stage=ExperimentStage.ENDING, since_s=now, verdict=verdict, reason=reason)

    def _decided(self, state: ExperimentState, found: Interval, now: float) -> ExperimentState:
        verdict = Verdict.B_IS_BETTER if found.high < 0.0 else Verdict.A_IS_BETTER
        sentence = f"the difference is {shown(found)}"
        if self.other_weights is not None:
            other = self.difference(state, self.other_weights)
            if other is not None and other.mean * found.mean < 0.0:
                verdict = Verdict.DEPENDS_ON_WEIGHTS
                sentence += f", and {shown(other)} by the weights of the second set"
        return self.ended(state, verdict, sentence, now)

    def _of_window(
        self, window: Window, state: ExperimentState, arm: Arm, weights: Weights | None
    ) -> Objective:
        part = window.a if arm is Arm.A else window.b
        capacity = self.objective.capacity_tokens_per_s or state.capacity_tokens_per_s or 0.0
        replica_s = max(1e-9, window.seconds * max(1, part.num_replicas))
        used = utilisation_of(part.num_tokens / replica_s, capacity)
        settings = self.objective if weights is None else replace(self.objective, weights=weights)
        return objective_of(part.sums, settings, used)


def arm_of(key: str, experiment_id: str, share: float) -> Arm:
    """Return the arm of requests with this key: the same in every gateway."""
    return Arm.B if unit_of(key, experiment_id) < share else Arm.A


def replica_counts(share: float, num_present: int) -> tuple[int, int] | None:
    """Return how many replicas each arm gets, so that both have the same load per replica: the fewest, at least as
    many in total as there are; None if that takes more than twice as many."""
    for total in range(max(2, num_present), max(2, 2 * num_present) + 1):
        count = round(share * total)
        if 0 < count < total and abs(count - share * total) < 0.01 * total:
            return total - count, count
    return None


def shown(found: Interval) -> str:
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f}, {found.num_windows} windows)"
