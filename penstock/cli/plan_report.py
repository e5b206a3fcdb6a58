"""The output of `penstock plan`: rows for JSON and for the table, and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import stdout_console
from penstock.core.errors import UsageError
from penstock.core.figures import format_bytes

if TYPE_CHECKING:
    from penstock.planner.capacity import Estimate, Plan, Targets, Traffic
    from penstock.planner.roofline import Layout
    from penstock.planner.shapes import ModelShape

_FIGURES = ("fits", "TTFT", "ITL", "req/s", "need", "$/h", "$/month", "$/M")


def num_replicas(guess: Estimate, traffic: Traffic) -> int:
    return -(-traffic.requests_per_s // guess.requests_per_s).__int__()


def plan_row(
    layout: Layout, guess: Estimate, traffic: Traffic, checked: Plan | UsageError | None
) -> dict[str, Any]:
    plan = None if isinstance(checked, UsageError) else checked
    if plan is not None:
        replicas = plan.num_replicas
    else:
        replicas = num_replicas(guess, traffic) if guess.is_possible and checked is None else 0
    dollars = replicas * layout.dollars_per_hour
    return {
        "hardware": layout.hardware.name,
        "layout": layout.name,
        "devices_per_replica": layout.num_devices,
        "tensor_parallel": layout.tensor_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "format": layout.weights.name,
        "weight_bytes": round(layout.weight_bytes),
        "kv_bytes_per_token": round(layout.kv_bytes_per_token),
        "state_bytes_per_sequence": layout.model.state_bytes,
        "contexts": layout.contexts(round(traffic.mean_prompt + traffic.mean_output)),
        "ttft_s": guess.ttft_s,
        "itl_s": guess.itl_s,
        "requests_per_s_per_replica": guess.requests_per_s,
        "replicas": replicas or None,
        "dollars_per_hour": dollars or None,
        "dollars_per_month": dollars * 730 or None,
        "dollars_per_million_tokens": dollars / (traffic.requests_per_s * traffic.mean_output * 0.0036) or None,
        "binds": "queues, in the simulator" if isinstance(checked, UsageError) else guess.binds,
        "simulated": None if plan is None else [
            {"replicas": point.num_replicas, "share": point.share, "ttft_p95_s": point.ttft_p95_s,
             "itl_p95_s": point.itl_p95_s, "output_tokens_per_s": point.output_tokens_per_s}
            for point in plan.curve
        ],
    }  # fmt: skip


def print_plans(shape: ModelShape, rows: list[dict[str, Any]], traffic: Traffic, targets: Targets) -> None:
    from rich.table import Table

    console = stdout_console()
    console.print(
        f"{shape.name}: {shape.num_parameters / 1e9:.2f} B parameters, {traffic.requests_per_s:.3g} requests/s of "
        f"{traffic.mean_prompt:.0f} tokens in and {traffic.mean_output:.0f} out; {targets.share:.0%} within "
        f"{targets.ttft_s * 1e3:.0f} ms to the first token and {targets.itl_s * 1e3:.0f} ms between tokens. "
        f"{_sizes(rows)}"
    )
    table = Table("hardware", *_FIGURES, "what binds", box=None, pad_edge=False, padding=(0, 1))
    table.columns[0].no_wrap = table.columns[-1].no_wrap = True
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in rows:
        dollars = row["dollars_per_hour"]
        money = (
            f"{dollars:,.2f}", f"{row['dollars_per_month']:,.0f}", f"{row['dollars_per_million_tokens']:.2f}"
        ) if dollars is not None else ("—", "—", "—")  # fmt: skip
        table.add_row(
            row["layout"] + (f" {row['format']}" if len({each["format"] for each in rows}) > 1 else ""),
            f"{row['contexts']:,}",
            f"{row['ttft_s'] * 1e3:.0f}",
            f"{row['itl_s'] * 1e3:.1f}",
            f"{row['requests_per_s_per_replica']:.2f}",
            f"{row['replicas'] or '—'}{'✓' if row['simulated'] else ''}",
            *money,
            row["binds"],
        )
    console.print(table)
    console.print(
        "fits: contexts in memory. Times in ms; TTFT of a prompt that need not wait. req/s of one replica; need: "
        "replicas; $/M: a million output tokens. Prices are examples (--price). ✓ checked in the simulator."
    )
    for row in rows:
        for point in row["simulated"] or ():
            console.print(
                f"{row['hardware']}, {point['replicas']} replica{'s' if point['replicas'] > 1 else ''}: "
                f"{point['share']:.1%} within targets, "
                f"TTFT p95 {point['ttft_p95_s'] * 1e3:.0f} ms, ITL p95 {point['itl_p95_s'] * 1e3:.1f} ms, "
                f"{point['output_tokens_per_s']:,.0f} tokens/s"
            )


def _sizes(rows: list[dict[str, Any]]) -> str:
    sizes = {row["format"]: (row["weight_bytes"], row["kv_bytes_per_token"]) for row in rows}
    states = rows[0]["state_bytes_per_sequence"]
    return " ".join(
        f"In {name}: {format_bytes(weights)} of weights, {format_bytes(kv)} of KV per token"
        + (f", {format_bytes(states)} of states per request." if states else ".")
        for name, (weights, kv) in sizes.items()
    )


def plot_plans(path: Path, plans: list[Plan], targets: Targets) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for each in plans:
        label = each.layout.name
        axes.plot(
            [point.num_replicas for point in each.curve],
            [100 * point.share for point in each.curve],
            marker="o",
            label=label,
        )
    axes.axhline(100 * targets.share, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="replicas", ylabel="requests within their targets, %", ylim=(0, 102))
    axes.legend()
    figure.savefig(path)
