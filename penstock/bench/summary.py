"""Computes percentiles, throughput and ratios from the outcomes of requests, and shows them as tables for a terminal
or as plots.

Failed requests count as errors and appear in no latency and no throughput. matplotlib comes with the extra `plot` and
is imported only to draw.

`read_drafters` reads from a server's /metrics how many drafted tokens were verified and accepted, and reports them
for one run.

A Penstock server counts by drafter and position. Other servers with vLLM's metrics count drafts, and accepted tokens
by position: their drafts count as one drafter, and as if each had been of the longest length.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.table import Table

from penstock.bench.http import ProtocolError, exchange
from penstock.bench.load import LoadResult, OfflineSummary, Target, Workload
from penstock.core.errors import UsageError
from penstock.core.figures import percentile
from penstock.core.machine import install_command
from penstock.core.messages import HEARTBEAT_INTERVAL_S

SETTLING_S = 2 * HEARTBEAT_INTERVAL_S  # engines report at least that often
_PREFIX = "vllm:spec_decode_num_"


class DrafterReport(msgspec.Struct, frozen=True):
    """Counts of one drafter's tokens, by position in a draft."""

    drafter: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        return self.drafted[0] if self.drafted else 0

    def since(self, before: DrafterReport) -> DrafterReport:
        return DrafterReport(
            self.drafter, _minus(self.drafted, before.drafted), _minus(self.accepted, before.accepted)
        )


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(after, before, fillvalue=0))


async def read_drafters(target: Target, *, settles: bool = False) -> dict[str, DrafterReport]:
    """Return a server's counts so far, by drafter. With `settles`, wait until the metrics know of all that has ended.
    Raises UsageError if the metrics have no such counts."""
    if settles:
        await asyncio.sleep(SETTLING_S)
    try:
        status, body = await exchange(target.endpoint, target.endpoint.request("GET", "/metrics"))
    except (OSError, ProtocolError) as error:
        raise UsageError(f"{target.name} has no readable /metrics: {error}.") from error
    if status != 200:
        raise UsageError(f"{target.name} answered /metrics with status {status}.")
    return parse_drafters(body.decode(), target)


def parse_drafters(page: str, target: Target) -> dict[str, DrafterReport]:
    # By metric, then by drafter, then by position.
    counts: dict[str, dict[str, dict[int, int]]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = sample.labels
                if sample.name.endswith("_total") and labels.get("model_name") == target.model:
                    by_position = counts.setdefault(sample.name, {}).setdefault(labels.get("drafter", ""), {})
                    position = int(labels.get("position", 0))
                    by_position[position] = by_position.get(position, 0) + int(sample.value)
    except ValueError as error:
        raise UsageError(f"The metrics of {target.name} cannot be read: {error}.") from error
    if f"{_PREFIX}drafts_total" not in counts:
        raise UsageError(
            f"The metrics of {target.name} have no counts of drafts for {target.model}.",
            hint="Leave out --speculate-report, or turn on speculation in that server.",
        )
    accepted = counts.get("penstock_drafter_accepted_tokens_total", {})
    drafters = {
        name: DrafterReport(name, _in_order(drafted), _in_order(accepted.get(name, {})))
        for name, drafted in counts.get("penstock_drafter_draft_tokens_total", {}).items()
    }
    num_drafts = counts[f"{_PREFIX}drafts_total"][""][0]
    if not drafters and num_drafts:
        right = _in_order(counts.get(f"{_PREFIX}accepted_tokens_per_pos_total", {}).get("", {}))
        drafters["all"] = DrafterReport("all", (num_drafts,) * max(1, len(right)), right)
    return drafters


def _in_order(by_position: dict[int, int]) -> tuple[int, ...]:
    return tuple(by_position[position] for position in sorted(by_position))


def reports_since(
    before: dict[str, DrafterReport], after: dict[str, DrafterReport]
) -> tuple[DrafterReport, ...]:
    """Return the counts of a run: of the drafters whose drafts were verified in it."""
    nothing = DrafterReport("", (), ())
    reports = (report.since(before.get(name, nothing)) for name, report in after.items())
    return tuple(report for report in reports if report.num_drafts > 0)


def drafts_table(reports: Sequence[DrafterReport]) -> Table:
    table = Table(
        title="Drafts that were verified" if reports else "No draft was verified in this run",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("drafter", no_wrap=True)
    for heading in ("drafts", "tokens", "accepted", "tokens/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted by position, %")
    for report in reports:
        drafted, accepted = sum(report.drafted), sum(report.accepted)
        shares = zip_longest(report.accepted, report.drafted, fillvalue=0)
        table.add_row(
            report.drafter,
            f"{report.num_drafts:,}",
            f"{drafted:,}",
            f"{accepted / drafted:.0%}",
            f"{1 + accepted / report.num_drafts:.2f}",
            " ".join(f"{100 * right / tried:.0f}" if tried else "–" for right, tried in shares),
        )
    return table


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
    # Of each answer, the mean time between tokens, however they came together.
    tpot_ms: Distribution | None = None
    drafters: tuple[DrafterReport, ...] | None = None  # None: not asked for


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
        tpot_ms=Distribution.of_seconds([tpot for o in good if (tpot := o.time_per_token_s) is not None]),
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


def serve_table(summary: Summary) -> Table:
    table = Table(title=f"{summary.server}: {summary.workload}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    _add_distribution(table, "First token, ms", summary.ttft_ms)
    _add_distribution(table, "Per event, ms", summary.itl_ms)
    _add_distribution(table, "Per token, ms", summary.tpot_ms)
    _add_distribution(table, "End to end, ms", summary.e2e_ms)
    return table


def totals_line(summary: Summary) -> str:
    return (
        f"{summary.output_tokens_per_s:,.1f} output tokens/s, {summary.input_tokens_per_s:,.1f} input tokens/s, "
        f"{summary.requests_per_s:,.2f} requests/s; {summary.num_completed} answers and {summary.num_errors} "
        f"errors in {summary.duration_s:,.1f} s; {summary.num_cached_tokens:,} prompt tokens from cache"
    )


def comparison_table(runs: Sequence[Sequence[Summary]]) -> Table:
    """Return a table with one group of rows per workload. Ratios compare the first server with the others."""
    table = Table(
        caption="Latencies in ms. (n ×): how many times better the first server is.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("workload", "server"):
        table.add_column(heading)
    for heading in ("output tok/s", "TTFT p50", "ITL p50", "e2e p50", "errors"):
        table.add_column(heading, justify="right")
    for servers in runs:
        ours = servers[0]
        for summary in servers:
            ratios = NO_RATIOS if summary is ours else compare(ours, summary)
            table.add_row(
                summary.workload if summary is ours else "",
                summary.server,
                _figure(summary.output_tokens_per_s, ratios.output_tokens_per_s),
                _figure(median_of(summary.ttft_ms), ratios.ttft_p50),
                _figure(median_of(summary.itl_ms), ratios.itl_p50),
                _figure(median_of(summary.e2e_ms), ratios.e2e_p50),
                str(summary.num_errors),
                end_section=summary is servers[-1],
            )
    return table


def offline_table(summary: OfflineSummary) -> Table:
    table = Table(
        title=f"{summary.model}, {summary.num_prompts} prompts at once",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("input tokens", "output tokens", "seconds", "output tok/s", "all tok/s"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{summary.num_input_tokens:,}",
        f"{summary.num_output_tokens:,}",
        f"{summary.duration_s:,.2f}",
        f"{summary.output_tokens_per_s:,.1f}",
        f"{summary.total_tokens_per_s:,.1f}",
    )
    return table


def _add_distribution(table: Table, name: str, values: Distribution | None) -> None:
    if values is None:
        table.add_row(name, *(["–"] * 6))
        return
    figures = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    table.add_row(name, *(f"{figure:,.1f}" for figure in figures))


def _figure(value: float | None, ratio: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.1f}" + ("" if ratio is None else f" ({ratio:.2f} ×)")


def require_matplotlib() -> None:
    """Raise UsageError before a long measurement, not after it, if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "A plot needs matplotlib, which is not installed.", hint=f"Run `{install_command('plot')}`."
        ) from error
    matplotlib.use("Agg")  # files only, no window system


def check_plot(path: Path) -> None:
    """Raise UsageError before a long run, not after it, if a plot could not be drawn or written there."""
    require_matplotlib()
    from matplotlib.figure import Figure

    if not path.absolute().parent.is_dir():
        raise UsageError(f"There is no folder for the picture {path}.")
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise UsageError(
            f"A picture cannot be written as {path.suffix}.", hint=f"Known are {', '.join(sorted(kinds))}."
        )


def plot_latencies(path: Path, summary: Summary, result: LoadResult) -> None:
    """Draw the cumulative distributions of the three latencies of one run."""
    require_matplotlib()
    from matplotlib.figure import Figure

    good = [outcome for outcome in result.outcomes if outcome.error is None]
    panels = {
        "Time to first token, ms": [o.first_token_s - o.start_s for o in good if o.first_token_s is not None],
        "Per event, ms": [gap for outcome in good for gap in outcome.gaps_s],
        "End to end, ms": [o.end_s - o.start_s for o in good if o.end_s is not None],
    }
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(
        f"{summary.server}: {summary.workload}, {summary.output_tokens_per_s:,.1f} output tokens/s",
        fontsize=11,
    )
    for axes, (title, samples) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        ordered = [1e3 * sample for sample in sorted(samples)]
        shares = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
        axes.plot(ordered, shares, drawstyle="steps-post")
        axes.set(xlabel=title, ylabel="samples, %", ylim=(0, 101))
        axes.grid(alpha=0.3)
    _save(figure, path)


def plot_comparison(path: Path, runs: Sequence[Sequence[Summary]]) -> None:
    """Draw the output throughput of every server for every workload."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 2.2 * len(runs), 4.5), layout="constrained")
    axes = figure.subplots()
    names = [summary.server for summary in runs[0]]
    width = 0.8 / len(names)
    for position, name in enumerate(names):
        heights = [servers[position].output_tokens_per_s for servers in runs]
        offsets = [group + (position - (len(names) - 1) / 2) * width for group in range(len(runs))]
        bars = axes.bar(offsets, heights, width, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(
        range(len(runs)), [servers[0].workload.replace(", ", "\n") for servers in runs], fontsize=8
    )
    axes.set_ylabel("output tokens/s")
    axes.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an unknown file type
        raise UsageError(f"The plot {path} cannot be written: {error}.") from error
