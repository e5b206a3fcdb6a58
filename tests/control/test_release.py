from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.release import (
    TRANSITIONS,
    Evidence,
    Figures,
    GateConfig,
    GateResult,
    Happening,
    ReleaseConfig,
    Releases,
    ReleaseState,
    Stage,
    judge,
    overall,
)
from penstock.core.errors import Conflict

CONFIG = ReleaseConfig(canary_shares=(0.1, 0.5), min_stage_s=10.0)
GOOD = Figures(num_requests=1000, num_errors=1, ttft_p95_s=0.2, itl_p95_s=0.02)


def evidence(state: ReleaseState, candidate: Figures = GOOD, diverged: int = 0) -> Evidence:
    return Evidence(
        stage_number=state.stage_number,
        stable=GOOD,
        candidate=candidate,
        num_compared=100,
        num_diverged=diverged,
    )


def in_shadow(releases: Releases) -> ReleaseState:
    state = releases.start("v1", "v2", now=0.0)
    return releases.happened(state, Happening.WARMED_UP, now=5.0)


def test_a_good_candidate_goes_all_the_way() -> None:
    releases = Releases(CONFIG)
    state = releases.start("v1", "v2", now=0.0)
    seen = []
    state = releases.happened(state, Happening.WARMED_UP, now=0.0)
    for tick in range(1, 100):
        after = releases.judged(state, evidence(state), now=tick * 4.0)
        if after != state:
            assert after.since_s - state.since_s >= CONFIG.min_stage_s
            seen.append((after.stage, releases.split(after).candidate_share))
        state = after
    assert seen == [(Stage.CANARY, 0.1), (Stage.CANARY, 0.5), (Stage.LAME_DUCK, 1.0)]
    state = releases.happened(state, Happening.DRAINED, now=500.0)
    assert state.stage is Stage.PROMOTED
    assert state.is_over


@pytest.mark.parametrize(
    ("candidate", "diverged", "gate"),
    [
        (msgspec.structs.replace(GOOD, num_errors=20), 0, "errors"),
        (msgspec.structs.replace(GOOD, ttft_p95_s=0.3), 0, "ttft"),
        (msgspec.structs.replace(GOOD, itl_p95_s=0.05), 0, "itl"),
        (GOOD, 40, "divergence"),
    ],
)
def test_each_gate_rolls_back_and_says_why(candidate: Figures, diverged: int, gate: str) -> None:
    releases = Releases(CONFIG)
    state = in_shadow(releases)
    state = releases.judged(state, evidence(state, candidate, diverged), now=6.0)
    assert state.stage is Stage.ROLLING_BACK
    assert state.reason.startswith(f"{gate}: ")
    assert releases.split(state).candidate_share == 0.0


def test_evidence_of_another_stage_proves_nothing() -> None:
    releases = Releases(CONFIG)
    state = in_shadow(releases)
    old = evidence(state, msgspec.structs.replace(GOOD, num_errors=900))
    state = releases.happened(state, Happening.GATES_PASSED, now=20.0)
    assert releases.judged(state, old, now=100.0) == state


figures = st.builds(
    Figures,
    num_requests=st.integers(0, 500),
    num_errors=st.integers(0, 20),
    ttft_p95_s=st.none() | st.floats(0.0, 2.0),
    itl_p95_s=st.none() | st.floats(0.0, 0.2),
)


@given(
    figures, figures, st.integers(0, 200), st.floats(0.0, 1.0), st.sampled_from([Stage.SHADOW, Stage.CANARY])
)
def test_rollback_exactly_when_a_gate_fails_with_enough_samples(
    stable: Figures, candidate: Figures, compared: int, differing: float, stage: Stage
) -> None:
    gates = GateConfig()
    releases = Releases(ReleaseConfig(gates=gates))
    state = ReleaseState(stable="v1", candidate="v2", stage=stage, since_s=0.0)
    found = Evidence(
        stage_number=0,
        stable=stable,
        candidate=candidate,
        num_compared=compared,
        num_diverged=int(compared * differing),
    )
    enough = min(stable.num_requests, candidate.num_requests) >= gates.min_requests

    def slower(ours: float | None, theirs: float | None, ratio: float) -> bool:
        if ours is None or theirs is None:
            return False
        return ours > max(theirs * ratio, theirs + gates.latency_slack_s)

    fails = enough and (
        candidate.num_errors / candidate.num_requests
        > stable.num_errors / stable.num_requests + gates.max_extra_errors
        or slower(candidate.ttft_p95_s, stable.ttft_p95_s, gates.max_ttft_ratio)
        or slower(candidate.itl_p95_s, stable.itl_p95_s, gates.max_itl_ratio)
    )
    if stage is Stage.SHADOW and compared >= gates.min_compared:
        fails = fails or found.num_diverged / compared > gates.max_divergence
    after = releases.judged(state, found, now=1e6)
    assert (after.stage is Stage.ROLLING_BACK) == fails
    if not enough:
        assert after.stage is stage or fails
    reports = judge(gates, found, compares_answers=stage is Stage.SHADOW)
    assert (overall(reports) is GateResult.FAILED) == fails


@given(st.lists(st.sampled_from(list(Happening)), max_size=12))
@settings(deadline=None)
def test_no_order_of_happenings_leads_outside_of_the_table(happenings: list[Happening]) -> None:
    releases = Releases(CONFIG)
    state = releases.start("v1", "v2", now=0.0)
    for now, happening in enumerate(happenings):
        if happening is Happening.GATES_PASSED and state.step + 1 == len(CONFIG.canary_shares):
            continue  # the last step passes as LAST_GATES_PASSED
        if (state.stage, happening) in TRANSITIONS:
            after = releases.happened(state, happening, float(now))
            assert after.stage is TRANSITIONS[state.stage, happening]
            assert after.stage_number == state.stage_number + 1
            state = after
        else:
            with pytest.raises(Conflict):
                releases.happened(state, happening, float(now))
        split = releases.split(state)
        assert 0.0 <= split.candidate_share <= 1.0
        assert msgspec.json.decode(msgspec.json.encode(state), type=ReleaseState) == state


def test_every_stage_that_is_not_over_can_be_left_and_the_last_ones_cannot() -> None:
    leaving = {stage for stage, _ in TRANSITIONS}
    assert leaving == set(Stage) - {Stage.PROMOTED, Stage.ROLLED_BACK}
    for stage in (Stage.WARMING, Stage.SHADOW, Stage.CANARY, Stage.LAME_DUCK):
        assert TRANSITIONS[stage, Happening.OPERATOR_ROLLS_BACK] is Stage.ROLLING_BACK


def test_users_move_to_the_candidate_as_its_share_grows_and_never_back() -> None:
    releases = Releases(ReleaseConfig(canary_shares=(0.01, 0.1, 0.5)))
    before: set[str] = set()
    for step, share in enumerate((0.01, 0.1, 0.5)):
        state = ReleaseState(stable="v1", candidate="v2", stage=Stage.CANARY, step=step, since_s=0.0)
        moved = {f"user-{n}" for n in range(4000) if releases.revision_for(state, f"user-{n}") == "v2"}
        assert before <= moved
        assert abs(len(moved) / 4000 - share) < 0.03
        before = moved
    shadow = ReleaseState(stable="v1", candidate="v2", stage=Stage.SHADOW, since_s=0.0)
    assert all(releases.revision_for(shadow, f"user-{n}") == "v1" for n in range(100))
    mirrored = sum(releases.mirrors(shadow, f"user-{n}") for n in range(4000)) / 4000
    assert abs(mirrored - 0.1) < 0.03


def test_a_release_of_the_stable_revision_is_refused() -> None:
    with pytest.raises(Conflict):
        Releases(CONFIG).start("v1", "v1", now=0.0)
    with pytest.raises(ValueError, match="rise"):
        ReleaseConfig(canary_shares=(0.5, 0.1))
