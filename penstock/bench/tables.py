"""Formats summaries as tables for a terminal, with rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from penstock.bench.offline import OfflineSummary
from penstock.bench.summary import NO_RATIOS, Distribution, Summary, compare, median_of


def serve_table(summary: Summary) -> Table:
    table = Table(title=f"{summary.server}: {summary.workload}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    _add_distribution(table, "First token, ms", summary.ttft_ms)
    _add_distribution(table, "Between tokens, ms", summary.itl_ms)
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
