"""The gates of a release, and the guard rails of an experiment: is a candidate worse than the stable revision by more
than its limits allow? Pure.

A gate compares the candidate with the stable revision in the same time and traffic, because no absolute limit fits
every model and load. A figure within the limit passes. A figure beyond the limit fails only if chance is an unlikely
cause: the gate tests how often a candidate exactly at the limit would look as bad. Otherwise the gate is undecided
until there are more samples.

A test that is repeated often finds a difference in the end, even where there is none. A gate therefore tests only
when the samples have grown by half, and each test gets a share of the chance of a false alarm, which is a setting for
the whole release.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta

LATENCY_PERCENT = 95
_GROWTH = 1.5  # of samples, from one look to the next


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_requests: Annotated[int, Meta(ge=1)] = 200  # of each revision, for errors and latencies
    min_compared: Annotated[int, Meta(ge=0)] = 50  # mirrored answers, for divergence; 0 needs none
    max_extra_errors: float = 0.005  # share of requests, beyond the stable revision's share
    max_ttft_ratio: float = 1.25  # of the 95th percentiles
    max_itl_ratio: float = 1.25
    latency_slack_s: float = 0.005  # a difference below this is no difference
    max_divergence: float = 0.2  # share of compared answers that differ
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


class Looks:
    """Says when to look at samples that grow."""

    def __init__(self, first: int) -> None:
        self.number = 0
        self.next = max(1, first)

    def is_due(self, count: int) -> bool:
        """Say whether to look at this many samples, and count the look."""
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
