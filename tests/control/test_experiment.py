"""The statistics and the rules of experiments."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from penstock.cluster.control_messages import Sample
from penstock.control.experiment import (
    MAX_WINDOWS,
    Arm,
    ArmWindow,
    ExperimentConfig,
    Experiments,
    ExperimentStage,
    ExperimentState,
    Verdict,
    Window,
    arm_of,
    independent_enough,
    interval,
    replica_counts,
)
from penstock.control.gates import Evidence, EvidenceCollector, Finding, long_run_variance
from penstock.core.objective import ObjectiveSettings, TierSums, Weights
from penstock.core.request import Tier

WEIGHTS = Weights(ttft=1.0, itl=1.0, idle=0.0, drops=10.0)
RULES = Experiments(
    ExperimentConfig(min_windows=6, max_duration_s=1000.0), ObjectiveSettings(weights=WEIGHTS)
)
NOTHING = Evidence(stage_number=0)


def arm(ttft: float, itl: float = 0.0, num_requests: int = 10) -> ArmWindow:
    sums = TierSums(num_requests, 0, num_requests, ttft * num_requests, num_requests, itl * num_requests)
    return ArmWindow({Tier.DEFAULT: sums}, 100)


def running(pairs: list[tuple[float, float]], rules: Experiments = RULES) -> ExperimentState:
    state = ExperimentState(stage=ExperimentStage.RUNNING, since_s=0.0, running_since_s=0.0)
    for a, b in pairs:
        state = rules.with_window(state, Window(10.0, arm(a), arm(b)))
    return state


def series(rng: Random, count: int, phi: float) -> list[float]:
    values, last = [], rng.gauss(0.0, 1.0)
    for _ in range(count):
        last = phi * last + (1 - phi * phi) ** 0.5 * rng.gauss(0.0, 1.0)
        values.append(last)
    return values


def is_fooled(values: list[float]) -> bool:
    """Say whether a series without a difference looks as if it had one, at any of many looks."""
    for count in range(20, len(values) + 1, 4):
        found = interval(independent_enough(values[:count]), 0.95)
        if found is not None and found.num_windows >= 20 and found.excludes_zero:
            return True
    return False


@pytest.mark.parametrize("phi", [0.0, 0.4, 0.8])
def test_looking_at_every_window_rarely_finds_a_difference_that_is_not_there(phi: float) -> None:
    rng = Random(7)
    assert sum(is_fooled(series(rng, 100, phi)) for _ in range(150)) <= 0.1 * 150


def test_a_real_difference_is_found() -> None:
    rng = Random(3)
    found = interval([value + 1.5 for value in series(rng, 60, 0.3)], 0.95)
    assert found is not None
    assert found.low > 0.0
    assert found.low < 1.5 < found.high


def test_autocorrelation_widens_the_interval_and_alternation_does_not_narrow_it() -> None:
    rng = Random(1)
    alone, alike = series(rng, 200, 0.0), series(rng, 200, 0.8)
    assert long_run_variance(alike) > 2.0 * long_run_variance(alone)
    assert long_run_variance([1.0, -1.0] * 50) >= 1.0


def test_too_few_windows_have_no_interval() -> None:
    assert interval([1.0, 2.0], 0.95) is None


@pytest.mark.parametrize(
    ("shift", "verdict"), [(-0.5, Verdict.B_IS_BETTER), (0.5, Verdict.A_IS_BETTER), (0.0, None)]
)
def test_the_verdict_follows_the_interval(shift: float, verdict: Verdict | None) -> None:
    rng = Random(5)
    bases = [1.0 + 0.5 * rng.random() for _ in range(20)]
    state = running([(base, base + shift + rng.uniform(-0.1, 0.1)) for base in bases])
    after = RULES.judged(state, NOTHING, 200.0)
    assert after.verdict is verdict
    assert (after.stage is ExperimentStage.ENDING) == (verdict is not None)
    if verdict is None:
        late = RULES.judged(state, NOTHING, 1000.0)
        assert late.verdict is Verdict.NO_DIFFERENCE
        assert "20 windows" in late.reason


def test_a_verdict_that_the_other_sets_weights_turn_around_says_so() -> None:
    rules = Experiments(RULES.config, RULES.objective, Weights(ttft=0.0, itl=1.0, idle=0.0))
    state = ExperimentState(stage=ExperimentStage.RUNNING, since_s=0.0)
    rng = Random(2)
    for _ in range(20):
        noise = 0.05 * rng.random()
        window = Window(10.0, arm(2.0, 0.5 + noise), arm(1.0 + noise, 0.8))
        state = rules.with_window(state, window)
    after = rules.judged(state, NOTHING, 200.0)
    assert after.verdict is Verdict.DEPENDS_ON_WEIGHTS
    assert "by the weights of the second set" in after.reason


def test_a_guard_rail_ends_it_before_any_interval() -> None:
    bad = Evidence(
        stage_number=0,
        num_stable_requests=50,
        num_candidate_requests=50,
        errors=Finding(1, 0.1, 0.02, 1e-6),
        ttft=Finding(1, 0.5, 0.2, 1e-6),
        itl=Finding(1, 0.01, 0.02, 0.5),
    )
    after = RULES.judged(running([(1.0, 1.0)]), bad, 10.0)
    assert after.verdict is Verdict.GUARD_RAIL
    assert "ttft: p95 is 500.0 ms" in after.reason
    assert "errors: 10.00% failed" in after.reason


def test_without_traffic_it_ends_with_its_time_and_says_why() -> None:
    quiet = running([])
    for _ in range(50):
        quiet = RULES.with_window(quiet, Window(10.0, ArmWindow({}, 0), ArmWindow({}, 0)))
    assert len(quiet.windows) == 1, "an empty window goes on"
    assert RULES.judged(quiet, NOTHING, 999.0) is quiet
    after = RULES.judged(quiet, NOTHING, 1000.0)
    assert (after.verdict, after.reason) == (Verdict.NO_DIFFERENCE, "too few requests")


def test_traffic_of_one_arm_alone_decides_nothing() -> None:
    state = running([])
    for _ in range(50):
        state = RULES.with_window(state, Window(10.0, arm(5.0), ArmWindow({}, 0)))
    assert RULES.complete(state) == ()
    assert RULES.judged(state, NOTHING, 500.0) is state
    one_sided = Evidence(stage_number=0, num_stable_requests=500)
    assert RULES.judged(state, one_sided, 500.0) is state, "the first set cannot break a guard rail"
    assert RULES.judged(state, NOTHING, 1000.0).reason == "too few requests"


def test_a_set_that_drops_everything_is_ended_by_the_guard_rail_and_not_before_enough_requests() -> None:
    state = running([(1.0, 1.0)])
    collector = EvidenceCollector(Arm.A, Arm.B, RULES.config.guards)
    for count in range(1, 41):
        collector.add(Sample("", "", Arm.A, 0, 0.1, 0.01, False))
        collector.add(Sample("", "", Arm.B, 0, None, None, True))
        after = RULES.judged(state, collector.evidence(), 10.0)
        assert after.verdict is (Verdict.GUARD_RAIL if count == 40 else None)
    assert "errors: 100.00% failed" in after.reason


def test_rounding_errors_decide_nothing() -> None:
    """Both sets keep every request waiting for ten times its target, and differ by the order of additions alone."""
    rng = Random(3)
    state = running([(10.0, 10.0 - 1e-14 * rng.random()) for _ in range(40)])
    assert RULES.judged(state, NOTHING, 200.0).verdict is None


def test_a_restart_goes_on_with_the_windows_and_loses_no_time() -> None:
    rng = Random(5)
    pairs = [(1.0, 0.5 + 0.1 * rng.random()) for _ in range(20)]
    before = running(pairs[:10])
    after = msgspec.json.decode(msgspec.json.encode(before), type=ExperimentState)
    after = msgspec.structs.replace(after, since_s=150.0)  # its second start
    for a, b in pairs[10:]:
        after = RULES.with_window(after, Window(10.0, arm(a), arm(b)))
    assert RULES.difference(after) == RULES.difference(running(pairs))
    assert RULES.judged(after, NOTHING, 300.0).verdict is Verdict.B_IS_BETTER
    assert RULES.judged(before, NOTHING, 1000.0).verdict is not None, "time counts from the first start"


def test_a_window_with_too_few_requests_goes_on() -> None:
    state = ExperimentState(stage=ExperimentStage.RUNNING, since_s=0.0)
    for _ in range(3):
        state = RULES.with_window(state, Window(10.0, arm(1.0, num_requests=2), arm(1.0, num_requests=9)))
    assert [window.seconds for window in state.windows] == [30.0]
    assert RULES.complete(state)[0].a.num_requests == 6


def test_windows_are_bounded_and_survive_as_json() -> None:
    state = running([(1.0, 1.0)] * (MAX_WINDOWS + 1))
    assert len(state.windows) == MAX_WINDOWS // 2
    assert state.windows[0].seconds == 20.0
    assert msgspec.json.decode(msgspec.json.encode(state), type=ExperimentState) == state


def test_idle_replicas_count_against_one_capacity_for_both_arms() -> None:
    rules = Experiments(RULES.config, ObjectiveSettings(weights=Weights(ttft=0, itl=0, idle=1.0, drops=0)))
    window = Window(10.0, ArmWindow(arm(1.0).sums, 500, 1), ArmWindow(arm(1.0).sums, 500, 2))
    state = ExperimentState(since_s=0.0, windows=(window,), capacity_tokens_per_s=100.0)
    assert rules.objective_of(state, Arm.A).total == pytest.approx(0.5)
    assert rules.objective_of(state, Arm.B).total == pytest.approx(0.75)


def test_keys_stay_with_their_arm_and_the_share_is_kept() -> None:
    arms = [arm_of(f"session {number}", "exp_1", 0.25) for number in range(4000)]
    assert arms == [arm_of(f"session {number}", "exp_1", 0.25) for number in range(4000)]
    assert 0.22 < arms.count(Arm.B) / 4000 < 0.28
    assert arms != [arm_of(f"session {number}", "exp_2", 0.25) for number in range(4000)]


@pytest.mark.parametrize(
    ("share", "num_present", "counts"),
    [
        (0.5, 1, (1, 1)),
        (0.5, 3, (2, 2)),
        (0.25, 4, (3, 1)),
        (0.25, 1, None),
        (0.333, 3, (2, 1)),
        (0.01, 4, None),
    ],
)
def test_both_arms_have_the_same_load_per_replica(
    share: float, num_present: int, counts: tuple[int, int] | None
) -> None:
    assert replica_counts(share, num_present) == counts
