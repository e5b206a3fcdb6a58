"""Draws results. matplotlib comes with the extra `plot` and is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.bench.load import LoadResult
from penstock.bench.summary import Summary
from penstock.core.errors import UsageError
from penstock.core.installation import install_command


def require_matplotlib() -> None:
    """Raise UsageError before a long measurement, not after it, if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "A plot needs matplotlib, which is not installed.", hint=f"Run `{install_command('plot')}`."
        ) from error
    matplotlib.use("Agg")  # files only, no window system


def plot_latencies(path: Path, summary: Summary, result: LoadResult) -> None:
    """Draw the cumulative distributions of the three latencies of one run."""
    require_matplotlib()
    from matplotlib.figure import Figure

    good = [outcome for outcome in result.outcomes if outcome.error is None]
    panels = {
        "Time to first token, ms": [o.first_token_s - o.start_s for o in good if o.first_token_s is not None],
        "Between tokens, ms": [gap for outcome in good for gap in outcome.gaps_s],
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
