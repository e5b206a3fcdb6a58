from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.gates import Evidence, Finding
from penstock.control.release import (
    TRANSITIONS,
    ReleaseConfig,
    ReleaseEvent,
    Releases,
    ReleaseState,
    Stage,
)
from penstock.core.errors import Conflict

CONFIG = ReleaseConfig(canary_shares=(0.1, 0.5), min_stage_s=10.0)
PASSES = Finding(1, 0.2, 0.25, 0.5)
FAILS = Finding(1, 0.3, 0.25, 1e-9)
MAY_BE_CHANCE = Finding(1, 0.3, 0.25, 0.1)


def evidence(
    state: ReleaseState,
    errors: Finding | None = PASSES,
    ttft: Finding | None = PASSES,
    itl: Finding | None = PASSES,
    divergence: Finding | None = PASSES,
) -> Evidence:
    return Evidence(
        stage_number=state.stage_number,
        num_stable_requests=1000,
        num_candidate_requests=1000,
        errors=errors,
        ttft=ttft,
        itl=itl,
        num_compared=100,
        divergence=divergence,
    )


def in_shadow(releases: Releases) -> ReleaseState:
    state = releases.start("v1", "v2", now=0.0)
    return releases.happened(state, ReleaseEvent.WARMED_UP, now=5.0)


def test_a_good_candidate_goes_all_the_way() -> None:
    releases = Releases(CONFIG)
    state = releases.start("v1", "v2", now=0.0)
    seen = []
    state = releases.happened(state, ReleaseEvent.WARMED_UP, now=0.0)
    for tick in range(1, 100):
        after = releases.judged(state, evidence(state), now=tick * 4.0)
        if after != state:
            assert after.since_s - state.since_s >= CONFIG.min_stage_s
            seen.append((after.stage, releases.split(after).candidate_share))
        state = after
    assert seen == [(Stage.CANARY, 0.1), (Stage.CANARY, 0.5), (Stage.LAME_DUCK, 1.0)]
    state = releases.happened(state, ReleaseEvent.DRAINED, now=500.0)
    assert state.stage is Stage.PROMOTED
    assert state.is_over


@pytest.mark.parametrize("gate", ["errors", "ttft", "itl", "divergence"])
def test_each_gate_rolls_back_and_says_why(gate: str) -> None:
    releases = Releases(CONFIG)
    state = in_shadow(releases)
    state = releases.judged(state, evidence(state, **{gate: FAILS}), now=6.0)
    assert state.stage is Stage.ROLLING_BACK
    assert state.reason.startswith(f"{gate}: ")
    assert releases.split(state).candidate_share == 0.0


@pytest.mark.parametrize("gate", ["errors", "ttft", "itl", "divergence"])
def test_a_figure_beyond_its_limit_that_may_be_chance_neither_passes_nor_fails(gate: str) -> None:
    releases = Releases(CONFIG)
    state = in_shadow(releases)
    found = evidence(state, **{gate: MAY_BE_CHANCE})
    assert releases.judged(state, found, now=1000.0) is state
    (report,) = [each for each in releases.reports(state, found) if each.gate == gate]
    assert "which may be chance" in report.sentence


def test_evidence_of_another_stage_proves_nothing() -> None:
    releases = Releases(CONFIG)
    state = in_shadow(releases)
    old = evidence(state, errors=FAILS)
    state = releases.happened(state, ReleaseEvent.GATES_PASSED, now=20.0)
    assert releases.judged(state, old, now=100.0) == state


findings = st.builds(
    Finding, st.integers(1, 20), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 0.01)
)


@given(
    findings,
    st.none() | findings,
    st.none() | findings,
    findings,
    st.sampled_from([Stage.SHADOW, Stage.CANARY]),
)
def test_rollback_exactly_when_a_gate_finds_more_than_chance_beyond_its_limit(
    errors: Finding, ttft: Finding | None, itl: Finding | None, divergence: Finding, stage: Stage
) -> None:
    releases = Releases(ReleaseConfig())  # five stages, so sixteen tests
    state = ReleaseState(stable="v1", candidate="v2", stage=stage, since_s=0.0)
    judged = [errors, ttft, itl, *([divergence] if stage is Stage.SHADOW else [])]
    fails = any(
        each is not None
        and each.figure > each.allowed
        and each.chance <= 0.05 / 16 / (each.look * (each.look + 1))
        for each in judged
    )
    passes = all(each is not None and each.figure <= each.allowed for each in judged)
    after = releases.judged(state, evidence(state, errors, ttft, itl, divergence), now=1e6)
    assert (after.stage is Stage.ROLLING_BACK) == fails
    assert (after is state) == (not fails and not passes)


@given(st.lists(st.sampled_from(list(ReleaseEvent)), max_size=12))
@settings(deadline=None)
def test_no_order_of_happenings_leads_outside_of_the_table(happenings: list[ReleaseEvent]) -> None:
    releases = Releases(CONFIG)
    state = releases.start("v1", "v2", now=0.0)
    for now, happening in enumerate(happenings):
        if happening is ReleaseEvent.GATES_PASSED and state.step + 1 == len(CONFIG.canary_shares):
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
        assert TRANSITIONS[stage, ReleaseEvent.OPERATOR_ROLLS_BACK] is Stage.ROLLING_BACK


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


@pytest.mark.parametrize(
    ("stage", "step", "num_stable", "num_wanted"),
    [
        (Stage.WARMING, 0, 20, 2),  # a tenth is mirrored
        (Stage.SHADOW, 0, 4, 1),
        (Stage.CANARY, 0, 4, 1),  # one in a hundred
        (Stage.CANARY, 1, 19, 1),  # one in twenty: 19 stable replicas answer the other nineteen
        (Stage.CANARY, 2, 6, 2),  # a quarter
        (Stage.CANARY, 3, 4, 4),  # half
        (Stage.LAME_DUCK, 0, 4, 4),
    ],
)
def test_the_candidate_gets_as_many_replicas_as_give_each_the_load_of_a_stable_one(
    stage: Stage, step: int, num_stable: int, num_wanted: int
) -> None:
    state = ReleaseState(stable="v1", candidate="v2", stage=stage, step=step, since_s=0.0)
    assert Releases(ReleaseConfig()).num_replicas(state, num_stable) == num_wanted
