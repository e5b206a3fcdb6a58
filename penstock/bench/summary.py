"""Computes percentiles, throughput and ratios from the outcomes of requests.

Failed requests count as errors and appear in no latency and no throughput.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.load import LoadResult, Target
from penstock.bench.workload import Workload
from penstock.core.errors import UsageError
from penstock.core.figures import percentile


class Distribution(msgspec.Struct, frozen=True):
    """Statistics of a list of durations, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, samples: Sequence[float]) -> Distribution | None:
        """Return the statistics, or None if there is no sample."""
        if not samples:
            return None
        ordered = sorted(samples)

        def milliseconds(percent: int) -> float:
            return 1e3 * percentile(ordered, percent)

        return cls(
            mean=1e3 * statistics.fmean(ordered),
            p50=milliseconds(50),
            p90=milliseconds(90),
            p95=milliseconds(95),
            p99=milliseconds(99),
            max=1e3 * ordered[-1],
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one workload on one server."""

    server: str
    model: str
    workload: str
    seed: int
    num_completed: int
    num_errors: int
    errors: dict[str, int]  # by message
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


def summarize(target: Target, workload: Workload, result: LoadResult) -> Summary:
    good = [outcome for outcome in result.outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in result.outcomes if outcome.error is not None)
    num_input = sum(outcome.num_input_tokens for outcome in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    return Summary(
        server=target.name,
        model=target.model,
        workload=str(workload),
        seed=workload.seed,
        num_completed=len(good),
        num_errors=errors.total(),
        errors=dict(errors.most_common(5)),
        duration_s=result.duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in good),
        output_tokens_per_s=num_output / result.duration_s,
        input_tokens_per_s=num_input / result.duration_s,
        requests_per_s=len(good) / result.duration_s,
        ttft_ms=Distribution.of_seconds(
            [o.first_token_s - o.start_s for o in good if o.first_token_s is not None]
        ),
        itl_ms=Distribution.of_seconds([gap for outcome in good for gap in outcome.gaps_s]),
        e2e_ms=Distribution.of_seconds([o.end_s - o.start_s for o in good if o.end_s is not None]),
    )


def median_run(runs: Sequence[Summary]) -> Summary:
    """Return the run with the median output throughput: a whole run, so that its figures are consistent."""
    return sorted(runs, key=lambda run: run.output_tokens_per_s)[(len(runs) - 1) // 2]


class Ratios(msgspec.Struct, frozen=True):
    """Return how many times better the first server is than a peer: above 1, it is ahead. None without a figure."""

    output_tokens_per_s: float | None
    ttft_p50: float | None
    itl_p50: float | None
    e2e_p50: float | None


NO_RATIOS = Ratios(None, None, None, None)


def compare(ours: Summary, peer: Summary) -> Ratios:
    return Ratios(
        output_tokens_per_s=_ratio(ours.output_tokens_per_s, peer.output_tokens_per_s),
        ttft_p50=_ratio(median_of(peer.ttft_ms), median_of(ours.ttft_ms)),
        itl_p50=_ratio(median_of(peer.itl_ms), median_of(ours.itl_ms)),
        e2e_p50=_ratio(median_of(peer.e2e_ms), median_of(ours.e2e_ms)),
    )


def median_of(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.p50


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def write_json(path: Path, report: Any) -> None:
    """Write structs, dataclasses or plain containers as indented JSON."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise UsageError(f"The report {path} cannot be written: {error.strerror}.") from error
