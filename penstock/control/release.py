"""A release as a state machine in a table: warm up, shadow, canary by steps, then promotion or rollback. Pure.

Gates stand between the stages. A gate compares the candidate with the stable revision in the same time and traffic,
because no absolute limit fits every model and load. Without enough samples a gate neither passes nor fails.

The state is plain data that survives a restart as JSON; its times are of the clock that the caller passes as `now`,
which must survive a restart too. The cluster room carries the state out: it starts replicas, mirrors and splits
traffic.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from penstock.core.errors import Conflict


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_requests: Annotated[int, Meta(ge=1)] = 200  # of each revision, for errors and latencies
    min_compared: Annotated[int, Meta(ge=0)] = 50  # mirrored answers, for divergence; 0 needs none
    max_extra_errors: float = 0.005  # share of requests, beyond the stable revision's share
    max_ttft_ratio: float = 1.25  # of the 95th percentiles
    max_itl_ratio: float = 1.25
    latency_slack_s: float = 0.005  # a difference below this is no difference
    max_divergence: float = 0.2  # share of compared answers that differ


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one revision since the stage began."""

    num_requests: int = 0
    num_errors: int = 0
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of both revisions. `stage_number` is the stage of the evidence: evidence of another stage proves
    nothing."""

    stage_number: int
    stable: Figures = Figures()
    candidate: Figures = Figures()
    num_compared: int = 0
    num_diverged: int = 0


class GateResult(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


class GateReport(msgspec.Struct, frozen=True):
    gate: str
    result: GateResult
    sentence: str


def judge(config: GateConfig, evidence: Evidence, *, compares_answers: bool) -> tuple[GateReport, ...]:
    """Return one report per gate."""
    return tuple(_reports(config, evidence, compares_answers))


def overall(reports: tuple[GateReport, ...]) -> GateResult:
    """Return failed if any gate failed, passed if all gates passed, and else undecided."""
    results = {report.result for report in reports}
    for result in (GateResult.FAILED, GateResult.UNDECIDED):
        if result in results:
            return result
    return GateResult.PASSED


def _reports(config: GateConfig, evidence: Evidence, compares_answers: bool) -> Iterator[GateReport]:
    stable, candidate = evidence.stable, evidence.candidate
    num_requests = min(stable.num_requests, candidate.num_requests)
    if num_requests < config.min_requests:
        missing = f"{num_requests} of {config.min_requests} requests"
        for gate in ("errors", "ttft", "itl"):
            yield GateReport(gate, GateResult.UNDECIDED, missing)
    else:
        yield _errors(config, stable, candidate)
        yield _latency("ttft", stable.ttft_p95_s, candidate.ttft_p95_s, config.max_ttft_ratio, config)
        yield _latency("itl", stable.itl_p95_s, candidate.itl_p95_s, config.max_itl_ratio, config)
    if compares_answers:
        yield _divergence(config, evidence)


def _errors(config: GateConfig, stable: Figures, candidate: Figures) -> GateReport:
    ours = candidate.num_errors / candidate.num_requests
    allowed = stable.num_errors / stable.num_requests + config.max_extra_errors
    return GateReport("errors", _result(ours <= allowed), f"{ours:.2%} failed, and {allowed:.2%} may")


def _latency(
    gate: str, stable_s: float | None, candidate_s: float | None, max_ratio: float, config: GateConfig
) -> GateReport:
    if stable_s is None or candidate_s is None:
        return GateReport(gate, GateResult.UNDECIDED, "no request got that far")
    allowed_s = max(stable_s * max_ratio, stable_s + config.latency_slack_s)
    sentence = f"p95 is {candidate_s * 1e3:.1f} ms, and may be {allowed_s * 1e3:.1f} ms"
    return GateReport(gate, _result(candidate_s <= allowed_s), sentence)


def _divergence(config: GateConfig, evidence: Evidence) -> GateReport:
    if evidence.num_compared < config.min_compared:
        missing = f"{evidence.num_compared} of {config.min_compared} answers compared"
        return GateReport("divergence", GateResult.UNDECIDED, missing)
    share = evidence.num_diverged / max(1, evidence.num_compared)
    sentence = f"{share:.1%} of answers differ, and {config.max_divergence:.1%} may"
    return GateReport("divergence", _result(share <= config.max_divergence), sentence)


def _result(is_good: bool) -> GateResult:
    return GateResult.PASSED if is_good else GateResult.FAILED


class Stage(enum.StrEnum):
    WARMING = "warming"  # the candidate's replicas start
    SHADOW = "shadow"  # mirrored requests; answers are compared and dropped
    CANARY = "canary"  # a share of requests, by steps
    LAME_DUCK = "lame_duck"  # the candidate serves everything; the old revision finishes what it has
    PROMOTED = "promoted"
    ROLLING_BACK = "rolling_back"  # the stable revision serves everything; the candidate finishes what it has
    ROLLED_BACK = "rolled_back"


class Happening(enum.StrEnum):
    WARMED_UP = "warmed_up"
    GATES_PASSED = "gates_passed"
    LAST_GATES_PASSED = "last_gates_passed"  # of the last canary step
    GATE_FAILED = "gate_failed"
    CANDIDATE_LOST = "candidate_lost"  # the candidate cannot be started, or has no replica left
    DRAINED = "drained"
    OPERATOR_PROMOTES = "operator_promotes"
    OPERATOR_ROLLS_BACK = "operator_rolls_back"


TRANSITIONS: dict[tuple[Stage, Happening], Stage] = {
    (Stage.WARMING, Happening.WARMED_UP): Stage.SHADOW,
    (Stage.WARMING, Happening.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.WARMING, Happening.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.SHADOW, Happening.GATES_PASSED): Stage.CANARY,
    (Stage.SHADOW, Happening.GATE_FAILED): Stage.ROLLING_BACK,
    (Stage.SHADOW, Happening.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.SHADOW, Happening.OPERATOR_PROMOTES): Stage.LAME_DUCK,
    (Stage.SHADOW, Happening.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.CANARY, Happening.GATES_PASSED): Stage.CANARY,  # the next step
    (Stage.CANARY, Happening.LAST_GATES_PASSED): Stage.LAME_DUCK,
    (Stage.CANARY, Happening.GATE_FAILED): Stage.ROLLING_BACK,
    (Stage.CANARY, Happening.CANDIDATE_LOST): Stage.ROLLING_BACK,
    (Stage.CANARY, Happening.OPERATOR_PROMOTES): Stage.LAME_DUCK,
    (Stage.CANARY, Happening.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,
    (Stage.LAME_DUCK, Happening.DRAINED): Stage.PROMOTED,
    (Stage.LAME_DUCK, Happening.OPERATOR_ROLLS_BACK): Stage.ROLLING_BACK,  # the old revision still runs
    (Stage.ROLLING_BACK, Happening.DRAINED): Stage.ROLLED_BACK,
}
_GATED = (Stage.SHADOW, Stage.CANARY)


class ReleaseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gates: GateConfig = GateConfig()
    mirrored_share: float = 0.1
    canary_shares: tuple[float, ...] = (0.01, 0.05, 0.25, 0.5)
    min_stage_s: float = 60.0  # to pass one; a failing gate ends it at once

    def __post_init__(self) -> None:
        shares = (0.0, *self.canary_shares, 1.0)
        if len(shares) < 3 or any(low >= high for low, high in pairwise(shares)):
            raise ValueError(f"canary shares rise between 0 and 1, unlike {self.canary_shares}")


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
        self, state: ReleaseState, happening: Happening, now: float, reason: str = ""
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
        return judge(self.config.gates, evidence, compares_answers=state.stage is Stage.SHADOW)

    def judged(self, state: ReleaseState, evidence: Evidence, now: float) -> ReleaseState:
        """Go on, or roll back, by the gates. Returns the same state while the gates are undecided."""
        if state.stage not in _GATED or evidence.stage_number != state.stage_number:
            return state
        reports = self.reports(state, evidence)
        result = overall(reports)
        if result is GateResult.FAILED:
            failed = [f"{r.gate}: {r.sentence}" for r in reports if r.result is GateResult.FAILED]
            return self.happened(state, Happening.GATE_FAILED, now, "; ".join(failed))
        if result is GateResult.UNDECIDED or now - state.since_s < self.config.min_stage_s:
            return state
        is_last = state.stage is Stage.CANARY and state.step + 1 == len(self.config.canary_shares)
        return self.happened(state, Happening.LAST_GATES_PASSED if is_last else Happening.GATES_PASSED, now)

    def split(self, state: ReleaseState) -> TrafficSplit:
        if state.stage is Stage.SHADOW:
            return TrafficSplit(0.0, self.config.mirrored_share)
        if state.stage is Stage.CANARY:
            return TrafficSplit(self.config.canary_shares[state.step], 0.0)
        if state.stage in (Stage.LAME_DUCK, Stage.PROMOTED):
            return TrafficSplit(1.0, 0.0)
        return TrafficSplit(0.0, 0.0)

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
