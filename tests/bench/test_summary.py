from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock.bench.http import Endpoint
from penstock.bench.load import ClosedLoop, LoadResult, Outcome, Target, Workload
from penstock.bench.summary import (
    Distribution,
    Summary,
    compare,
    comparison_table,
    median_run,
    plot_comparison,
    plot_latencies,
    serve_table,
    summarize,
    totals_line,
    write_json,
)
from penstock.core.errors import UsageError
from penstock.core.figures import percentile
from penstock.core.machine import install_command

TARGET = Target("ours", Endpoint.parse("http://127.0.0.1:1"), "m")
WORKLOAD = Workload(arrivals=ClosedLoop(2), num_requests=3)


def outcome(start: float, first: float, gaps: list[float], error: str | None = None) -> Outcome:
    last = first + sum(gaps)
    return Outcome(
        num_input_tokens=100,
        start_s=start,
        first_token_s=first,
        last_token_s=last,
        end_s=last,
        gaps_s=gaps,
        num_output_tokens=len(gaps) + 1,
        error=error,
    )


RESULT = LoadResult(
    [
        outcome(0.0, 0.5, [0.1, 0.1, 0.3]),
        outcome(1.0, 1.25, [0.2]),
        outcome(1.0, 9.0, [5.0], error="status 500: no"),
    ],
    duration_s=2.0,
)


def summary(throughput: float, latency_ms: float | None) -> Summary:
    spread = None if latency_ms is None else Distribution(*[latency_ms] * 6)
    base = summarize(TARGET, WORKLOAD, RESULT)
    return msgspec.structs.replace(
        base, output_tokens_per_s=throughput, ttft_ms=spread, itl_ms=spread, e2e_ms=spread
    )


def test_figures_come_from_completed_requests_alone() -> None:
    figures = summarize(TARGET, WORKLOAD, RESULT)
    assert (figures.num_completed, figures.num_errors, figures.errors) == (2, 1, {"status 500: no": 1})
    assert (figures.num_input_tokens, figures.num_output_tokens) == (200, 6)
    assert (figures.output_tokens_per_s, figures.input_tokens_per_s, figures.requests_per_s) == (3, 100, 1)
    assert figures.ttft_ms is not None
    assert figures.itl_ms is not None
    assert figures.e2e_ms is not None
    assert figures.ttft_ms.mean == pytest.approx(375)
    assert figures.itl_ms.max == pytest.approx(300)
    assert figures.itl_ms.mean == pytest.approx(175)
    assert figures.e2e_ms.p99 == pytest.approx(1000)


def test_percentiles_are_samples() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0
    assert Distribution.of_seconds([]) is None


def test_ratios_above_one_mean_ahead_for_speed_and_for_latency() -> None:
    ratios = compare(summary(300, 10), summary(100, 40))
    assert ratios.output_tokens_per_s == pytest.approx(3)
    assert ratios.ttft_p50 == ratios.itl_p50 == ratios.e2e_p50 == pytest.approx(4)
    assert compare(summary(300, 10), summary(0, None)).output_tokens_per_s is None


def test_the_median_run_is_a_whole_run() -> None:
    runs = [summary(30, 1), summary(10, 2), summary(20, 3)]
    assert median_run(runs) is runs[2]


def test_tables_hold_the_figures() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(serve_table(summary(300, 10)))
    console.print(totals_line(summary(300, 10)))
    console.print(comparison_table([[summary(300, 10), summary(100, 40)]]))
    text = console.export_text()
    assert "300.0 output tokens/s" in text
    assert "100.0 (3.00 ×)" in text
    assert "40.0 (4.00 ×)" in text


def test_reports_and_plots_are_written(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", {"runs": [[summary(300, 10)]]})
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0][0]["output_tokens_per_s"] == 300
    plot_latencies(tmp_path / "one.png", summary(300, 10), RESULT)
    plot_comparison(tmp_path / "many.png", [[summary(300, 10), summary(100, 40)]])
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("one.png", "many.png"))


def test_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_json(tmp_path / "missing" / "report.json", {})
    with pytest.raises(UsageError, match="cannot be written"):
        plot_latencies(tmp_path / "plot.unknown", summary(300, 10), RESULT)


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError) as caught:
        plot_latencies(tmp_path / "plot.png", summary(300, 10), RESULT)
    assert install_command("plot") in (caught.value.hint or "")
