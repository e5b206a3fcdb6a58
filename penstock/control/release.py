"""A release as a state machine in a table: warm up, shadow, canary by steps, then promotion or rollback. Pure.

Gates stand between the stages, see `gates`. A release continues when all gates pass, and is rolled back when one
fails.

The state is plain data that survives a restart as JSON; its times are of the clock that the caller passes as `now`,
which must survive a restart too. The cluster room carries the state out: it starts replicas, mirrors and splits
traffic.
"""

from __future__ import annotations

import enum
from hashlib import blake2b
from itertools import pairwise
from math import ceil

import msgspec
from msgspec.structs import replace

from penstock.control.gates import Evidence, GateConfig, GateReport, GateResult, judge, overall
from penstock.core.errors import Conflict
from penstock.core.figures import NotNegative, ShareOrZero


class Stage(enum.StrEnum):
    WARMING = "warming"  # the candidate's replicas start
    SHADOW = "shadow"  # mirrored requests; answers are compared and dropped
    CANARY = "canary"  # a share of requests, by steps
    LAME_DUCK = "lame_duck"  # the candidate serves everything; the old revision finishes its requests
    PROMOTED = "promoted"
    # The stable revision serves everything; the candidate finishes its requests.
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"


class ReleaseEvent(enum.StrEnum):
    WARMED_UP = "warmed_up"
    GATES_PASSED = "gates_passed"
    LAST_GATES_PASSED = "last_gates_passed"  # of the last canary step
    GATE_FAILED = "gate_failed"
    CANDIDATE_LOST = "candidate_lost"  # the candidate cannot be started, or has no replica left
    DRAINED = "drained"
    OPERATOR_PROMOTES = "operator_promotes"
    OPERATOR_ROLLS_BACK = "operator_rolls_back"


TRANSITIONS: dict[tuple[Stage, ReleaseEvent], Stage] = {
    (Stage.WARMING, ReleaseEvent.WARMED_UP): Stage.SHADOW,
    (Stage.WARMING, ReleaseEvent.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.WARMING, ReleaseEvent.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.SHADOW, ReleaseEvent.GATES_PASSED): Stage.CANARY,
    (Stage.SHADOW, ReleaseEvent.GATE_FAILED): Stage.ROLLING_BACK,
    (Stage.SHADOW, ReleaseEvent.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.SHADOW, ReleaseEvent.OPERATOR_PROMOTES): Stage.LAME_DUCK,
    (Stage.SHADOW, ReleaseEvent.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.CANARY, ReleaseEvent.GATES_PASSED): Stage.CANARY,  # the next step
    (Stage.CANARY, ReleaseEvent.LAST_GATES_PASSED): Stage.LAME_DUCK,
    (Stage.CANARY, ReleaseEvent.GATE_FAILED): Stage.ROLLING_BACK,
    (Stage.CANARY, ReleaseEvent.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.CANARY, ReleaseEvent.OPERATOR_PROMOTES): Stage.LAME_DUCK,
    (Stage.CANARY, ReleaseEvent.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.LAME_DUCK, ReleaseEvent.DRAINED): Stage.PROMOTED,
    (Stage.LAME_DUCK, ReleaseEvent.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,  # the old revision still runs
    (Stage.ROLLING_BACK, ReleaseEvent.DRAINED): Stage.ROLLED_BACK,
}
_GATED = (Stage.SHADOW, Stage.CANARY)


class ReleaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gates: GateConfig = GateConfig()
    mirrored_share: ShareOrZero = 0.1
    canary_shares: tuple[float, ...] = (0.01, 0.05, 0.25, 0.5)
    min_stage_s: NotNegative = 60.0  # to pass one; a failing gate ends it at once

    def __post_init__(self) -> None:
        shares = (0.0, *self.canary_shares, 1.0)
        if len(shares) < 3 or not all(low < high for low, high in pairwise(shares)):
            raise ValueError(f"canary shares rise between 0 and 1, unlike {self.canary_shares}")

    @property
    def num_gated_stages(self) -> int:
        return 1 + len(self.canary_shares)


class ReleaseState(msgspec.Struct, frozen=True, kw_only=True):
    stable: str  # revisions
    candidate: str
    stage: Stage = Stage.WARMING
    step: int = 0  # of the canary
    stage_number: int = 0  # rises with every change; evidence is gathered anew from then on
    since_s: float  # when this stage, or step, began
    reason: str = ""  # for the latest change

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.PROMOTED, Stage.ROLLED_BACK)


class TrafficSplit(msgspec.Struct, frozen=True):
    """The shares of requests that the candidate answers, or that are mirrored to it with the answer dropped."""

    candidate_share: float
    mirrored_share: float


class Releases:
    """Applies the rules of releases. Every method returns a new state."""

    def __init__(self, config: ReleaseConfig) -> None:
        self.config = config

    def start(self, stable: str, candidate: str, now: float) -> ReleaseState:
        if stable == candidate:
            raise Conflict(f"The revision {candidate!r} is already the stable one.")
        return ReleaseState(stable=stable, candidate=candidate, since_s=now)

    def happened(
        self, state: ReleaseState, happening: ReleaseEvent, now: float, reason: str = ""
    ) -> ReleaseState:
        """Apply a transition. Raises Conflict if the table has no such transition."""
        stage = TRANSITIONS.get((state.stage, happening))
        if stage is None:
            words = happening.replace("_", " ")
            raise Conflict(f"The release is {state.stage.replace('_', ' ')}: {words!r} cannot follow.")
        goes_on = stage is state.stage is Stage.CANARY
        return replace(
            state,
            stage=stage,
            step=state.step + 1 if goes_on else 0,
            stage_number=state.stage_number + 1,
            since_s=now,
            reason=reason or happening.value,
        )

    def reports(self, state: ReleaseState, evidence: Evidence) -> tuple[GateReport, ...]:
        return judge(
            self.config.gates,
            evidence,
            num_stages=self.config.num_gated_stages,
            compares_answers=state.stage is Stage.SHADOW,
        )

    def judged(self, state: ReleaseState, evidence: Evidence, now: float) -> ReleaseState:
        """Go on, or roll back, by the gates. Returns the same state while the gates are undecided."""
        if state.stage not in _GATED or evidence.stage_number != state.stage_number:
            return state
        reports = self.reports(state, evidence)
        result = overall(reports)
        if result is GateResult.FAILED:
            failed = [f"{r.gate}: {r.sentence}" for r in reports if r.result is GateResult.FAILED]
            return self.happened(state, ReleaseEvent.GATE_FAILED, now, "; ".join(failed))
        if result is GateResult.UNDECIDED or now - state.since_s < self.config.min_stage_s:
            return state
        is_last = state.stage is Stage.CANARY and state.step + 1 == len(self.config.canary_shares)
        return self.happened(
            state, ReleaseEvent.LAST_GATES_PASSED if is_last else ReleaseEvent.GATES_PASSED, now
        )

    def split(self, state: ReleaseState) -> TrafficSplit:
        if state.stage is Stage.SHADOW:
            return TrafficSplit(0.0, self.config.mirrored_share)
        if state.stage is Stage.CANARY:
            return TrafficSplit(self.config.canary_shares[state.step], 0.0)
        if state.stage in (Stage.LAME_DUCK, Stage.PROMOTED):
            return TrafficSplit(1.0, 0.0)
        return TrafficSplit(0.0, 0.0)

    def num_replicas(self, state: ReleaseState, num_stable: int) -> int:
        """Return how many replicas the candidate needs beside this many of the stable revision, for the same load per
        replica: with unequal loads, gates find differences that the candidate does not cause."""
        share = self.split(state).candidate_share
        if state.stage in (Stage.WARMING, Stage.SHADOW):
            ratio = self.config.mirrored_share  # the stable revision answers everything
        else:
            ratio = share / (1.0 - share) if share < 0.5 else 1.0
        return max(1, ceil(ratio * num_stable - 1e-9))

    def revision_for(self, state: ReleaseState, key: str) -> str:
        """Return the revision that answers requests with this key, of a user or a session. As the share grows, keys
        move to the candidate and none moves back."""
        share = self.split(state).candidate_share
        return state.candidate if unit_of(key, state.candidate) < share else state.stable

    def mirrors(self, state: ReleaseState, key: str) -> bool:
        return unit_of(key, state.candidate) < self.split(state).mirrored_share


def unit_of(key: str, salt: str) -> float:
    """Return a number from 0 up to 1 that looks random: the same in every process, another for another release."""
    digest = blake2b(
        key.encode(), digest_size=8, salt=blake2b(salt.encode(), digest_size=16).digest()
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
