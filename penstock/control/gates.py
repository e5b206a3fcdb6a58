"""Gates: whether a candidate revision is as good as the stable one, by figures of the same time. Knows no stage.

A gate without enough samples says nothing; with enough, it passes or fails. Latencies are compared with the stable
revision's, in the same time and traffic, because no absolute limit fits every model and load.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_requests: Annotated[int, Meta(ge=1)] = 200  # of each revision, for errors and latencies
    min_compared: Annotated[int, Meta(ge=0)] = 50  # mirrored answers, for divergence; 0 needs none
    max_extra_errors: float = 0.005  # share of requests, beyond the stable revision's share
    max_ttft_ratio: float = 1.25  # of the 95th percentiles
    max_itl_ratio: float = 1.25
    latency_slack_s: float = 0.005  # a difference below this is no difference
    max_divergence: float = 0.2  # share of compared answers that differ


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One revision, since the stage began."""

    num_requests: int = 0
    num_errors: int = 0
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """`stage_number` says which stage it was gathered in: evidence from another one proves nothing."""

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
    """One report per gate."""
    return tuple(_reports(config, evidence, compares_answers))


def overall(reports: tuple[GateReport, ...]) -> GateResult:
    """Failed if any gate failed; passed if all passed."""
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
